"""What predicts: the prototype of every class as a linear row or as a posterior in feature space."""
