"""W&B mirrors metrics.jsonl and can never stop a run. Real offline W&B runs, no network."""

import json
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedbnn.storage import run_dir as records
from fedbnn.storage.files import append_line
from fedbnn.storage.ledger import METRICS
from fedbnn.tracking.wandb import Track, Tracker

wandb = pytest.importorskip("wandb")
KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path) -> None:
    """No key, no network, no settings of the person who runs the tests."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "settings"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))


@pytest.fixture
def run_dir(tmp_path) -> Path:
    directory = tmp_path / "runs" / "x"
    directory.mkdir(parents=True)
    return directory


def started(run_dir: Path, track: Track, said: list[str], lines: tuple | list = ()) -> Tracker:
    tracker = Tracker(track, run_dir, said.append)
    tracker.start({"method": {"name": "fedbnn"}, "seed": 0}, "quickstart", "fedbnn-0", lines)
    return tracker


def mirrored(run_dir: Path) -> list[tuple[dict, dict]]:
    """For each offline W&B run: its description, and the rounds of its history with values."""
    return [_read(path) for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))]


def _read(path: Path) -> tuple[dict, dict]:
    description, history = {}, {}
    for record in _closed(path):
        if record.HasField("run"):
            description = {
                "id": record.run.run_id,
                "group": record.run.run_group,
                "name": record.run.display_name,
            }
        items = {
            (item.key or "/".join(item.nested_key)): json.loads(item.value_json)
            for item in record.history.item
        }
        if "round" in items:
            history.setdefault(items["round"], []).append(items)
    return description, history


def _closed(path: Path) -> list:
    """All records of a W&B file; its process may write the last a moment after the run ends."""
    from wandb.proto import wandb_internal_pb2

    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = [
            wandb_internal_pb2.Record.FromString(data) for data in _log_records(path.read_bytes())
        ]
        if any(record.HasField("exit") for record in found):
            return found
        time.sleep(0.05)
    raise AssertionError(f"{path.name} was never closed")


def _log_records(data: bytes, block: int = 32768) -> Iterator[bytes]:
    """The records of a LevelDB log: pieces with checksum, length, type (1 whole, 4 last).

    Without the last one where it is written only in part.
    """
    place, pieces = 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        if place + 7 + length > len(data):
            return
        pieces += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield pieces
            pieces = b""


def test_an_offline_run_has_each_round_once_with_the_round_as_axis(run_dir, lines, run) -> None:
    said: list[str] = []
    tracker = started(run_dir, Track("offline"), said)
    for line in lines:
        tracker.round_done(line)
    tracker.finish(run, [])
    [(description, history)] = mirrored(run_dir)
    assert description["group"] == "quickstart"
    assert description["name"] == "fedbnn-0"
    assert sorted(history) == list(range(1, 13))
    assert history[4][0]["fon/task_aware"] == lines[3]["fon"]["task_aware"]
    assert said == [
        f"W&B is offline; to upload this run later: wandb sync {run_dir}/wandb/offline-run-*"
    ]
    assert records.records(run_dir) == lines


def test_a_chosen_group_and_name_win_over_those_of_the_run(run_dir) -> None:
    started(run_dir, Track("offline", group="study", name="first"), []).close()
    [(description, _)] = mirrored(run_dir)
    assert (description["group"], description["name"]) == ("study", "first")


def test_a_resumed_run_keeps_its_id_and_sends_no_round_twice(run_dir, lines, run) -> None:
    said: list[str] = []
    first = started(run_dir, Track("offline"), said)
    for line in lines[:6]:
        first.round_done(line)
    first.close()
    second = started(run_dir, Track("offline"), said, lines[:5])
    for line in lines[5:]:
        second.round_done(line)
    second.finish(run, [])
    runs = mirrored(run_dir)
    assert len({description["id"] for description, _ in runs}) == 1
    sent = sorted(number for _, history in runs for number, items in history.items() for _ in items)
    assert sent == list(range(1, 13))


def test_rounds_that_a_crash_kept_from_the_mirror_are_sent_on_resuming(run_dir, lines) -> None:
    for line in lines[:3]:
        append_line(run_dir / METRICS, line)
    started(run_dir, Track("offline"), [], lines[:4]).close()
    assert sorted(mirrored(run_dir)[0][1]) == [1, 2, 3, 4]


def test_figures_are_handed_over_at_the_end(run_dir, lines, run, tmp_path) -> None:
    import matplotlib.pyplot as plt

    picture = tmp_path / "curve.png"
    plt.imsave(picture, [[0.0, 1.0]])
    tracker = started(run_dir, Track("offline"), [])
    tracker.finish(run, [picture])
    assert list(run_dir.glob("wandb/offline-run-*/files/media/images/figures/curve*.png"))


SCRIPT = """
import sys
from pathlib import Path
from fedbnn.tracking.wandb import Track, Tracker
tracker = Tracker(Track(patience=3.0), Path(sys.argv[1]), print)
tracker.start({}, "group", "name", [])
tracker.round_done({"round": 1})
tracker.finish({"a": 1}, [])
"""


def in_a_process_of_its_own(run_dir: Path) -> tuple[list[str], str]:
    """What a run says through us, and what it says besides."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(run_dir)], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines(), done.stderr


