"""The Flower app of a site: what a SuperNode starts for every order. Needs the extra `flower`.

It imports little: what trains is composed when the first order to train comes.
"""

from fedbnn.federation.engines.flower.client import client_app

client = client_app("fedbnn.cli.compose:client_runner")
