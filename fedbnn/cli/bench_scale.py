"""Time and memory of a round against the number of registered clients, and memory against the participants.

A round must cost what its participants cost, however many are registered; and its memory must not grow with the
participants either, since their updates are folded one by one.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

SMALL = {
    "stream.sources": "digits",
    "stream.tasks": "2",
    "stream.rounds_per_task": "6",
    "network": "mlp",
    "client.epochs": "1",
    "evaluate.every": "0",
    "track.wandb": "off",
}
LARGE = {**SMALL, "stream.rounds_per_task": "2", "network.hidden": "[1000, 1000]"}
PARTICIPANTS, REGISTERED = 10, 1000


def measure(
    registered: Sequence[int], participants: Sequence[int], method: str
) -> list[dict[str, Any]]:
    """Short runs, each in a process of its own: a small network for the registered, 1.1 million weights for the others."""
    small = [_one(clients, PARTICIPANTS, {**SMALL, "method": method}) for clients in registered]
    return small + [_one(REGISTERED, count, {**LARGE, "method": method}) for count in participants]


def _one(registered: int, participants: int, settings: Mapping[str, str]) -> dict[str, Any]:
    """Median seconds of a round (after the first), the start-up, and the peak memory of the process."""
    asked = {
        "stream.clients": str(registered),
        "stream.clients_per_round": str(participants),
        "stream.samples_per_round": str(8 * participants),
        **settings,
    }
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = [word for key, value in asked.items() for word in (f"--{key}", value)]
        command = [sys.executable, "-m", "train", "--run_dir", str(run), *words]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(
                f"the run with {registered} clients ended with exit code {process.returncode}"
            )
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["seconds"]["round"] - line["seconds"]["evaluate"] for line in lines[1:]]
    return {
        "registered": registered,
        "participants": participants,
        "round_seconds": median(seconds),
        "cpu_seconds": usage.ru_utime,
        "peak_mib": usage.ru_maxrss / 1024,
    }
