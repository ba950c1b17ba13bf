"""1,000 registered clients, 200 of them in each of 300 rounds: neither memory nor the disk grows.

The real server, gate, fold, spool and ledger; the clients answer at once, and keep something.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedbnn import machine
from fedbnn.bayes.flatten import Layout, layout_of
from fedbnn.defense.gate import Gate
from fedbnn.federation import server
from fedbnn.federation.engines import SerialEngine
from fedbnn.federation.parts import Federation
from fedbnn.heads import LinearHead, prototypes
from fedbnn.methods import Scaffold
from fedbnn.methods.scaffold import BACKBONE, PROTOTYPES
from fedbnn.networks import MLP
from fedbnn.protocol.messages import FitInstruction, FitResult, Update
from fedbnn.protocol.state import State, content_digest
from fedbnn.seeds import generator
from fedbnn.storage.files import Rejected
from fedbnn.storage.ledger import Ledger

CLIENTS, EACH = 1000, 200
HELD = {"cat": 6, "dog": 4}
SENT, STEPS = ("backbone", "prototypes"), 0.1
"""t_k lr, by which a control follows from the weights."""


def stream(rounds: int) -> Any:
    """200 of 1,000 clients, by round; all hold the same two classes."""

    def participants(round: int) -> tuple[int, ...]:
        chosen = torch.randperm(CLIENTS, generator=generator(0, "who", round))[:EACH]
        return tuple(sorted(chosen.tolist()))

    return SimpleNamespace(
        rounds=rounds,
        image_shape=(1, 4, 4),
        held=False,
        participants=participants,
        counts=lambda round, client: dict(HELD),
        shares=lambda round: (1.0,),
        task_ends=lambda: (rounds,),
    )


def rows_of(told: FitInstruction, name: str) -> torch.Tensor:
    """Rows of the classes that everybody holds."""
    return told.state[name][told.state.index(tuple(HELD))]


class Quick:
    """A client that answers with the state it was sent, a little changed, and keeps its control."""

    def __init__(self) -> None:
        self.read: tuple[bytes, FitInstruction] = (b"", FitInstruction("", 0, "", State({})))

    def perform(self, payload: bytes, client: int, private: bytes | None) -> FitResult:
        if self.read[0] is not payload:
            self.read = payload, FitInstruction.from_bytes(payload)
        told = self.read[1]
        random = generator(0, "update", told.round, client)
        weights = {n: rows_of(told, n) if n == "prototypes" else told.state[n] for n in SENT}
        sent = {n: w + 0.01 * torch.randn(w.shape, generator=random) for n, w in weights.items()}
        control = {"backbone": told.state[BACKBONE], "prototypes": rows_of(told, PROTOTYPES)}
        change = {n: (weights[n] - y) / STEPS - control[n] for n, y in sent.items()}
        own = {BACKBONE: change["backbone"], PROTOTYPES: change["prototypes"]}
        tensors = {**sent, "buffers": told.state["buffers"], **own}
        where = (told.run, told.round, told.exchange, client, content_digest(payload))
        update = Update(*where, sum(HELD.values()), HELD, tensors)
        return FitResult(client, update.to_bytes(), State(own, tuple(HELD)).to_bytes())


class Watcher:
    """What the process holds and what the directory has, every 25 rounds."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.seen: list[tuple[float, int]] = []

    def round_started(self, round: int, clients: object) -> None:
        """Nothing to see yet."""

    def client_done(self, client: int) -> None:
        """Nothing to see yet."""

    def round_done(self, record: Mapping[str, Any]) -> None:
        if record["round"] % 25 == 0:
            own = [path for path in self.run_dir.rglob("*") if path.suffix == ".safetensors"]
            self.seen.append((machine.resident(), sum(path.stat().st_size for path in own)))


def played(run_dir: Path, rounds: int) -> tuple[list[tuple[float, int]], int]:
    """Memory and bytes on disk, every 25 rounds; how many clients keep something at the end."""
    backbone, watcher = MLP((1, 4, 4), (16,)), Watcher(run_dir)
    layout: Layout = layout_of(backbone)
    weights, buffers = layout.read(backbone)
    method = Scaffold()
    state = State({"backbone": weights, "buffers": buffers, **prototypes.empty(backbone.width)})
    with Ledger(run_dir) as ledger:
        federation = Federation(
            run="scale",
            stream=stream(rounds),
            method=method,
            head=LinearHead(),
            backbone=backbone,
            layout=layout,
            engine=SerialEngine(Quick()),
            gate=Gate(),
            ledger=ledger,
            rejected=Rejected(run_dir / "rejected"),
            evaluate=lambda *_: {},
            watchers=(watcher,),
        )
        server.run(federation, method.start(state, layout, CLIENTS))
        return watcher.seen, len(ledger.clients())


@pytest.fixture
def few_threads() -> Iterator[None]:
    """As in a worker."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_round_of_two_hundred_clients(tmp_path: Path) -> None:
    assert played(tmp_path, 1) == ([], EACH)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("few_threads")
def test_three_hundred_rounds_of_two_hundred_clients_are_flat(tmp_path: Path) -> None:
    seen, keeping = played(tmp_path, 300)
    assert keeping == CLIENTS
    held, written = zip(*seen[1:], strict=True)
    assert max(held) < 1.1 * held[0], seen
    assert max(written) < 1.1 * written[0], seen
