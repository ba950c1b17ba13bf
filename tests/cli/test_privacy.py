"""`--privacy...` as a user meets it: epsilon by round, and a run that stops before too much."""

import json
from pathlib import Path

import pytest

from fedbnn.defense.budget import epsilon
from tests.cli.command import fedbnn

WORDS = ("--head", "linear", "--gate.influence_cap", "null", "--evaluate.every", "0")
NOISE = ("--privacy.clip", "5", "--privacy.noise", "2")


@pytest.mark.usefixtures("undrawn")
def test_a_run_says_what_it_spent_and_stops_before_it_exceeds_its_budget(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", "--config", "tiny.yaml", "--run_dir", "run", *WORDS, *NOISE)
    most = epsilon(2.0, 1, 1e-5) + 0.1
    assert fedbnn(*words, "--stream.clients_per_round", 4, "--privacy.epsilon", most) == 7
    said = capsys.readouterr()
    assert f"epsilon {epsilon(2.0, 1, 1e-5):.3g}" in said.out
    assert said.err.startswith("error: round 2 would spend epsilon ")
    assert said.err.count("\n") == 1
    (line,) = (home / "run/state/records").iterdir()
    assert json.loads(line.read_text())["privacy"] == {
        "epsilon": epsilon(2.0, 1, 1e-5),
        "delta": 1e-5,
    }
    assert (home / "run/metrics.jsonl").read_text() == line.read_text()
    assert fedbnn("train", "--resume", "run") == 7


@pytest.mark.parametrize(
    "words",
    [
        ("--gate.influence_cap", "1.7"),
        ("--method", "scaffold"),
        ("--head", "gaussian"),
        ("--federation.late", "fold"),
    ],
)
def test_what_would_leak_is_refused_before_there_is_a_run_directory(
    words: tuple[str, ...], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ("train", "--config", "tiny.yaml", "--run_dir", "run", *WORDS, *NOISE, *words)
    assert fedbnn(*said) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (home / "run").exists()
