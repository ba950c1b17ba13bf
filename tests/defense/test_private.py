"""What a client keeps for itself crosses the gate like what it sends: lies cost the liar alone."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from datamodules.stream import FederatedStream
from fedbnn.federation.engines import Answer, Private
from fedbnn.methods import FCIL, FedAvg, FedBNN, Local, Method, Scaffold
from fedbnn.protocol.messages import FitResult, is_receipt, read_update
from fedbnn.protocol.state import State
from fedbnn.storage.ledger import Ledger
from tests.core.conftest import digits, federate
from tests.core.playing import FAST, Federate, Short, after

__all__ = ["digits", "federate"]
LIAR = 1
Lie = Callable[[State], bytes]


class Lying:
    """An engine one of whose clients tells a new lie in every round after the first."""

    def __init__(self, engine: Any, lies: Sequence[Lie]) -> None:
        self.engine, self.lies = engine, lies

    def gather(self, payload: bytes, clients: Any, private: Private) -> Any:
        for answer in self.engine.gather(payload, clients, private):
            yield self.told(answer)

    def told(self, answer: Answer) -> Answer:
        if not isinstance(answer, FitResult) or answer.client != LIAR:
            return answer
        told = self.lies[: read_update(answer.update).round - 1]
        kept = State.from_bytes(answer.private) if answer.private else State({})
        return replace(answer, private=told[-1](kept)) if told else answer

    def close(self) -> None:
        self.engine.close()


def having(change: Mapping[str, Callable[[Tensor], Tensor]]) -> Lie:
    """Some tensors replaced, those that are there."""
    return lambda kept: kept.having(
        {name: how(kept[name]) for name, how in change.items() if name in kept}
    ).to_bytes()


def everywhere(how: Callable[[Tensor], Tensor]) -> Lie:
    """All tensors replaced."""
    return lambda kept: kept.having({n: how(t) for n, t in kept.tensors.items()}).to_bytes()


LIES: dict[str, Lie] = {
    "garbage": lambda kept: b"\xff" * 1000,
    "empty": lambda kept: b"",
    "another receipt": lambda kept: b"%d-" % (LIAR + 1) + b"0" * 64,
    "no state": lambda kept: State({}).to_bytes(),
    "cut": lambda kept: kept.to_bytes()[:-5],
    "one more": lambda kept: kept.having({"backbone.more": torch.ones(3)}).to_bytes(),
    "other types": everywhere(lambda tensor: tensor.double() if tensor.dim() else tensor.float()),
    "other shapes": everywhere(lambda tensor: tensor[None]),
    "classes twice": lambda kept: replace(kept, classes=("digits/0",) * 2).to_bytes(),
}
METHODS: dict[str, Method] = {
    "fcil": FCIL(),
    "scaffold": Scaffold(),
    "local": Local(),
    "fedavg at home": FedAvg(share="backbone_only"),
    "fedbnn at home": FedBNN(r_init=0, share="backbone_only"),
}


def played(
    federate: Federate, stream: FederatedStream, method: Method, lies: Sequence[Lie]
) -> tuple[Ledger, list[dict[str, str]]]:
    """As many rounds as there are lies, and one before; the ledger, and who was refused in each."""
    everybody = Short(stream, 1 + len(lies), participants=lambda round: (0, 1, 2))
    federation, initial = federate(method, local=FAST, stream=everybody)
    federation = replace(federation, engine=Lying(federation.engine, lies))
    after(federation, method.start(initial, federation.layout, 8))
    lines = [json.loads(line) for _, line in federation.ledger.records()]
    assert not any(line["failed"] for line in lines)
    return federation.ledger, [line["refused"] for line in lines]


def assert_each_costs_the_liar_its_round(refused: list[dict[str, str]]) -> None:
    assert refused[0] == {}
    for one in refused[1:]:
        assert list(one) == [str(LIAR)]
        assert one[str(LIAR)].startswith("what it keeps for itself: ")


@pytest.mark.parametrize("name", METHODS)
def test_a_lie_costs_the_liar_its_round_and_nobody_else(
    federate: Federate, digits: FederatedStream, name: str
) -> None:
    ledger, refused = played(federate, digits, METHODS[name], [*LIES.values()])
    assert_each_costs_the_liar_its_round(refused)
    assert ledger.private(LIAR) is not None


@pytest.mark.parametrize("name", METHODS)
def test_honest_clients_keep_what_they_keep(
    federate: Federate, digits: FederatedStream, name: str
) -> None:
    ledger, refused = played(federate, digits, METHODS[name], [State.to_bytes] * 3)
    assert refused == [{}] * 4
    assert ledger.clients() == (0, 1, 2)


@pytest.mark.parametrize("method", [FedAvg(), FedBNN(r_init=0)], ids=["fedavg", "fedbnn"])
def test_where_nothing_is_kept_nothing_may_be(
    federate: Federate, digits: FederatedStream, method: Method
) -> None:
    something: Lie = lambda kept: State({"x": torch.ones(1)}).to_bytes()  # noqa: E731
    assert_each_costs_the_liar_its_round(played(federate, digits, method, [something])[1])


NOT_FINITE = having({"prototypes": lambda rows: rows * torch.nan})
REPLAYED: dict[str, Lie] = {
    "10^6 images of an unknown class": lambda kept: State(
        {"pixels": kept["pixels"][:1].expand(1000, -1, -1, -1), "labels": torch.zeros(1000).long()},
        ("digits/unknown",),
    ).to_bytes(),
    "more than it was shown": lambda kept: kept.having(
        {name: torch.cat([kept[name]] * 50) for name in ("pixels", "labels")}
    ).to_bytes(),
    "a label without a class": having({"labels": lambda labels: labels + 1000}),
    "a negative label": having({"labels": lambda labels: labels - 1000}),
    "labels of floats": having({"labels": lambda labels: labels.double()}),
    "other pixels": having({"pixels": lambda pixels: pixels[:, :, :4].contiguous()}),
    "fewer pixels": having({"pixels": lambda pixels: pixels[:1]}),
}


def test_a_memory_that_lies_is_refused(federate: Federate, digits: FederatedStream) -> None:
    _, refused = played(federate, digits, FCIL(), [*REPLAYED.values()])
    assert_each_costs_the_liar_its_round(refused)
    assert "the announcement said 0" in refused[1][str(LIAR)]


def test_prototypes_at_home_are_finite_and_bring_no_backbone(
    federate: Federate, digits: FederatedStream
) -> None:
    backbone: Lie = lambda kept: kept.having({"backbone": torch.ones(7)}).to_bytes()  # noqa: E731
    method = FedAvg(share="backbone_only")
    _, refused = played(federate, digits, method, [NOT_FINITE, backbone])
    assert_each_costs_the_liar_its_round(refused)


@pytest.mark.parametrize("name", ["fcil", "local", "fedavg at home"])
def test_a_receipt_is_no_memory_where_the_server_reads_it(
    federate: Federate, digits: FederatedStream, name: str
) -> None:
    receipt: Lie = lambda kept: b"%d-" % LIAR + b"0" * 64  # noqa: E731
    assert_each_costs_the_liar_its_round(played(federate, digits, METHODS[name], [receipt])[1])


def test_a_receipt_is_the_clients_own() -> None:
    own = b"3-" + b"0a" * 32
    assert is_receipt(3, own)
    assert not any(is_receipt(3, one) for one in (b"4" + own[1:], own + b"0", own[:-1], b"", b"3-"))
