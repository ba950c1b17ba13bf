"""The Flower app of the server: what `flwr run` starts on a SuperLink.

The words of `python train.py` stand in the run configuration under `fedbnn`; the server reads the
YAML file they name, and sends the complete configuration to the sites. Needs the extra `flower`.
"""

import shlex
from collections.abc import Mapping
from functools import partial
from typing import Any

from fedbnn.cli import train
from fedbnn.cli.main import ended
from fedbnn.config.parse import Parsed
from fedbnn.errors import ConfigError
from fedbnn.federation.engines.flower.engine import FlowerEngine, server_app


def play(grid: Any, settings: Mapping[str, Any]) -> int:
    """`python train.py WORDS`, with the clients on the sites of the grid; the exit code."""
    words = [*shlex.split(str(settings["fedbnn"])), "--engine", "flower"]
    return ended(lambda: train.main(words, partial(on_sites, grid)))


def on_sites(grid: Any, parsed: Parsed) -> FlowerEngine:
    """The engine of a deployment; what clients keep for themselves stays on their sites."""
    method = parsed.build("method")
    if method.server_reads:
        what = f"{parsed['method']['name']} lets the server read what its clients keep"
        fix = "on sites that stays with them; choose another method, or share: global"
        raise ConfigError(what, "method.name", fix)
    late = parsed.build("federation").rounds
    return FlowerEngine(grid, parsed.values, parsed["gate"]["deadline_seconds"], late=late)


server = server_app(play)
