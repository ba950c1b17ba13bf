"""How a run is followed: the terminal, log.txt, Weights & Biases."""
