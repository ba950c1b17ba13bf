"""What playing whole rounds takes: a fast client, a short stream, an engine that is overheard."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from datamodules.stream import FederatedStream
from fedbnn.federation import server
from fedbnn.federation.engines import Private, SerialEngine
from fedbnn.federation.parts import Federation
from fedbnn.protocol.messages import Failure, FitResult
from fedbnn.protocol.state import State
from lightning_modules.client_trainer import LocalTraining

Federate = Callable[..., tuple[Federation, State]]
FAST = LocalTraining(epochs=1, batch_size=16, warmup_epochs=1)


class Short:
    """The first rounds of a stream."""

    def __init__(self, stream: FederatedStream, rounds: int, **changes: Any) -> None:
        self.stream, self.rounds, self.changes = stream, rounds, changes

    def __getattr__(self, name: str) -> Any:
        return self.changes[name] if name in self.changes else getattr(self.stream, name)


class Overheard:
    """An engine that keeps every byte that goes down and up."""

    def __init__(
        self,
        engine: SerialEngine,
        spoil: Callable[[FitResult | Failure], FitResult | Failure] = lambda answer: answer,
    ) -> None:
        self.engine, self.spoil = engine, spoil
        self.down: list[bytes] = []
        self.up: list[FitResult | Failure] = []

    def gather(
        self, payload: bytes, clients: Sequence[int], private: Private
    ) -> Iterator[FitResult | Failure]:
        self.down.append(payload)
        for answer in self.engine.gather(payload, clients, private):
            self.up.append(self.spoil(answer))
            yield self.up[-1]

    def close(self) -> None:
        self.engine.close()


def sha(state: State) -> str:
    return hashlib.sha256(state.to_bytes()).hexdigest()


def after(federation: Federation, initial: State) -> State:
    return server.run(federation, initial)
