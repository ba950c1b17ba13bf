"""Every method by name: it plays, its updates are what it said it would send, and it is small."""

import inspect
from dataclasses import replace

import pytest
import torch

from fedbnn.heads import HEADS
from fedbnn.methods import METHODS, Method, fedavg
from fedbnn.methods.aggregation import TRAIN, Aggregator
from fedbnn.methods.fedavg import FedProx
from fedbnn.methods.fedbnn import FedBNN
from fedbnn.protocol.messages import FitInstruction, Update, read_update

TRAINED = [name for name, preset in METHODS.items() if preset.method.trains]


def method_of(name: str) -> Method:
    """The method of a preset; FedBNN with a posterior from the second round on."""
    made = METHODS[name].method(**METHODS[name].defaults)
    return replace(made, r_init=1) if isinstance(made, FedBNN) else made


def asked(method: Method, instruction: FitInstruction) -> Aggregator:
    """The aggregator of the exchange that this instruction opened."""
    if instruction.exchange == TRAIN:
        return method.aggregator(instruction.state)
    return method.consolidation.aggregator


def check(aggregator: Aggregator, state, update: Update) -> None:
    """All that the gate asks an aggregator about one update."""
    found = {name: (tuple(t.shape), t.dtype) for name, t in update.tensors.items()}
    assert found == aggregator.expected(state, update.counts)
    assert all(bool(tensor.isfinite().all()) for tensor in update.tensors.values())
    assert aggregator.defect(state, update) is None
    pieces = list(aggregator.influence(state, update))
    assert all(piece.dim() == 1 and bool(piece.isfinite().all()) for piece in pieces)
    lengths = aggregator.known(state, update)
    assert lengths.keys() <= update.tensors.keys()
    assert all(len(values) == len(update.classes) for values in lengths.values())


@pytest.mark.parametrize("name", TRAINED)
def test_it_plays_two_rounds_and_its_updates_pass_its_own_checks(name: str, toy, played) -> None:
    method, head = method_of(name), HEADS[METHODS[name].head]()
    run = played(method, toy(rounds=2, num_clients=3, per_round=3), head=head)
    assert [(run.records[r]["failed"], run.records[r]["refused"]) for r in (1, 2)] == [({}, {})] * 2
    said = [(FitInstruction.from_bytes(sent), read_update(got.update)) for sent, got in run.heard]
    of_method = [(sent, update) for sent, update in said if sent.exchange != "statistics"]
    assert {sent.round for sent, _ in of_method} == {1, 2}
    for sent, update in of_method:
        check(asked(method, sent), sent.state, update)


@pytest.mark.parametrize("name", TRAINED)
def test_updates_that_carry_something_else_do_not_pass(name: str, toy, played) -> None:
    method = method_of(name)
    run = played(method, toy(rounds=2, num_clients=2, per_round=2))
    for payload, result in run.heard:
        sent, update = FitInstruction.from_bytes(payload), read_update(result.update)
        more = replace(update, tensors={**update.tensors, "gradients": torch.zeros(3)})
        with pytest.raises(AssertionError):
            check(asked(method, sent), sent.state, more)


def test_the_posterior_is_reached(toy, played) -> None:
    """Else the tests above would say nothing about factors."""
    for name in ("fedbnn", "fedbnn_paper", "fedbnn_authors"):
        assert played(method_of(name), toy(rounds=2)).last.bayesian


def test_a_new_method_is_one_short_file_that_overrides_little() -> None:
    assert len(inspect.getsource(fedavg).splitlines()) <= 60
    own = {name for name in vars(FedProx) if not name.startswith("__")}
    assert {name for name in own if hasattr(Method, name)} == {"formula", "objective"}
    assert own == {"formula", "objective", "mu"}


def test_a_method_of_three_lines_plays(toy, played) -> None:
    """A method is its hyperparameters and what it overrides: nothing is to be registered."""

    class Halved(Method):
        def end_round(self, before, state, layout):
            return state.having({"backbone": state["backbone"] / 2})

    plain, halved = (played(kind(), toy(rounds=2)).states[0] for kind in (Method, Halved))
    assert torch.equal(halved["backbone"], plain["backbone"] / 2)
    assert torch.equal(halved["prototypes"], plain["prototypes"])
