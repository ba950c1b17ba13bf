"""Flower as the engine: the only place that knows it. Importing this package does not import it.

`wire` turns our bytes into records and back, `engine` finds the node that serves a client and
is the server's side of any Flower federation, `client` is the site's side, and `simulation` runs
both on one machine. The loop of the server, the gate, the fold and the ledger are those of every
engine. Flower and Ray report nothing about their use unless the environment asks them to.
"""

import os

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
for name, value in QUIET.items():
    os.environ.setdefault(name, value)
