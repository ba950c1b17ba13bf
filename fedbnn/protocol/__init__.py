"""What the parts of a federation hand to each other: states, messages, and the stream of images."""
