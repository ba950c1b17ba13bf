"""docs/privacy.md lists what leaves a client: every tensor of every exchange, and its bytes."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from datamodules.stream import FederatedStream
from fedbnn.defense.gate import Gate
from fedbnn.defense.privacy import Privacy
from fedbnn.heads import ExactHead, GaussianHead, LinearHead
from fedbnn.methods import FCIL, METHODS, FedAvg, FedBNN, Scaffold
from fedbnn.methods.bounds import Exact
from fedbnn.methods.importance import EWC
from fedbnn.protocol.messages import FitInstruction, FitResult, read_update
from tests.core.playing import FAST, Federate, Overheard, Short, after

PAGE = (Path(__file__).parents[2] / "docs/privacy.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (train|importance|statistics) \| (.*?) \| `(.+?)` \| `(.+?)` \|$", re.M)
OPEN = Gate(influence_cap=None)
BOTH = Privacy(clip=1.0, clip_images=1.0)
RUNS: dict[str, tuple[Any, Any, Any]] = {
    "points, then factors": (FedBNN(r_init=1), GaussianHead(), Privacy()),
    "signals": (FCIL(), LinearHead(), Privacy()),
    "controls": (Scaffold(), LinearHead(), Privacy()),
    "importances": (EWC(every=1), LinearHead(), Privacy()),
    "fixed features": (Exact(), ExactHead(filters=2), Privacy()),
    "private features": (Exact(), ExactHead(filters=2), Privacy(clip_images=1.0)),
    "private factors": (FedBNN(r_init=1), LinearHead(), Privacy(clip=1.0)),
    "private features that move": (FedBNN(r_init=1), GaussianHead(), BOTH),
    "rows at home": (FedAvg(share="backbone_only"), LinearHead(), Privacy()),
}


def listed() -> dict[tuple[str, str, bool], str]:
    """Bytes as the page has them, by exchange, tensor and whether it is that of private clients."""
    return {(way, name, "private" in who): size for way, who, name, size in ROW.findall(PAGE)}


def sent(federate: Federate, digits: FederatedStream, run: str) -> Iterator[tuple[Any, int]]:
    """What went up in two rounds, by the key of the page, with what the page says of its bytes."""
    method, head, private = RUNS[run]
    parts = {"head": head, "privacy": private, "gate": OPEN, "local": FAST}
    federation, initial = federate(method, stream=Short(digits, 2), **parts)
    layout = federation.layout
    if isinstance(method, Scaffold):
        initial = method.start(initial, layout, 8)
    engine = Overheard(federation.engine)  # type: ignore[arg-type]
    after(replace(federation, engine=engine), initial)
    states = {}
    for payload in engine.down:
        told = FitInstruction.from_bytes(payload)
        states[told.round, told.exchange] = told.state
    for answer in engine.up:
        assert isinstance(answer, FitResult)
        update = read_update(answer.update)
        classes = len(states[update.round, update.exchange].classes)
        known = {"P": layout.size, "B": 0, "d": layout.width, "k": len(update.counts)}
        known |= {"n": update.samples, "C": classes, "w": 18, "min": min}
        whose = private.on and update.exchange == "statistics"
        for name, tensor in update.tensors.items():
            key = (update.exchange, name, whose)
            assert key in listed(), f"{run} sends {name}, which the page does not list"
            said = eval(listed()[key], {"__builtins__": {}}, known)
            assert said == tensor.numel() * tensor.itemsize, f"bytes of {name}"
            yield key, said


def test_everything_that_leaves_is_on_the_page_and_nothing_else(
    federate: Federate, digits: FederatedStream
) -> None:
    found = {key for run in RUNS for key, _ in sent(federate, digits, run)}
    assert found == listed().keys()


@pytest.mark.parametrize("name", METHODS)
def test_no_method_has_an_exchange_that_is_not_played_here(name: str) -> None:
    """Methods that extend the exchange are those above; whoever adds one comes by here."""
    played = {type(method).exchange for method, _, _ in RUNS.values()}
    assert METHODS[name].method.exchange in played
