"""The tuning protocol of results/protocol.py: the same number of trials, the optimum inside."""

import importlib
from collections.abc import Iterator
from dataclasses import replace
from math import log, log10
from pathlib import Path
from types import ModuleType

import pytest

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def protocol() -> Iterator[ModuleType]:
    """The script, which finds what lies beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RESULTS))
        yield importlib.import_module("protocol")


@pytest.mark.parametrize("peak", [1e-4, 3e-2, 0.5, 40.0])
def test_the_grid_is_extended_until_the_optimum_is_inside(
    protocol: ModuleType, peak: float
) -> None:
    """A score with one peak anywhere: the winner is inside, and as near as the trials allow."""
    trials = protocol.search((0.01, 0.03, 0.1, 0.3), 14, lambda value: -abs(log10(value / peak)))
    best, values = max(trials, key=trials.__getitem__), sorted(trials)
    assert values[0] < best < values[-1]
    assert abs(log(best / peak)) < log(3)


@pytest.mark.parametrize("peak", [1e-3, 0.05, 10.0])
def test_every_method_gets_the_same_number_of_trials(protocol: ModuleType, peak: float) -> None:
    asked = []

    def score(value: float) -> float:
        asked.append(value)
        return -abs(log10(value / peak))

    trials = protocol.search((0.01, 0.03, 0.1, 0.3), 6, score)
    assert len(asked) == len(set(asked)) == len(trials) == 6


def test_an_edge_is_left_by_the_step_of_the_grid(protocol: ModuleType) -> None:
    assert protocol.proposed({1.0: 0.5, 2.0: 0.4, 4.0: 0.3}) == 0.5
    assert protocol.proposed({1.0: 0.3, 2.0: 0.4, 4.0: 0.5}) == 8.0
    assert protocol.proposed({1.0: 0.3, 2.0: 0.5, 4.0: 0.4}) == pytest.approx(8**0.5)


def test_every_protocol_names_methods_and_a_configuration_that_exist(protocol: ModuleType) -> None:
    from fedbnn.methods import METHODS

    files = sorted((RESULTS / "protocols").glob("*.yaml"))
    assert files
    for file in files:
        read = protocol.Protocol.read(file)
        assert (RESULTS.parent / read.config).is_file()
        assert set(read.methods) <= set(METHODS)
        assert all(knob is None or len(knob[1]) <= read.budget for knob in read.methods.values())
        assert len(set(read.seeds)) >= 3


def test_trials_of_another_day_are_not_played_again(
    protocol: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "digits" / "tuning.json"
    monkeypatch.setattr(protocol, "kept", lambda name: tmp_path / name / "tuning.json")
    read = replace(protocol.Protocol.read(RESULTS / "protocols" / "quickstart.yaml"), name="digits")
    assert protocol.known("digits") == {}
    runs = protocol.Runs(read, tmp_path, "data", 1, {})
    runs.write({"fedavg": {1e-4: 90.0, 1e-3: 95.0, 1e-2: 80.0}})
    again = replace(runs, known=protocol.known("digits"))
    assert again.known == {"fedavg": {1e-4: 90.0, 1e-3: 95.0, 1e-2: 80.0}}
    assert again.score("fedavg", 1e-3) == 95.0  # nothing is there that could be played
    again.write({"lwf": {1.0: 50.0, 3.0: 60.0}})
    assert [*protocol.known("digits")] == ["fedavg", "lwf"]
    shown = place.with_suffix(".md").read_text()
    assert "| fedavg | `method.lr` | 0.0001: 90.00, **0.001: 95.00**, 0.01: 80.00 | yes |" in shown
    assert "**3: 60.00** | no |" in shown
