"""How a run is followed: the terminal, log.txt, Weights & Biases."""

from collections.abc import Mapping, Sequence
from typing import Any


class Watcher:
    """Somebody who wants to know how the rounds go; what is not overridden is not of interest."""

    def round_started(self, round: int, clients: Sequence[int]) -> None:
        """A round begins with these clients."""

    def client_done(self, client: int) -> None:
        """One client of the round has answered, or has failed."""

    def round_done(self, record: Mapping[str, Any]) -> None:
        """The round is over; `record` is its line of metrics.jsonl."""
