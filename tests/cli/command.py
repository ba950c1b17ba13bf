"""The commands as a user starts them: as a process where that matters, else in this one."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedbnn.cli.main import main

ROOT = Path(__file__).parents[2]
TINY = """
name: tiny
stream: {sources: digits, tasks: 2, rounds_per_task: 2, clients: 4, clients_per_round: 2}
network: {name: mlp, hidden: [16]}
method: fedbnn
client: {epochs: 1, batch_size: 32}
track: {wandb: "off"}
"""


def process(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python train.py WORDS` in a process of its own, with no terminal."""
    return subprocess.run(
        command(*words), cwd=folder, env=environment(**variables), capture_output=True, text=True
    )


@contextmanager
def started(words: list[str], folder: Path, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that is asked to end when the block is left and it has not."""
    running = subprocess.Popen(words, cwd=folder, **options)
    try:
        yield running
    finally:
        if running.poll() is None:
            running.terminate()
            running.wait()


def command(*words: str) -> list[str]:
    """`python train.py WORDS`."""
    return [sys.executable, str(ROOT / "train.py"), *words]


def environment(**variables: str) -> dict[str, str]:
    """What the process inherits: this environment, and where our packages are."""
    plain = {
        key: value
        for key, value in os.environ.items()
        if key not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")
    }
    return {**plain, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}


def fedbnn(*words: object) -> int:
    """`fedbnn WORDS` in this process; its exit code."""
    return main([str(word) for word in words])


def final(run_dir: Path) -> str:
    """The sha256 of the last committed state."""
    [*_, newest] = sorted((run_dir / "state").glob("round-*/state.safetensors"))
    return f"{newest.parent.name} {hashlib.sha256(newest.read_bytes()).hexdigest()}"


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
