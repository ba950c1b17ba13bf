"""The server: rounds, what a run is made of, and where clients run."""
