"""Time and memory of a round against the number of registered clients: it must depend on the participants alone."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

SMALL = {
    "stream.sources": "digits", "stream.tasks": "2", "stream.rounds_per_task": "6", "stream.clients_per_round": "10",
    "stream.samples_per_client": "8", "stream.replacement": "true", "network": "mlp", "client.epochs": "1",
    "evaluate.every": "0", "track.wandb": "off",
}  # fmt: skip


def measure(registered: Sequence[int], method: str) -> list[dict[str, Any]]:
    """A short run for each number of registered clients, each in a process of its own."""
    return [_one(clients, method) for clients in registered]


def _one(clients: int, method: str) -> dict[str, Any]:
    """Median seconds of a round (after the first), the start-up, and the peak memory of the process."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = [word for key, value in SMALL.items() for word in (f"--{key}", value)]
        command = [
            sys.executable,
            "-m",
            "train",
            "--stream.clients",
            str(clients),
            "--method",
            method,
            "--run_dir",
            str(run),
            *words,
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"the run with {clients} clients ended with exit code {process.returncode}")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["seconds"]["round"] - line["seconds"]["evaluate"] for line in lines[1:]]
    return {
        "registered": clients,
        "round_seconds": median(seconds),
        "cpu_seconds": usage.ru_utime,
        "peak_mib": usage.ru_maxrss / 1024,
    }