@pytest.mark.slow
def test_auto_without_a_key_is_offline_and_wandb_itself_is_quiet(run_dir) -> None:
    said, besides = in_a_process_of_its_own(run_dir)
    assert said == [
        f"W&B is offline; to upload this run later: wandb sync {run_dir}/wandb/offline-run-*"
    ]
    assert besides == ""
    assert list(mirrored(run_dir)[0][1]) == [1]


@pytest.mark.slow
def test_an_unreachable_server_leaves_an_offline_run_and_the_key_nowhere(
    run_dir, monkeypatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    said, besides = in_a_process_of_its_own(run_dir)
    assert len(said) == 2
    assert said[0].startswith("W&B cannot be reached (ConnectionRefusedError:")
    assert "wandb sync" in said[1]
    assert list(mirrored(run_dir)[0][1]) == [1]
    assert besides == ""
    assert KEY not in "".join(said)
    assert not [
        path for path in run_dir.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()
    ]


def test_off_opens_nothing(run_dir, lines) -> None:
    for wish in ("off", False):
        tracker = started(run_dir, Track(wish), [])
        tracker.round_done(lines[0])
        tracker.finish({}, [])
    assert not (run_dir / "wandb").exists()


def test_wandb_not_installed_is_said_once(run_dir, lines, run, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    said: list[str] = []
    tracker = started(run_dir, Track("offline"), said)
    for line in lines:
        tracker.round_done(line)
    tracker.finish(run, [])
    assert len(said) == 1
    assert "ModuleNotFoundError" in said[0]
    assert len(records.records(run_dir)) == 12


@pytest.mark.parametrize("error", [RuntimeError("broken"), ConnectionError("gone"), "own"])
def test_a_failure_in_the_middle_is_said_once_and_the_run_goes_on(
    run_dir, lines, run, monkeypatch, error
) -> None:
    said: list[str] = []
    tracker = started(run_dir, Track("offline"), said)
    handle = tracker._run
    assert handle is not None

    def fail(*_: object) -> None:
        raise wandb.errors.CommError(f"no, {KEY}") if error == "own" else error

    monkeypatch.setattr(type(handle), "log", fail)
    for line in lines:
        tracker.round_done(line)
    handle.finish()
    tracker.finish(run, [])
    assert [text for text in said[1:] if "stopped following" in text] == said[1:]
    assert len(said) == 2
    assert KEY not in said[1]
    assert len(records.records(run_dir)) == 12


def test_nothing_but_errors_of_wandb_is_forgiven(run_dir, lines, monkeypatch) -> None:
    tracker = started(run_dir, Track("offline"), [])
    handle = tracker._run

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(handle), "log", stop)
    with pytest.raises(KeyboardInterrupt):
        tracker.round_done(lines[0])
    handle.finish()
