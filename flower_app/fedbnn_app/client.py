"""The app of a site."""

from fedbnn.cli.site import client as app

__all__ = ["app"]
