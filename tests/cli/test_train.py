"""`python train.py` as a newcomer meets it: what it prints and leaves, and that it repeats."""

import json
import re
import shlex
import sys
from pathlib import Path
from types import FrameType

import pytest
from PIL import Image

from datamodules.stream import FederatedStream
from fedbnn.cli.compose import SCHEMA, compose
from fedbnn.cli.main import WELCOME, main
from fedbnn.cli.train import parse
from fedbnn.config import yaml
from fedbnn.config.parse import restored
from fedbnn.federation.experiment import run
from fedbnn.networks import MLP
from lightning_modules.client_runner import ClientRunner
from tests.cli.command import ROOT, TINY, fedbnn, files, final, process

PROMISED = {
    *(
        "method",
        "scenario",
        "seed",
        "rounds",
        "task_names",
        "chance",
        "fon",
        "nll",
        "ece",
        "seconds",
        "bytes_up",
        "bytes_down",
    ),
}
OF_A_REGIME = {"ts", "fin", "avg_ts", "avg_fin", "forgetting"}
LEFT_BEHIND = {
    "config.yaml",
    "env.json",
    "metrics.jsonl",
    "results.json",
    "log.txt",
    "model.safetensors",
    "report.html",
}


def printable(text: str) -> bool:
    """Whether there is nothing but characters and line ends."""
    return all(line.isprintable() for line in text.split("\n"))


def test_the_command_alone_prints_three_commands_that_can_be_typed(tmp_path: Path) -> None:
    shown = process(tmp_path)
    said = WELCOME.format("python train.py")
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, said, "")
    typed = [
        shlex.split(line.partition("  ")[0])
        for line in map(str.strip, said.splitlines())
        if line.startswith("python")
    ]
    assert len(typed) == 3
    for python, script, *words in typed:
        assert (python, script) == ("python", "train.py")
        assert (ROOT / "conf" / f"{words[words.index('--config') + 1]}.yaml").is_file()


def test_a_run_in_a_pipe_is_plain_lines_and_the_same_bytes_as_in_any_process(
    finished: Path, home: Path
) -> None:
    ran = process(home, "--config", "tiny.yaml")
    assert ran.returncode == 0
    assert ran.stderr == ""
    assert printable(ran.stdout)
    for fact in (
        "class-incremental digits",
        "fedbnn: q = q_0 * prod_k",
        "seed          0",
        "run directory runs/tiny",
    ):
        assert fact in ran.stdout
    assert [line.split()[1] for line in ran.stdout.splitlines() if line.startswith("round ")] == [
        "1/4",
        "2/4",
        "3/4",
        "4/4",
    ]
    for words in (
        "@TS",
        "@Fin",
        "aware",
        "agnostic",
        "chance",
        "classes 0-4",
        "classes 5-9",
        "average",
    ):
        assert words in ran.stdout
    assert ran.stdout.endswith("report  runs/tiny/report.html\n")
    assert final(home / "runs" / "tiny") == final(finished)


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert "fedbnn train --config quickstart --method fedavg" in shown
    assert all(
        f"--{key}" in shown
        for key in ("seed", "client.lr", "stream.sources", "dry_run", "print_config")
    )


