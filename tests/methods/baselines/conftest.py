"""A toy federation: real clients, gate, ledger and loop, on images of four by four pixels."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules.stream import ClientData
from fedbnn.bayes.flatten import layout_of
from fedbnn.defense.gate import Gate
from fedbnn.federation import server
from fedbnn.federation.engines import SerialEngine
from fedbnn.federation.parts import Federation
from fedbnn.heads import Head, LinearHead, prototypes
from fedbnn.images import ImageSet, Preprocess
from fedbnn.methods import Method
from fedbnn.networks import MLP
from fedbnn.protocol.messages import Failure, FitResult
from fedbnn.protocol.state import State
from fedbnn.seeds import forked, generator
from fedbnn.storage.files import Rejected
from fedbnn.storage.ledger import Ledger
from lightning_modules.client_runner import ClientRunner
from lightning_modules.client_trainer import LocalTraining

CLASSES = tuple(f"toy/{number}" for number in range(4))
LINEAR = LinearHead()
LOCAL = LocalTraining(optimizer="sgd", lr=0.05, epochs=2, batch_size=8, warmup_epochs=1)


@dataclass(frozen=True)
class Toy:
    """Two tasks of two classes, half of the rounds each.

    Clients hold their own images of the current task, or all the same ones, evenly or skewed.
    """

    rounds: int = 4
    num_clients: int = 4
    per_round: int = 4
    alike: bool = False
    skewed: bool = False
    images: int = 12
    image_shape: tuple[int, int, int] = (1, 4, 4)
    held: int = 0

    def task(self, round: int) -> int:
        return int(round > self.rounds // 2)

    def shares(self, round: int) -> tuple[float, ...]:
        return (1.0 - self.task(round), float(self.task(round)))

    def task_ends(self) -> tuple[int, ...]:
        return (self.rounds // 2, self.rounds)

    def participants(self, round: int) -> tuple[int, ...]:
        chosen = torch.randperm(self.num_clients, generator=generator(0, "toy", round))[
            : self.per_round
        ]
        return tuple(sorted(chosen.tolist()))

    def counts(self, round: int, client: int) -> dict[str, int]:
        return self.train(round, client).counts()

    def train(self, round: int, client: int) -> ImageSet:
        source = generator(1, "images", self.task(round), 0 if self.alike else client)
        second = torch.arange(self.images) % (client + 2 if self.skewed else 2) == 0
        labels = 2 * self.task(round) + second.long()
        patterns = torch.randint(0, 200, (4, *self.image_shape), generator=generator(2, "patterns"))
        noise = torch.randint(0, 56, (self.images, *self.image_shape), generator=source)
        return ImageSet((patterns[labels] + noise).to(torch.uint8), labels, CLASSES, Preprocess())

    def at(self, round: int, client: int, batch_size: int) -> ClientData:
        return ClientData(self.train(round, client), batch_size)


class Unwell(SerialEngine):
    """Some clients fail in some exchanges: {(call, client)}. It remembers what went down and up."""

    def __init__(self, worker: Any, ill: frozenset[tuple[int, int]]) -> None:
        super().__init__(worker)
        self.ill, self.calls = ill, 0
        self.heard: list[tuple[bytes, FitResult]] = []

    def gather(
        self, payload: bytes, clients: Sequence[int], private: Any
    ) -> Iterator[FitResult | Failure]:
        self.calls += 1
        for answer in super().gather(payload, clients, private):
            if (self.calls, answer.client) in self.ill:
                answer = Failure(answer.client, "ill")
            if isinstance(answer, FitResult):
                self.heard.append((payload, answer))
            yield answer


@dataclass
class Played:
    """The state after every round, what clients keep at the end, the records, and what was said."""

    states: list[State] = field(default_factory=list)
    privates: dict[int, State] = field(default_factory=dict)
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    heard: list[tuple[bytes, FitResult]] = field(default_factory=list)
    files: int = 0

    @property
    def last(self) -> State:
        return self.states[-1]

    def round_started(self, round: int, clients: Sequence[int]) -> None: ...
    def client_done(self, client: int) -> None: ...

    def round_done(self, record: Any) -> None:
        self.records[record["round"]] = record


def initial(method: Method, stream: Toy) -> tuple[State, Any, Any]:
    with forked(0):
        backbone = MLP(stream.image_shape, (8,))
    layout = layout_of(backbone)
    weights, buffers = layout.read(backbone)
    rows = prototypes.empty(backbone.width) if method.shares_prototypes else {}
    state = State({"backbone": weights, "buffers": buffers, **rows})
    return method.start(state, layout, stream.num_clients), backbone, layout


def play(
    method: Method,
    stream: Any,
    folder: Path,
    local: LocalTraining = LOCAL,
    ill: frozenset[Any] = frozenset(),
    head: Head = LINEAR,
) -> Played:
    """Play all rounds that the folder does not hold yet.

    Everybody is trusted, so that a method's arithmetic can be checked.
    """
    first, backbone, layout = initial(method, stream)
    seen, played = method.stream(stream), Played()
    engine = Unwell(ClientRunner(seen, backbone, layout, method, head, local, {}, 0), ill)

    def evaluate(state: State, _round: int, _privates: Any) -> dict[str, Any]:
        played.states.append(state)
        return {}

    with Ledger(folder, keep=100) as ledger:
        federation = Federation(
            run="toy",
            stream=seen,
            method=method,
            head=head,
            backbone=backbone,
            layout=layout,
            engine=engine,
            gate=Gate(influence_cap=None),
            ledger=ledger,
            rejected=Rejected(folder / "rejected", 5),
            evaluate=evaluate,
            watchers=(played,),
        )
        server.run(federation, first)
        kept = {client: ledger.private(client) for client in range(min(stream.num_clients, 50))}
        played.privates = {
            client: State.from_bytes(payload) for client, payload in kept.items() if payload
        }
        played.heard = engine.heard
        played.files = len(list((folder / "state" / "clients").iterdir()))
    return played


@pytest.fixture
def toy() -> Callable[..., Toy]:
    return Toy


@pytest.fixture
def played(tmp_path: Path) -> Callable[..., Played]:
    """Play a method on a stream in a folder of its own, or in the folder named."""
    numbers = iter(range(1000))

    def start(
        method: Method,
        stream: Any,
        local: LocalTraining = LOCAL,
        ill: Any = frozenset(),
        head: Head = LINEAR,
        name: str = "",
    ) -> Played:
        folder = tmp_path / (name or f"run{next(numbers)}")
        return play(method, stream, folder, local, frozenset(ill), head)

    return start
