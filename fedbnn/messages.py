"""What crosses between server and client, as values: the order of a round, the update, the reply, the failure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedbnn import wire
from fedbnn.state import State

SCHEMA = 1


@dataclass(frozen=True)
class FitInstruction:
    """What the server asks of every participant of one exchange; the same bytes go to all of them.

    `exchange` is `train`, or a later exchange of the same round under the new weights (`statistics`,
    `importance`). `total` is N, the images of all participants of the round, `class_totals` the same by class.
    """

    run: str
    round: int
    exchange: str
    state: State
    total: int = 0
    class_totals: Mapping[str, int] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The order as it is sent."""
        meta = {
            "schema": SCHEMA,
            "run": self.run,
            "round": self.round,
            "exchange": self.exchange,
            "total": self.total,
            "class_totals": dict(self.class_totals),
            "classes": list(self.state.classes),
            "notes": dict(self.state.notes),
        }
        return wire.pack(self.state.tensors, meta)

    @classmethod
    def from_bytes(cls, payload: bytes) -> "FitInstruction":
        """The order that `to_bytes` wrote."""
        tensors, meta = wire.unpack(payload)
        if meta.get("schema") != SCHEMA:
            raise wire.Malformed(f"schema {meta.get('schema')}, this version speaks {SCHEMA}")
        state = State(tensors, tuple(meta["classes"]), meta["notes"])  # type: ignore[arg-type]
        return cls(
            str(meta["run"]),
            int(str(meta["round"])),
            str(meta["exchange"]),
            state,
            int(str(meta["total"])),
            meta["class_totals"],  # type: ignore[arg-type]
        )


@dataclass(frozen=True)
class Update:
    """What one client answers: tensors of the shapes the method expects, and how many images stand behind them.

    `counts` is the number of images by class; with `share: backbone_only` it is empty and `samples` says it all.
    `prior` is the digest of the order it answers.
    """

    run: str
    round: int
    exchange: str
    client: int
    prior: str
    samples: int
    counts: Mapping[str, int]
    tensors: Mapping[str, Tensor]

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes whose rows this update carries, in the order of its row tensors."""
        return tuple(self.counts)

    def to_bytes(self) -> bytes:
        """The update as it is sent."""
        meta = {
            "schema": SCHEMA,
            "run": self.run,
            "round": self.round,
            "exchange": self.exchange,
            "client": self.client,
            "prior": self.prior,
            "samples": self.samples,
            "counts": list(self.counts.items()),
        }
        return wire.pack(self.tensors, meta)


def class_counts(update: Update) -> Tensor:
    """n_kc of the classes an update carries, in its order."""
    return torch.tensor(list(update.counts.values()), dtype=torch.float64)


@dataclass(frozen=True)
class FitResult:
    """What comes back from where a client ran: its update in bytes, and the private state it keeps for itself.

    `private` never reaches the fold: in a simulation it is handed back to the same client the next time.
    `seconds` is how long the client worked, `inner` how much of it was forward, backward and optimiser.
    """

    client: int
    update: bytes
    private: bytes | None = None
    seconds: float = 0.0
    inner: float = 0.0


@dataclass(frozen=True)
class Failure:
    """A client that sent nothing that can be used, and why."""

    client: int
    reason: str
