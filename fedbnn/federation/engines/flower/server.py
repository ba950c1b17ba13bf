"""The ServerApp: Flower calls it with a grid, and it plays a run on the sites that are there."""

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedbnn.errors import Exit

Play = Callable[[Grid, Mapping[str, Any]], int]


class Ended(Exception):
    """A run ended otherwise than done; Flower reports the text as the end of its own run."""


def server_app(play: Play) -> ServerApp:
    """An app that plays with the grid and the run configuration, and fails with the exit code."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        code = play(grid, context.run_config)
        if code:
            name = Exit(code).name.lower() if code in set(Exit) else "unexpected"
            raise Ended(f"fedbnn ended with exit code {code} ({name.replace('_', ' ')})")

    return app
