"""The app of a site: what a SuperNode starts for every order.

It imports little: what trains is composed when the first order to train comes.
"""

from fedbnn.federation.engines.flower.client import client_app

app = client_app("fedbnn.cli.compose:client_runner")

__all__ = ["app"]
