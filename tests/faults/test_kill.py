"""Row: kill -9 at random times, between any two steps of a commit -> bytes of an unbroken run."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedbnn.defense.gate import Gate
from fedbnn.errors import FederationError
from fedbnn.protocol.messages import Failure
from fedbnn.storage.run_dir import records
from tests.faults.federation import fingerprint, run

ROOT = Path(__file__).parents[2]


Noted = Callable[[str, object], None]


def kills(noted: Noted, directory: Path, subject: str, way: str, count: int) -> int:
    """Kill runs, and see that every one ends as the unbroken one did; how many kills there were."""
    command = [
        sys.executable,
        "-m",
        "tests.faults.killing",
        str(directory),
        subject,
        way,
        str(count),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = int(done.stdout.split()[-1])
    noted("tried", found)
    return found


def test_killed_right_after_every_step_that_changes_the_disk(
    tmp_path: Path, record_property: Noted
) -> None:
    assert kills(record_property, tmp_path, "federation", "steps", 1) > 60


@pytest.mark.parametrize(
    ("subject", "count"),
    [
        ("fedbnn", 3),
        pytest.param("scaffold", 6, marks=pytest.mark.slow),
        pytest.param("fcil", 6, marks=pytest.mark.slow),
    ],
)
def test_the_command_killed_at_random_times(
    tmp_path: Path, record_property: Noted, subject: str, count: int
) -> None:
    assert kills(record_property, tmp_path, subject, "random", count) >= count


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("subject", "count"), [("fedbnn", 80), ("scaffold", 60), ("fcil", 60)])
def test_the_command_killed_two_hundred_times(
    tmp_path: Path, record_property: Noted, subject: str, count: int
) -> None:
    assert kills(record_property, tmp_path, subject, "random", count) >= count


def test_each_round_is_on_record_once(tmp_path: Path) -> None:
    for rounds in (2, 2, 5):
        run(tmp_path, rounds)
    assert [record["round"] for record in records(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_lost_quorum_leaves_the_last_round_and_can_be_resumed(tmp_path: Path) -> None:
    class Absent:
        def gather(self, payload, clients, private):  # type: ignore[no-untyped-def]
            return iter([Failure(client, "no answer within 5 s") for client in clients])

        def close(self) -> None:
            pass

    run(tmp_path / "unbroken", 4)
    run(tmp_path / "broken", 2)
    with pytest.raises(FederationError, match="round 3: 0 of 3 clients count"):
        run(tmp_path / "broken", 4, engine=Absent(), gate=Gate(quorum=0.1))
    assert [record["round"] for record in records(tmp_path / "broken")] == [1, 2]
    run(tmp_path / "broken", 4)
    assert fingerprint(tmp_path / "broken") == fingerprint(tmp_path / "unbroken")
