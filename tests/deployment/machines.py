"""A federation on the loopback interface as the tests want it: rounds to wait for, faults to make.
"""

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fedbnn.federation.engines.flower.loopback import CLIENT, Loopback, descendants, until
from tests.cli.command import ROOT, environment

SMALL = """
name: small
stream: {sources: digits, tasks: 2, rounds_per_task: 1, clients: 3, clients_per_round: 3}
network: {name: mlp, hidden: [16]}
method: scaffold
client: {epochs: 1, batch_size: 32}
track: {wandb: "off"}
"""


class Machines(Loopback):
    """The processes of one federation, with a small experiment in its folder."""

    def __init__(self, home: Path, secure: Sequence[str] = (), link: Sequence[str] = ()) -> None:
        super().__init__(home, ROOT / "flower_app", secure, link)
        (home / "small.yaml").write_text(SMALL, encoding="utf-8")

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "PYTHONPATH": environment()["PYTHONPATH"]}

    def committed(self, run: str, number: int) -> None:
        """Wait until a round is on disk."""
        where = self.home / run / "state" / f"round-{number:06d}"
        until(f"round {number}", where.is_dir)

    def finished(self, run: str) -> None:
        """Wait until a run is complete."""
        until("the end of the run", (self.home / run / "results.json").exists)

    def log(self, run: str) -> str:
        return (self.home / run / "log.txt").read_text(encoding="utf-8")

    def freeze(self, name: str) -> None:
        """Stop a machine and all that runs on it, without an end."""
        top = self.running[name].pid
        for pid in [top, *descendants(top)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def next_order(self, name: str) -> int:
        """Wait for an order that is not at a site yet; the process that follows it."""
        before = self.pids(name, CLIENT)

        def fresh() -> list[int]:
            return [pid for pid in self.pids(name, CLIENT) if pid not in before]

        return int(until(f"an order at {name}", fresh)[0])