@pytest.mark.usefixtures("undrawn")
def test_printed_and_kept_configurations_run_to_the_same_state_each_in_a_directory_of_its_own(
    finished: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(finished)
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--config", "tiny.yaml", "--print_config"])
    (home / "printed.yaml").write_text(capsys.readouterr().out, encoding="utf-8")
    for config, directory in (("printed.yaml", "tiny"), (finished / "config.yaml", "tiny-2")):
        assert fedbnn("train", "--config", config) == 0
        assert final(home / "runs" / directory) == final(finished)
        assert (home / "runs" / directory / "config.yaml").read_bytes() == (
            finished / "config.yaml"
        ).read_bytes()
    assert files(finished) == before


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_processes_engine_ends_in_the_same_bytes(finished: Path, home: Path) -> None:
    assert (
        fedbnn("train", "--config", "tiny.yaml", "--engine", "processes", "--engine.workers", 2)
        == 0
    )
    assert final(home / "runs" / "tiny") == final(finished)


@pytest.mark.slow
def test_judging_both_heads_gives_what_a_run_with_linear_rows_gives(home: Path) -> None:
    """The head does not change the training, so one run answers for two."""
    short = (
        "train",
        "--config",
        "tiny.yaml",
        "--stream.rounds_per_task",
        "1",
        "--method.r_init",
        "1",
    )
    assert fedbnn(*short, "--evaluate.both_heads", "true", "--run_dir", "both") == 0
    assert fedbnn(*short, "--head", "linear", "--run_dir", "linear") == 0
    both, linear = (
        json.loads((home / name / "results.json").read_text()) for name in ("both", "linear")
    )
    assert both["linear"] == {name: linear[name] for name in both["linear"]}
    assert both["task_aware"] != linear["task_aware"]


def test_a_dry_run_shows_the_schedule_and_leaves_a_picture_only(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fedbnn("train", "--config", "tiny.yaml", "--dry_run") == 0
    shown = capsys.readouterr().out
    assert printable(shown)
    for words in ("Schedule", "classes 0-4", "classes 5-9", "picture  runs/tiny-schedule.png"):
        assert words in shown
    assert re.search(r"client\W+image\W+first\W+last\W+task\W+clients\W+shares\W+shares", shown)
    kept = [path for path in files(home) if not path.startswith("data/.cache/")]
    assert kept == ["runs/tiny-clients.gif", "runs/tiny-schedule.png", "tiny.yaml"]
    with Image.open(home / "runs" / "tiny-clients.gif") as picture:
        assert picture.n_frames > 1
    with Image.open(home / "runs" / "tiny-schedule.png") as picture:
        assert min(picture.size) > 100
        assert len(set(picture.convert("L").tobytes())) > 10


def test_a_run_leaves_everything_that_is_promised(finished: Path) -> None:
    assert {path.name for path in finished.iterdir()} >= LEFT_BEHIND
    assert {path.stem for path in (finished / "figures").iterdir()} >= {
        "focus_on_now",
        "accuracy_matrix",
        "reliability",
    }
    found = json.loads((finished / "results.json").read_text())
    assert found.keys() >= PROMISED
    for regime in ("task_aware", "class_agnostic"):
        assert found[regime].keys() >= OF_A_REGIME
        assert len(found[regime]["ts"]) == len(found[regime]["fin"]) == 2
        assert len(found["fon"][regime]) == 4
        assert 1 < found[regime]["avg_fin"] <= 100
    assert (found["method"], found["scenario"], found["seed"], found["rounds"]) == (
        "fedbnn",
        "tiny",
        0,
        4,
    )
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert sum(sum(line["bytes_up"].values()) for line in lines) == found["bytes_up"]
    assert found["bytes_by_exchange"]["up"].keys() == {"train", "statistics"}
    assert all("loss" in line["train"] for line in lines)
    assert 0 < lines[-1]["train"]["kl"] < lines[-1]["train"]["loss"]
    assert [one["loss"] for one in found["train"]] == [line["train"]["loss"] for line in lines]


def test_the_log_tells_the_rounds(finished: Path) -> None:
    text = (finished / "log.txt").read_text()
    assert [f"round {number}/4  2 clients" in text for number in range(6)] == [
        False,
        True,
        True,
        True,
        True,
        False,
    ]
    assert "fedbnn-0 begins after round 0 of 4" in text
    assert "fedbnn-0 is complete" in text


def test_every_key_of_the_schema_stands_in_the_kept_configuration(finished: Path) -> None:
    text = (finished / "config.yaml").read_text()
    assert [line.partition(":")[0] for line in text.splitlines() if line[:1].isalpha()] == list(
        SCHEMA
    )


def test_a_run_can_be_made_and_run_without_a_command_line(finished: Path, tmp_path: Path) -> None:
    asked = yaml.parse(TINY, "tiny")
    found = run(compose(restored(asked, SCHEMA), tmp_path / "run"))
    assert found["method"] == "fedbnn"
    assert final(tmp_path / "run") == final(finished)


def test_nothing_is_made_twice_in_a_process(finished: Path, tmp_path: Path) -> None:
    kinds = {kind.__init__.__code__: kind for kind in (FederatedStream, MLP, ClientRunner)}
    made: list[type] = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in kinds:
            made.append(kinds[frame.f_code])

    parsed = parse(["--config", str(finished.parent / "tiny.yaml")])
    sys.setprofile(watch)
    try:
        run(compose(parsed, tmp_path / "run"))
    finally:
        sys.setprofile(None)
    assert sorted(kind.__name__ for kind in made) == ["ClientRunner", "FederatedStream", "MLP"]
