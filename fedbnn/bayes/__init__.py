"""The Bayesian neural network: Gaussians, the flat layout of weights, the Pyro model and its
ELBO.
"""
