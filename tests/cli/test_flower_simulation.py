"""`--engine flower` on Ray, in a network namespace that has the loopback interface only."""

import os
import signal
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from fedbnn.federation.engines.flower.loopback import descendants, until
from tests.cli.command import ROOT, command, environment, final, process, started

pytest.importorskip("ray", reason='needs Flower: pip install -c constraints.txt ".[flower]"')

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PATIENCE = 600.0
ALONE = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c"]
LOOPBACK = 'ip link set lo up && exec "$0" "$@"'


@pytest.fixture(autouse=True)
def _namespace() -> None:
    if subprocess.run([*ALONE, LOOPBACK, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be made here, and Ray listens on every interface")


def on_ray(home: Path, *words: str) -> "AbstractContextManager[subprocess.Popen[str]]":
    simulated = command("--config", "tiny.yaml", "--engine", "flower", *words)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    ours = environment(RAY_worker_niceness="0")  # where others are busy, Ray would wait for them
    return started([*ALONE, LOOPBACK, *simulated], home, env=ours, text=True, **pipes)


def test_a_simulated_run_ends_in_the_bytes_of_serial(home: Path) -> None:
    assert process(home, "--config", "tiny.yaml", "--run_dir", "serial").returncode == 0
    with on_ray(home, "--run_dir", "ray", "--engine.cpus", "0.5") as running:
        said, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode == 0, said
    assert "DEPRECATED" not in said
    assert final(home / "ray") == final(home / "serial")
    assert "site" in (home / "ray" / "log.txt").read_text()


def test_a_simulated_run_that_is_stopped_leaves_nothing_behind_and_goes_on(home: Path) -> None:
    assert process(home, "--config", "tiny.yaml", "--run_dir", "serial").returncode == 0
    with on_ray(home, "--run_dir", "ray") as running:
        until("the first round", lambda: [*home.glob("ray/state/round-*")], PATIENCE)
        session = set(descendants(running.pid))
        os.kill(running.pid, signal.SIGTERM)
        said, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode == 143, said
    assert "go on with: python train.py --resume ray" in said
    assert len(session) > 2
    until("their end", lambda: not [pid for pid in session if Path(f"/proc/{pid}").exists()], 60)
    assert process(home, "--resume", "ray", "--engine", "serial").returncode == 0
    assert final(home / "ray") == final(home / "serial")


def test_parts_of_ones_own_in_the_folder_of_a_run_are_found_by_simulated_sites(home: Path) -> None:
    """A network, a method and data by import path: the bytes of serial."""
    (home / "mine.py").write_text((ROOT / "tests" / "cli" / "own_parts.py").read_text())
    own = ("--network", "mine:Tiny", "--method", "mine:Mine", "--stream.sources", "mine:Digits")
    alone = process(home, "--config", "tiny.yaml", "--run_dir", "serial", *own)
    assert alone.returncode == 0, alone.stderr
    with on_ray(home, "--run_dir", "ray", "--engine.cpus", "0.5", *own) as running:
        said, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode == 0, said
    assert final(home / "ray") == final(home / "serial")
