"""One forger of five on the quickstart, in one round or in all of them: at most three points.

In every round that is attacked the first of the clients asked lies, whoever it is: the forger is
always there. Everybody else is honest, and counts.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from fedbnn.evaluation.evaluate import REGIMES
from fedbnn.report import figures
from tests.defense.liars import ABOUT_CLASSES, LIES, Results, Runs, When

POINTS = 3.0
WHEN: dict[str, When] = {
    "the last round": lambda stream: stream.task_ends()[-1:],
    "one in the middle": lambda stream: stream.task_ends()[2:3],
    "all rounds": lambda stream: range(1, stream.rounds + 1),
}
"""Importances are exchanged where tasks end."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Runs]:
    """The runs of a method; what another method answered is let go."""
    newest: list[Runs] = []

    def of(method: str) -> Runs:
        if not newest or newest[-1].method != method:
            newest[:] = [Runs(method, tmp_path_factory.mktemp(method))]
        return newest[-1]

    return of


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "every", lambda runs, sweep=None: {})


def costs(forged: Results, honest: Results) -> list[float]:
    """Points lost in either regime at the end."""
    return [honest[one]["avg_fin"] - forged[one]["avg_fin"] for one in REGIMES]


@pytest.mark.slow
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("method", ["fedbnn", "fedavg", "scaffold", "fcil"])
def test_a_forger_of_weights_costs_little(
    method: str, lie: str, when: str, runs: Callable[[str], Runs], tmp_path: Path
) -> None:
    of = runs(method)
    found = costs(of.with_liar("train", LIES[lie], WHEN[when], tmp_path), of.honest())
    assert max(found) <= POINTS, found


@pytest.mark.slow
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("method", ["ewc", "mas"])
def test_a_forger_of_importances_costs_little(
    method: str, lie: str, when: str, runs: Callable[[str], Runs], tmp_path: Path
) -> None:
    of = runs(method)
    found = costs(of.with_liar("importance", LIES[lie], WHEN[when], tmp_path), of.honest())
    assert max(found) <= POINTS, found


@pytest.mark.slow
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("lie", {**LIES, **ABOUT_CLASSES})
@pytest.mark.parametrize("method", ["fedbnn", "exact"])
def test_a_forger_of_statistics_costs_little(
    method: str, lie: str, when: str, runs: Callable[[str], Runs], tmp_path: Path
) -> None:
    of, lies = runs(method), {**LIES, **ABOUT_CLASSES}
    found = costs(of.with_liar("statistics", lies[lie], WHEN[when], tmp_path), of.honest())
    assert max(found) <= POINTS, found
