"""How good a model is: predictions in both regimes, metrics, results."""
