"""The Bayesian neural network: Gaussians, flat weights, the Pyro model and its ELBO."""

import warnings

# Pyro's samplers, of which none is used, ask for bars that a notebook without ipywidgets lacks.
warnings.filterwarnings("ignore", "IProgress not found")
