"""The app of the server."""

from fedbnn.cli.flower import server as app

__all__ = ["app"]
