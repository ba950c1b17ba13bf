"""The tuning protocol of results/protocol.py: the same number of trials, the optimum inside."""

import importlib
from collections.abc import Iterator
from dataclasses import replace
from math import log, log10
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedbnn.cli.train import parse

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def protocol() -> Iterator[ModuleType]:
    """The script, which finds what lies beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RESULTS))
        yield importlib.import_module("protocol")


def searched(protocol: ModuleType, trials: int, peak: float, **knob: Any) -> dict[float, float]:
    """A search over a score with one peak."""
    asked = protocol.Knob("method.lr", knob.pop("grid", (0.01, 0.03, 0.1, 0.3)), trials, **knob)
    known = {} if asked.at is None else {asked.at: -abs(log10(asked.at / peak))}
    found: dict[float, float] = protocol.search(asked, lambda v: -abs(log10(v / peak)), known)
    return found


@pytest.mark.parametrize("peak", [1e-4, 3e-2, 0.5, 40.0])
def test_the_grid_is_extended_until_the_optimum_is_inside(
    protocol: ModuleType, peak: float
) -> None:
    """A score with one peak anywhere: the winner is inside, and as near as the trials allow."""
    trials = searched(protocol, 14, peak)
    best, values = max(trials, key=trials.__getitem__), sorted(trials)
    assert values[0] < best < values[-1]
    assert abs(log(best / peak)) < log(3)


@pytest.mark.parametrize("peak", [3e-2, 0.05, 0.1])
def test_every_method_gets_the_same_number_of_trials(protocol: ModuleType, peak: float) -> None:
    assert len(searched(protocol, 6, peak)) == 6


@pytest.mark.parametrize(("peak", "further"), [(0.4, 1), (1.0, 2), (1e9, 3)])
def test_an_edge_is_owed_a_few_trials_more(protocol: ModuleType, peak: float, further: int) -> None:
    trials = searched(protocol, 4, peak)
    assert len(trials) == 4 + further
    assert protocol.inside(trials) == (peak < 1e9)


def test_what_the_configuration_says_is_known_and_counts_as_no_trial(protocol: ModuleType) -> None:
    trials = searched(protocol, 2, 2.5, grid=(1.0, 4.0), at=2.0)
    assert sorted(trials) == [1.0, 2.0, 4.0]


def test_knobs_are_tuned_one_after_the_other_each_with_the_best_before(
    protocol: ModuleType,
) -> None:
    knobs = protocol.Knob("a", (1.0, 2.0, 4.0), 3), protocol.Knob("b", (1.0, 4.0), 2, at=2.0)
    first = [({"a": 1.0}, 50.0), ({"a": 2.0}, 60.0), ({"a": 4.0}, 55.0)]
    worse = [({"a": 2.0, "b": 1.0}, 58.0), ({"a": 2.0, "b": 4.0}, 59.0)]
    better = [({"a": 2.0, "b": 1.0}, 58.0), ({"a": 2.0, "b": 4.0}, 61.0)]
    assert protocol.winner(knobs, first) == {"a": 2.0}
    assert protocol.winner(knobs, first + worse) == {"a": 2.0, "b": 2.0}
    assert protocol.winner(knobs, first + better) == {"a": 2.0, "b": 4.0}
    [_, (_, trials)] = protocol.by_knob(knobs, first + worse)
    assert trials == {2.0: 60.0, 1.0: 58.0, 4.0: 59.0}


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
        for knobs in filter(None, read.methods.values()):
            assert sum(knob.trials for knob in knobs) == read.budget
            assert all(len(knob.grid) <= knob.trials for knob in knobs)
        assert len(set(read.seeds)) >= 3


BESIDE = {"fedavg", "fedavg_plus", "fedprox_plus", "exact", "fedbnn_paper", "fedbnn_authors"}
"""The same tools for FedAvg and FedProx, what needs no training, and the paper's method."""
TABLES = sorted(file.stem for file in (RESULTS / "protocols").glob("*.yaml"))


@pytest.mark.parametrize("name", TABLES)
def test_every_table_has_the_fair_field_and_both_versions_of_the_paper(
    protocol: ModuleType, name: str
) -> None:
    read = protocol.Protocol.read(RESULTS / "protocols" / f"{name}.yaml")
    assert {*read.methods} >= BESIDE | {"fedbnn"}


