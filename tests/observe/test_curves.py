"""What loggers are told: names a person reads, no client ids, no bins; and any of them may fail."""

import csv
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import CSVLogger

from fedbnn.tracking.wandb import Loggers, Track, Tracker, curves, ends


def test_a_round_is_a_handful_of_numbers_with_names(lines) -> None:
    told = curves(lines[3])
    assert told["train/loss"] == 0.5
    assert told["train/kl"] == 0.04
    assert told["fon/class_agnostic"] == lines[3]["fon"]["class_agnostic"]
    assert told["task_aware/task_1"] == lines[3]["tasks"][0]["task_aware"]["accuracy"]
    assert told["pooled/class_agnostic/ece"] == 0.05
    assert told["posterior/backbone_scale"] == 0.005
    assert told["MB/up"] == 0.12
    assert all(isinstance(value, int | float) for value in told.values())
    assert len(told) < 40


def test_clients_are_counted_and_never_curves_of_their_own(lines) -> None:
    names = {name for line in lines for name in curves(line)}
    assert curves(lines[8])["clients/trust"] == 2
    assert curves(lines[4])["clients/failed"] == 1
    assert not [name for name in names if "diagnostics" in name or "edges" in name]
    assert {name for name in names if name.startswith("clients/")} == {
        f"clients/{kind}" for kind in ("clients", "failed", "refused", "trust")
    }


def test_the_summary_has_what_the_run_reached(run) -> None:
    told = ends(run)
    assert told["class_agnostic/avg_fin"] == run["class_agnostic"]["avg_fin"]
    assert told["bytes_up"] == run["bytes_up"]
    assert len(told) < 25


def test_a_lightning_logger_draws_every_round_and_goes_on_after_a_stop(lines, tmp_path) -> None:
    for part, (before, rest) in enumerate((([], lines[:6]), (lines[:6], lines[6:]))):
        track = Track("off", logger=CSVLogger(tmp_path, name="curves", version=part))
        tracker = Tracker(track, tmp_path, lambda _: None)
        tracker.start({"seed": 0}, "g", "n", before)
        for line in rest:
            tracker.round_done(line)
        tracker.close()
    written = _rows(tmp_path / "curves" / "version_1" / "metrics.csv")
    assert [int(float(row["round"])) for row in written] == list(range(1, 13))
    assert float(written[3]["train/loss"]) == 0.5
    assert len(_rows(tmp_path / "curves" / "version_0" / "metrics.csv")) == 6


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


class Broken:
    """A logger that fails at its second round."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def log_hyperparams(self, params: dict[str, Any]) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.heard.append(step)
        if step == 2:
            raise ConnectionError("gone")

    def save(self) -> None: ...

    def finalize(self, status: str) -> None:
        raise AssertionError("it is asked no more")


def test_a_logger_that_fails_is_said_once_and_the_others_go_on(lines, tmp_path) -> None:
    said: list[str] = []
    broken, other = Broken(), CSVLogger(tmp_path, name="x", version=0)
    loggers = Loggers([broken, other], said.append)
    loggers.start({}, [])
    for line in lines:
        loggers.round_done(line)
    loggers.close()
    assert broken.heard == [1, 2]
    assert said == ["Broken stopped following (ConnectionError: gone); training goes on"]
    assert len(_rows(tmp_path / "x" / "version_0" / "metrics.csv")) == 12
