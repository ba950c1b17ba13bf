"""Only a `BoundaryMethod` can learn that a task has ended."""

import inspect
from pathlib import Path

import pytest

import train
from fedbnn.config import parse
from fedbnn.methods import (
    EWC,
    FCIL,
    MAS,
    METHODS,
    BoundaryMethod,
    FedAvg,
    FedBNN,
    LwF,
    Method,
    Scaffold,
)
from fedbnn.methods.base import without_boundaries


class Silent:
    """A stream that tells nobody where its tasks end."""

    def __init__(self, stream) -> None:
        self.stream = stream

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def task_ends(self) -> tuple[int, ...]:
        raise AssertionError("somebody asked where tasks end")


OTHERS = [FedBNN(r_init=1), FedAvg(), Scaffold(), FCIL(memory=4)]


@pytest.mark.parametrize("method", OTHERS, ids=lambda method: type(method).__name__)
def test_other_methods_run_without_ever_asking_for_a_boundary(method, toy, played) -> None:
    assert len(played(method, Silent(toy(rounds=2, num_clients=3, per_round=3))).states) == 2


@pytest.mark.parametrize("method", [EWC(), MAS(), LwF()], ids=lambda method: type(method).__name__)
def test_boundary_methods_do_ask(method, toy, played) -> None:
    with pytest.raises(AssertionError, match="tasks end"):
        played(method, Silent(toy(rounds=2, num_clients=3, per_round=3)))


def test_which_methods_are_told_boundaries() -> None:
    assert {
        name for name, preset in METHODS.items() if issubclass(preset.method, BoundaryMethod)
    } == {"ewc", "mas", "lwf"}


def test_no_hook_of_a_method_takes_anything_about_tasks() -> None:
    hooks = [
        hook
        for kind in (Method, FedBNN)
        for _, hook in inspect.getmembers(kind, inspect.isfunction)
    ]
    names = {name for hook in hooks for name in inspect.signature(hook).parameters}
    assert "round" in names
    assert not [name for name in names if "task" in name or "bound" in name]


@pytest.mark.parametrize("kind", [EWC, MAS, LwF])
def test_consolidation_at_task_ends_or_every_so_many_rounds(kind) -> None:
    ends = {3, 7}
    assert [number for number in range(1, 9) if kind().consolidates(number, number in ends)] == [
        3,
        7,
    ]
    assert [
        number for number in range(1, 9) if kind(every=4).consolidates(number, number in ends)
    ] == [4, 8]
    assert kind().facts()["consolidation"] == "at task ends"
    assert kind(every=4).facts()["consolidation"] == "every 4 rounds"


@pytest.mark.parametrize("kind", [EWC, MAS, LwF])
def test_where_tasks_overlap_consolidation_has_a_pace_unless_the_configuration_gives_one(
    kind,
) -> None:
    assert without_boundaries(kind()).facts()["consolidation"] == "every 10 rounds"
    assert without_boundaries(kind(every=4)) == kind(every=4)
    assert without_boundaries(FedBNN()) == FedBNN()


@pytest.mark.parametrize(
    ("schedule", "said"), [("separate", "at task ends"), ("gradual", "every 10 rounds")]
)
def test_a_plan_takes_the_boundaries_that_its_stream_has(
    schedule: str, said: str, tmp_path: Path
) -> None:
    times = {
        "separate": ("--stream.rounds_per_task", "2"),
        "gradual": ("--stream.durations", "[[0, 3], [2, 4]]"),
    }
    words = [
        "--stream.tasks",
        "2",
        "--stream.schedule",
        schedule,
        *times[schedule],
        "--network",
        "mlp",
        "--method",
        "ewc",
    ]
    assert train.plan(parse(words, train.SCHEMA), tmp_path).method.facts()["consolidation"] == said


def test_importances_are_asked_for_in_the_round_of_the_consolidation_only() -> None:
    assert EWC().exchanges_at(3, True) == ("train", "importance")
    assert EWC().exchanges_at(3, False) == LwF().exchanges_at(3, True) == ("train",)
