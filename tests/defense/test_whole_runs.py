"""One forger of five on the quickstart, in one round or in all of them: at most three points.

In every round that is attacked the first of the clients asked lies, whoever it is: the forger is
always there. Everybody else is honest, and counts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedbnn.cli.compose import compose
from fedbnn.cli.train import parse
from fedbnn.evaluation.evaluate import REGIMES
from fedbnn.federation import experiment
from fedbnn.federation.engines import Engine, Private
from fedbnn.messages import Failure, FitInstruction, FitResult, read_update
from fedbnn.report import figures

Answer = FitResult | Failure
Results = dict[str, Any]
POINTS, ROUNDS = 3.0, 30
WHEN = {"the last round": (ROUNDS,), "the middle one": (15,), "all rounds": range(1, ROUNDS + 1)}


def rolled(tensor: Tensor) -> Tensor:
    """What belongs to a class under the name of the next one."""
    return tensor.roll(1, 0) if tensor.ndim == 2 else tensor


FORGERIES: dict[str, Callable[[Tensor], Tensor]] = {
    "x 10": lambda tensor: 10 * tensor,
    "x -1": torch.neg,
    "x 1e6": lambda tensor: 1e6 * tensor,
    "zeros": torch.zeros_like,
    "classes swapped": rolled,
    "rows x -20": lambda tensor: -20 * tensor if tensor.ndim == 2 else tensor,
}


@dataclass(frozen=True)
class Forging:
    """An engine in which the first client of each of these rounds forges its answer."""

    engine: Engine
    exchange: str
    forge: Callable[[Tensor], Tensor]
    rounds: Sequence[int]

    def gather(self, payload: bytes, clients: Sequence[int], private: Private) -> Iterator[Answer]:
        asked = FitInstruction.from_bytes(payload)
        attacked = asked.exchange == self.exchange and asked.round in self.rounds
        for answer in self.engine.gather(payload, clients, private):
            mine = attacked and answer.client == clients[0]
            yield self._forged(answer) if mine and isinstance(answer, FitResult) else answer

    def _forged(self, answer: FitResult) -> FitResult:
        update = read_update(answer.update)
        tensors = {name: self.forge(tensor) for name, tensor in update.tensors.items()}
        return replace(answer, update=replace(update, tensors=tensors).to_bytes())

    def close(self) -> None:
        self.engine.close()


def played(folder: Path, method: str, *forging: Any) -> Results:
    """The quickstart with this method, and a forger if one is given; its results."""
    words = ["--config", "quickstart", "--method", method, "--beside", "[]"]
    made = compose(parse([*words, "--run_dir", str(folder)]), folder)
    engine: Any = Forging(made.engine, *forging) if forging else made.engine
    return experiment.run(replace(made, engine=engine))


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    """The results of a method where nobody lies, once."""
    known: dict[str, Results] = {}

    def found(method: str) -> Results:
        if method not in known:
            known[method] = played(tmp_path_factory.mktemp(method), method)
        return known[method]

    return found


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "every", lambda runs, sweep=None: {})


def costs(forged: Results, honest: Results) -> list[float]:
    """Points lost in either regime at the end."""
    return [honest[one]["avg_fin"] - forged[one]["avg_fin"] for one in REGIMES]


@pytest.mark.slow
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("method", ["fedbnn", "fedavg", "scaffold"])
def test_a_forger_of_weights_costs_little(
    method: str, forgery: str, when: str, honest: Callable[[str], Results], tmp_path: Path
) -> None:
    found = played(tmp_path, method, "train", FORGERIES[forgery], WHEN[when])
    assert max(costs(found, honest(method))) <= POINTS, costs(found, honest(method))


@pytest.mark.slow
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("method", ["fedbnn", "exact"])
def test_a_forger_of_statistics_costs_little(
    method: str, forgery: str, when: str, honest: Callable[[str], Results], tmp_path: Path
) -> None:
    found = played(tmp_path, method, "statistics", FORGERIES[forgery], WHEN[when])
    assert max(costs(found, honest(method))) <= POINTS, costs(found, honest(method))
