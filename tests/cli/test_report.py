"""`fedbnn report --leaderboard`, and a Lightning logger for the rounds, by the real command."""

import csv
import shlex
from pathlib import Path

import pytest

from fedbnn.cli.report import command
from fedbnn.cli.train import parse
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
    run = {"scenario": "quickstart", "seed": 1, "config": dict(flat(values)), "run_dir": Path("x")}
    told = command("fedavg", [run, {**run, "seed": 0}])
    assert shlex.split(told) == [
        *("fedbnn", "compare", "--config", "conf/quickstart.yaml", "--methods", "fedavg"),
        *("--seeds", "0,1", "--set", "client.lr=0.02"),
    ]
    lost = command("fedavg", [{**run, "scenario": "nowhere"}])
    assert lost == "python train.py --config x/config.yaml"


@pytest.mark.usefixtures("undrawn")
def test_a_lightning_logger_follows_the_rounds_by_one_setting(home: Path) -> None:
    asked = ["--track.logger", "CSVLogger", "--track.logger.save_dir", str(home / "curves")]
    assert fedbnn("train", "--config", "tiny.yaml", *asked) == 0
    [path] = (home / "curves").rglob("metrics.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(float(row["round"])) for row in rows] == [1, 2, 3, 4]
    assert all(float(row["train/loss"]) > 0 for row in rows)
