"""The Bayesian neural network: Gaussians, flat weights, the Pyro model and its ELBO."""
