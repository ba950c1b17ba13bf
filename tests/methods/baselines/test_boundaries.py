"""Only a method with a consolidation can learn that a task has ended."""

import inspect
from types import SimpleNamespace

import pytest

from fedbnn.defense.privacy import Privacy
from fedbnn.federation import server
from fedbnn.heads import HEADS, GaussianHead, Head, LinearHead
from fedbnn.methods import METHODS, Method
from fedbnn.methods.aggregation import Aggregator
from fedbnn.methods.base import LocalObjective, without_boundaries
from fedbnn.methods.fedavg import FedAvg
from fedbnn.methods.fedbnn import FactorAggregator, FedBNN
from fedbnn.methods.glfc import FCIL
from fedbnn.methods.importance import EWC, MAS
from fedbnn.methods.lwf import LwF
from fedbnn.methods.scaffold import Scaffold
from fedbnn.protocol.state import State

LINEAR = LinearHead()


class Silent:
    """A stream that tells nobody where its tasks end."""

    def __init__(self, stream) -> None:
        self.stream = stream

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def task_ends(self) -> tuple[int, ...]:
        raise AssertionError("somebody asked where tasks end")


OTHERS = [FedBNN(r_init=1), FedAvg(), Scaffold(), FCIL()]


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("method", OTHERS, ids=lambda method: type(method).__name__)
def test_other_methods_run_without_ever_asking_for_a_boundary(method, head, toy, played) -> None:
    stream = Silent(toy(rounds=2, num_clients=3, per_round=3))
    assert len(played(method, stream, head=head()).states) == 2


@pytest.mark.parametrize("method", [EWC(), MAS(), LwF()], ids=lambda method: type(method).__name__)
def test_boundary_methods_do_ask(method, toy, played) -> None:
    with pytest.raises(AssertionError, match="tasks end"):
        played(method, Silent(toy(rounds=2, num_clients=3, per_round=3)))


def test_which_methods_are_told_boundaries() -> None:
    methods = {name: preset.method(**preset.defaults) for name, preset in METHODS.items()}
    told = {name for name, method in methods.items() if method.consolidation is not None}
    assert told == {"ewc", "mas", "lwf"}


def test_no_hook_of_a_method_takes_anything_about_tasks() -> None:
    kinds = (Method, FedBNN, Aggregator, FactorAggregator, LocalObjective)
    hooks = [hook for kind in kinds for _, hook in inspect.getmembers(kind, inspect.isfunction)]
    names = {name for hook in hooks for name in inspect.signature(hook).parameters}
    assert {"round", "state", "update", "labels"} <= names
    assert not [name for name in names if "task" in name or "bound" in name]


@pytest.mark.parametrize("kind", [EWC, MAS, LwF])
def test_consolidation_at_task_ends_or_every_so_many_rounds(kind) -> None:
    def due(method: Method) -> list[int]:
        return [r for r in range(1, 9) if method.consolidation.due(r, r in {3, 7})]

    assert due(kind()) == [3, 7]
    assert due(kind(every=4)) == [4, 8]
    assert kind().facts()["consolidation"] == "at task ends"
    assert kind(every=4).facts()["consolidation"] == "every 4 rounds"


@pytest.mark.parametrize("kind", [EWC, MAS, LwF])
def test_where_tasks_overlap_consolidation_has_a_pace_unless_the_configuration_gives_one(
    kind,
) -> None:
    assert without_boundaries(kind()).facts()["consolidation"] == "every 10 rounds"
    assert without_boundaries(kind(every=4)) == kind(every=4)
    assert without_boundaries(FedBNN()) == FedBNN()


def exchanges(method: Method, number: int, head: Head = LINEAR) -> list[str]:
    """The exchanges of a round of a stream whose only task ends with round 3."""
    stream = SimpleNamespace(task_ends=lambda: (3,))
    federation = SimpleNamespace(method=method, head=head, stream=stream, privacy=Privacy())
    found = server.exchanges(federation, number, State({}), State({}))
    return [aggregator.exchange for aggregator in found]


def test_importances_are_asked_for_in_the_round_of_the_consolidation_only() -> None:
    assert exchanges(EWC(), 3) == exchanges(MAS(), 3) == ["train", "importance"]
    assert exchanges(EWC(), 2) == exchanges(LwF(), 3) == ["train"]
    assert exchanges(EWC(every=2), 2) == ["train", "importance"]
    assert exchanges(EWC(), 3, GaussianHead()) == ["train", "importance", "statistics"]
