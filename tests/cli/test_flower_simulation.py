"""`--engine flower` on Ray, in a network namespace that has the loopback interface only."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fedbnn.federation.engines.flower.loopback import descendants
from tests.cli.command import command, environment, final, process

pytest.importorskip("ray", reason='needs Flower: pip install -c constraints.txt ".[flower]"')

pytestmark = pytest.mark.slow
ALONE = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c"]
LOOPBACK = 'ip link set lo up && exec "$0" "$@"'


@pytest.fixture(autouse=True)
def _namespace() -> None:
    if subprocess.run([*ALONE, LOOPBACK, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be made here, and Ray listens on every interface")


def on_ray(home: Path, *words: str) -> "subprocess.Popen[str]":
    simulated = command("--config", "tiny.yaml", "--engine", "flower", *words)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(
        [*ALONE, LOOPBACK, *simulated], cwd=home, env=environment(), text=True, **pipes
    )


def test_a_simulated_run_ends_in_the_bytes_of_serial(home: Path) -> None:
    assert process(home, "--config", "tiny.yaml", "--run_dir", "serial").returncode == 0
    running = on_ray(home, "--run_dir", "ray", "--engine.cpus", "0.5")
    said, _ = running.communicate(timeout=280)
    assert running.returncode == 0, said
    assert "DEPRECATED" not in said
    assert final(home / "ray") == final(home / "serial")
    assert "site" in (home / "ray" / "log.txt").read_text()


def test_a_simulated_run_that_is_stopped_leaves_nothing_behind_and_goes_on(home: Path) -> None:
    assert process(home, "--config", "tiny.yaml", "--run_dir", "serial").returncode == 0
    running = on_ray(home, "--run_dir", "ray")
    end = time.monotonic() + 200
    while not [*home.glob("ray/state/round-*")] and time.monotonic() < end:
        time.sleep(0.05)
    session = set(descendants(running.pid))
    os.kill(running.pid, signal.SIGTERM)
    said, _ = running.communicate(timeout=90)
    assert running.returncode == 143, said
    assert "go on with: python train.py --resume ray" in said
    assert len(session) > 2
    end = time.monotonic() + 30
    while left := [pid for pid in session if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, f"left behind: {left}"
        time.sleep(0.2)
    assert process(home, "--resume", "ray", "--engine", "serial").returncode == 0
    assert final(home / "ray") == final(home / "serial")