@pytest.mark.parametrize("name", TABLES)
def test_methods_of_a_table_predict_by_one_setting_of_a_head(
    protocol: ModuleType, name: str, tmp_path: Path
) -> None:
    """All methods with a head have it alike, whatever the configuration says of it."""
    read = protocol.Protocol.read(RESULTS / "protocols" / f"{name}.yaml")
    runs, heads = protocol.Runs(read, tmp_path, "data", 1, {}), dict[str, Any]()
    for method in read.methods:
        said = {"method": method, **runs.settings(method)}
        words = [f"--{key}={protocol._text(value)}" for key, value in said.items()]
        head = parse([f"--config={RESULTS.parent / read.config}", *words])["head"]
        assert heads.setdefault(head["name"], head) == head
    assert heads["gaussian"]["prototypes"] == 0


def test_a_table_tuned_as_another_has_its_winners_but_for_what_it_sets(
    protocol: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gradual.yaml"
    file.write_text(
        "config: conf/gradual_ci_fast.yaml\ntuned_as: quickstart\nseeds: [0, 1, 2]\n"
        "shared: {head: gaussian, fedprox:method.mu: null}\nmethods: [exact, fedprox, fedavg]\n"
    )
    (tmp_path / "quickstart.yaml").write_bytes(
        (RESULTS / "protocols" / "quickstart.yaml").read_bytes()
    )
    read = protocol.Protocol.read(file)
    assert (read.name, read.trials, [*read.methods]) == (
        "gradual",
        "quickstart",
        ["exact", "fedprox", "fedavg"],
    )
    lr = [({"method.lr": 1e-4}, 90.0), ({"method.lr": 3e-4}, 95.0), ({"method.lr": 1e-3}, 80.0)]
    known = {"fedavg": lr, "fedprox": [({"method.mu": 10.0}, 90.0)]}
    runs = protocol.Runs(read, tmp_path, "data", 1, known)
    said: list[str] = []
    monkeypatch.setattr(protocol.subprocess, "run", lambda words, check: said.extend(words))
    runs.table(runs.tuned())
    assert {"fedavg:method.lr=0.0003", "fedprox:method.mu=null", "head=gaussian"} <= {*said}
    with pytest.raises(SystemExit, match="quickstart has no trials of fedprox"):
        replace(runs, known={"fedavg": lr}).tuned()


def test_trials_of_another_day_are_not_played_again(
    protocol: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "digits" / "tuning.json"
    monkeypatch.setattr(protocol, "kept", lambda name: tmp_path / name / "tuning.json")
    read = replace(protocol.Protocol.read(RESULTS / "protocols" / "quickstart.yaml"), name="digits")
    assert protocol.known("digits") == {}
    runs = protocol.Runs(read, tmp_path, "data", 1, {})
    mine = [[{"method.lr": 1e-4}, 90.0], [{"method.lr": 1e-3}, 95.0], [{"method.lr": 1e-2}, 80.0]]
    runs.write({"fedavg": mine})
    again = replace(runs, known=protocol.known("digits"))
    assert again.known == {"fedavg": [tuple(one) for one in mine]}
    assert again.score("fedavg", {"method.lr": 1e-3}) == 95.0  # nothing is there to be played
    again.write({"lwf": [({"method.strength": 1.0}, 50.0), ({"method.strength": 3.0}, 60.0)]})
    assert [*protocol.known("digits")] == ["fedavg", "lwf"]
    shown = place.with_suffix(".md").read_text()
    assert "| fedavg | `method.lr` | 0.0001: 90.00, **0.001: 95.00**, 0.01: 80.00 | yes |" in shown
    assert "**3: 60.00** | no |" in shown


def test_methods_with_fewer_trials_than_the_others_are_refused(
    protocol: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / "unfair.yaml"
    text = (RESULTS / "protocols" / "quickstart.yaml").read_text()
    file.write_text(text.replace("trials: 5", "trials: 4", 1))
    with pytest.raises(SystemExit, match="fedbnn has not 5 trials"):
        protocol.Protocol.read(file)
