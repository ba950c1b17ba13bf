"""`fedbnn report --leaderboard`, and a Lightning logger for the rounds, by the real command."""

import csv
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedbnn.cli.report import command
from fedbnn.cli.train import parse
from fedbnn.config import yaml
from fedbnn.evaluation.evaluate import HEADS
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


TRAP = "from pathlib import Path\n\nPath('executed').touch()\n"


@pytest.mark.parametrize(
    "said",
    [
        {"method": "trap:Mine"},
        {"method": "--print_config"},
        {"scenario": "../../elsewhere"},
        {"scenario": "mine"},
        {"config": {"head.name": "--help"}},
        {"config": {"head.name": ["linear"]}},
        {"config": {}},
    ],
    ids=str,
)
def test_a_board_imports_nothing_that_a_stranger_names(said: dict[str, Any], home: Path) -> None:
    (home / "trap.py").write_text(TRAP)
    (home / "conf").mkdir()
    (home / "conf" / "mine.yaml").write_text("name: mine\nnetwork: trap:Net\n")
    run = {"scenario": "quickstart", "seed": 1, "config": {"head.name": "linear"}, "method": "ewc"}
    stranger = {**run, "directory": "x; touch y", **said}
    assert command(str(stranger["method"]), [stranger]) == (
        "fedbnn train --config 'x; touch y'/config.yaml"
    )
    assert not (home / "executed").exists()


def test_what_a_stranger_set_is_one_word_of_a_shell() -> None:
    config = {"head.name": "linear", "client.lr": "$(touch y)"}
    run = {"scenario": "quickstart", "seed": 1, "config": config, "directory": "x"}
    assert shlex.split(command("fedavg", [run]))[-1] == "client.lr=$(touch y)"


STRANGE = {
    "network": {"network": {"name": "trap:Net"}},
    "network in short": {"network": "trap:Net"},
    "method": {"method": {"name": "trap:Mine"}},
    "data": {"stream": {"sources": ["digits", "trap:data"]}},
    "weights in a package": {"network": {"name": "mlp", "weights": "trap:file.pth"}},
    "a class of an argument": {"network": {"name": "mlp", "hidden": {"class_path": "trap.Net"}}},
}


@pytest.mark.parametrize("how", STRANGE)
def test_an_oracle_imports_nothing_that_a_stranger_names(
    how: str, finished: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "trap.py").write_text(TRAP)
    shutil.copytree(finished, home / "run")
    (home / "run" / "state" / "finished.json").unlink()
    config = yaml.read(finished / "config.yaml")
    (home / "run" / "config.yaml").write_text(yaml.dump({**config, **STRANGE[how]}))
    assert fedbnn("report", "run", "--oracle") == 4
    assert "the run asks to import 'trap" in capsys.readouterr().err
    assert not (home / "executed").exists()


def test_an_oracle_has_no_need_of_callbacks_and_loggers(
    finished: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "trap.py").write_text(TRAP)
    shutil.copytree(finished, home / "run")
    (home / "run" / "state" / "finished.json").unlink()
    named = {"trainer": {"callbacks": "trap.Net"}, "track": {"logger": {"class_path": "trap.Net"}}}
    config = {**yaml.read(finished / "config.yaml"), **named}
    (home / "run" / "config.yaml").write_text(yaml.dump(config))
    assert fedbnn("report", "run", "--oracle") == 0
    assert "3 of 4 rounds are kept" in capsys.readouterr().out
    assert not (home / "executed").exists()


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


@pytest.mark.usefixtures("undrawn")
def test_a_run_as_it_comes_shows_an_oracle_of_the_rounds_it_has_kept(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any finished run can be looked at: the newest rounds, and how all of them are kept."""
    assert fedbnn("train", "--config", "tiny.yaml", "--run_dir", "plain") == 0
    assert fedbnn("report", "plain", "--oracle") == 0
    assert "3 of 4 rounds are kept; --ledger.keep_rounds 4 keeps all" in capsys.readouterr().out
    rows = json.loads((home / "plain" / "oracle.json").read_text())
    assert [row["round"] for row in rows] == [2, 3, 4]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("method", ["exact", "fedbnn"])
def test_where_nothing_can_be_forgotten_the_oracle_says_so(
    method: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether a network is trained beside the exact class posteriors or not."""
    head = ["--method", method, "--head", "exact", "--head.filters", "4"]
    kept = ["--ledger.keep_rounds", "4", "--run_dir", "kept"]
    assert fedbnn("train", "--config", "tiny.yaml", *head, *kept) == 0
    assert fedbnn("report", "kept", "--oracle") == 4
    assert "features that never move: they forget nothing" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_a_lightning_logger_follows_the_rounds_by_one_setting(home: Path) -> None:
    asked = ["--track.logger", "CSVLogger", "--track.logger.save_dir", str(home / "curves")]
    assert fedbnn("train", "--config", "tiny.yaml", *asked) == 0
    [path] = (home / "curves").rglob("metrics.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(float(row["round"])) for row in rows] == [1, 2, 3, 4]
    assert all(float(row["train/loss"]) > 0 for row in rows)
