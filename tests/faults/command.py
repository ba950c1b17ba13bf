"""`python train.py` on a stream of seconds, in this process, to try the faults of the command."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TINY = (
    f"--config {ROOT}/conf/quickstart.yaml --beside [] --stream.tasks 2 "
    "--stream.rounds_per_task 2 --stream.clients 6 --stream.clients_per_round 3 "
    "--network.hidden [16] --client.epochs 1 --track.wandb off"
).split()


@dataclass(frozen=True)
class Method:
    """A method to be run by the command."""

    name: str

    def run(self, run_dir: Path) -> None:
        """Start the run, or go on with it; leaves the process when it fails. Draws no figures."""
        import train
        from fedbnn.report import page as report

        report.write = lambda _, directory: report.Written(directory / "report.html", [])
        known = (run_dir / "config.yaml").exists()
        code = train.main(
            ["--resume", str(run_dir)]
            if known
            else [*TINY, "--method", self.name, "--run_dir", str(run_dir)]
        )
        if code:
            os._exit(code)

    def fingerprint(self, run_dir: Path) -> str:
        """sha256 of committed state, clients' own, model, and all measured but seconds."""
        total = hashlib.sha256()
        for path in sorted(run_dir.rglob("*.safetensors")):
            total.update(os.fsencode(path.relative_to(run_dir)) + path.read_bytes())
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            total.update(json.dumps(timeless(json.loads(line))).encode())
        total.update(
            json.dumps(timeless(json.loads((run_dir / "results.json").read_bytes()))).encode()
        )
        return total.hexdigest()


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what depends on the clock, and on who else uses the machine."""
    return {key: value for key, value in record.items() if not key.startswith(("seconds", "load"))}
