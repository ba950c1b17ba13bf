"""What the server lets in, and how far one client may move it."""
