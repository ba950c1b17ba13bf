"""What Flower starts: the two apps of the FedBNN that is installed where they run."""
