"""results/forgers.py: the liars of the table of attacks lie as they say, and harm nothing else."""

import importlib
from types import ModuleType

import pytest
import torch

from fedbnn.protocol.messages import Update, read_update
from fedbnn.protocol.state import State
from tests.results.test_ablation import ROOT

CLASSES, WIDTH = ("a", "b"), 3


@pytest.fixture
def forgers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "results"))
    return importlib.import_module("forgers")


def prior() -> State:
    """A posterior of four weights and two prototypes."""
    tensors = {"backbone": torch.arange(4.0), "backbone.scale": torch.full((4,), 0.5)}
    tensors |= {"prototypes": torch.ones(2, WIDTH), "prototypes.scale": torch.full((2, WIDTH), 0.5)}
    return State({**tensors, "buffers": torch.zeros(0)}, CLASSES)


def sent(client: int) -> bytes:
    """What a client sends: factors."""
    draw = torch.Generator().manual_seed(client)
    parts = {"backbone": (4,), "prototypes": (2, WIDTH)}
    tensors = {f"{site}.precision": torch.rand(*n, generator=draw) for site, n in parts.items()}
    tensors |= {f"{site}.info": torch.randn(*n, generator=draw) for site, n in parts.items()}
    counts = dict.fromkeys(CLASSES, 2)
    tensors["buffers"] = torch.zeros(0)
    return Update("run", 1, "train", client, "prior", 4, counts, tensors).to_bytes()


@pytest.mark.parametrize("name", ["sign flip", "inner product", "ALIE"])
def test_what_honest_clients_sent_is_not_changed_by_a_liar(forgers: ModuleType, name: str) -> None:
    answers = [sent(client) for client in range(5)]
    before = [bytes(bytearray(answer)) for answer in answers]
    updates = [read_update(answer) for answer in answers]
    forgers.forged(prior(), updates[0], updates, forgers.ON_UPDATES[name])
    assert answers == before
    for answer in answers:
        read_update(answer)  # its digest is still right


def test_a_flipped_sign_is_four_steps_the_other_way(forgers: ModuleType) -> None:
    state, update = prior(), read_update(sent(1))
    lie = forgers.forged(state, update, [update], forgers.ON_UPDATES["sign flip"])
    own, other = (forgers.steps(state, one) for one in (update, lie))
    torch.testing.assert_close(other["backbone.info"], -4 * own["backbone.info"])
    torch.testing.assert_close(other["prototypes.info"], -4 * own["prototypes.info"])
    least = -0.5 * state["backbone.scale"].pow(-2)  # a posterior must be left
    expected = torch.maximum(-4 * own["backbone.precision"], least)
    torch.testing.assert_close(other["backbone.precision"], expected)
