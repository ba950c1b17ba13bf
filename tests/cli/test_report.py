"""`fedbnn report --leaderboard`, and a Lightning logger for the rounds, by the real command."""

import csv
import json
import shlex
from pathlib import Path

import pytest

from fedbnn.cli.report import command
from fedbnn.cli.train import parse
from fedbnn.evaluation.oracle import HEADS
from fedbnn.storage.run_dir import changed
from tests.cli.command import fedbnn


def test_the_board_of_a_run_is_written_where_it_is_asked_for(
    finished: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fedbnn("report", "--leaderboard", finished, "--out", home / "board") == 0
    assert "board/leaderboard.md" in capsys.readouterr().out
    text = (home / "board" / "leaderboard.md").read_text()
    assert "| fedbnn |" in text
    assert "told boundaries" in text
    assert fedbnn("report", "--leaderboard", home / "board") != 0


def test_the_command_of_a_line_repeats_its_settings() -> None:
    words = ["--config", "conf/quickstart.yaml", "--method", "fedavg", "--client.lr", "0.02"]
    from fedbnn.storage.run_dir import flat

    values = parse([*words, "--seed", "1"]).values
    run = {"scenario": "quickstart", "seed": 1, "config": dict(flat(values)), "directory": "x"}
    told = command("fedavg", [run, {**run, "seed": 0}])
    assert shlex.split(told) == [
        *("fedbnn", "compare", "--config", "conf/quickstart.yaml", "--methods", "fedavg"),
        *("--seeds", "0,1", "--set", "client.lr=0.02"),
    ]
    values = parse([*words, "--head", "gaussian", "--seed", "1"]).values
    told = command("fedavg", [{**run, "config": dict(flat(values))}])
    assert told.endswith(" --set head=gaussian --set client.lr=0.02")
    lost = command("fedavg", [{**run, "scenario": "nowhere"}])
    assert lost == "fedbnn train --config x/config.yaml"


@pytest.mark.usefixtures("undrawn")
def test_the_oracle_is_drawn_beside_the_head_of_every_kept_round(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--run_dir", "kept", "--ledger.keep_rounds", "4"]
    assert fedbnn("train", "--config", "tiny.yaml", *run) == 0
    assert fedbnn("report", "kept", "--oracle") == 0
    assert "kept/figures/oracle.png" in capsys.readouterr().out
    assert (home / "kept" / "figures" / "oracle.png").is_file()
    rows = json.loads((home / "kept" / "oracle.json").read_text())
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    assert all(0 <= row[f"{head} task_aware"] <= 100 for row in rows for head in HEADS)
    last = json.loads((home / "kept" / "results.json").read_text())
    assert rows[-1]["ours class_agnostic"] == pytest.approx(last["class_agnostic"]["avg_fin"])
    assert changed(home / "kept") == []


def test_too_few_rounds_for_an_oracle_are_one_line(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fedbnn("report", finished, "--oracle") != 0
    told = capsys.readouterr().err.strip()
    assert "3 of 4 rounds are kept" in told
    assert "--ledger.keep_rounds 4" in told


@pytest.mark.usefixtures("undrawn")
def test_a_lightning_logger_follows_the_rounds_by_one_setting(home: Path) -> None:
    asked = ["--track.logger", "CSVLogger", "--track.logger.save_dir", str(home / "curves")]
    assert fedbnn("train", "--config", "tiny.yaml", *asked) == 0
    [path] = (home / "curves").rglob("metrics.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(float(row["round"])) for row in rows] == [1, 2, 3, 4]
    assert all(float(row["train/loss"]) > 0 for row in rows)
