"""What crosses between server and client, as values: instruction, update, result, failure.

An update is the one message from somebody whom the server need not believe: `read_update` makes one
of foreign bytes, or gives the one reason why not.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedbnn.protocol.state import Malformed, Payload, State, pack, unpack

SCHEMA, ANNOUNCE = 1, "announce"
_INSTRUCTION = ("run", "round", "exchange", "total", "class_totals")
_TEXTS, _NUMBERS = ("run", "exchange", "prior"), ("round", "client", "samples")


@dataclass(frozen=True)
class FitInstruction:
    """What the server asks of every participant of one exchange; the same bytes go to all of them.

    `exchange` is `train`, or a later one of the same round (`statistics`, `importance`), or before
    all of them `announce`: how many images a client will show, where it alone knows. `total` is N,
    the images of all participants of the round, and `class_totals` the same by class.
    """

    run: str
    round: int
    exchange: str
    state: State
    total: int = 0
    class_totals: Mapping[str, int] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The instruction as it is sent."""
        meta = {name: getattr(self, name) for name in _INSTRUCTION}
        meta |= {"classes": self.state.classes, "notes": self.state.notes, "schema": SCHEMA}
        return pack(self.state.tensors, meta)

    @classmethod
    def from_bytes(cls, payload: bytes) -> "FitInstruction":
        """The instruction that `to_bytes` wrote."""
        tensors, meta = unpack(payload)
        if meta.get("schema") != SCHEMA:
            raise Malformed(f"schema {meta.get('schema')}, this version speaks {SCHEMA}")
        state = State(tensors, tuple(meta["classes"]), meta["notes"])
        return cls(state=state, **{name: meta[name] for name in _INSTRUCTION})


@dataclass(frozen=True)
class Update:
    """What one client answers: the tensors asked for, and how many images are behind them.

    `counts` is the number of images by class; with `share: backbone_only` it is empty and `samples`
    says it all. `prior` is the content digest of the instruction it answers.
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
        meta = {name: getattr(self, name) for name in (*_TEXTS, *_NUMBERS)}
        meta |= {"schema": SCHEMA, "counts": list(self.counts.items())}
        return pack(self.tensors, meta)


def class_counts(update: Update) -> Tensor:
    """n_kc of the classes an update carries, in its order."""
    return torch.tensor(list(update.counts.values()), dtype=torch.float64)


class Refused(ValueError):
    """An update that is not let in; the text is the reason."""


def read_update(payload: Payload) -> Update:
    """The update in these bytes: readable header, matching digest, our schema, our fields."""
    try:
        tensors, meta = unpack(payload)
    except Malformed as error:
        raise Refused(str(error)[:200]) from error
    if meta.get("schema") != SCHEMA:
        raise Refused(f"schema {str(meta.get('schema'))[:20]}, this version speaks {SCHEMA}")
    texts = {name: _field(meta, name, str) for name in _TEXTS}
    numbers = {name: _field(meta, name, int) for name in _NUMBERS}
    return Update(**texts, **numbers, counts=_counts(_field(meta, "counts", list)), tensors=tensors)


def _field(meta: Mapping[str, Any], name: str, kind: type) -> Any:
    """One entry of the metadata, of exactly this type."""
    if type(meta.get(name)) is not kind:
        raise Refused(f"the metadata has no readable {name}")
    return meta[name]


def _counts(pairs: list[Any]) -> dict[str, int]:
    """Images by class: pairs of a name and a number, no name twice."""
    if any(type(pair) is not list or [*map(type, pair)] != [str, int] for pair in pairs):
        raise Refused("the metadata has no readable counts")
    counts: dict[str, int] = dict(pairs)
    if len(counts) != len(pairs):
        raise Refused("a class is counted twice")
    return counts


@dataclass(frozen=True)
class FitResult:
    """What comes back from where a client ran: its update in bytes, and what it keeps for itself.

    `private` never reaches the fold: in a simulation the same client gets it back the next time.
    `seconds` is how long it worked, `inner` how much of it was forward, backward and optimiser;
    `train` is what it saw of its training: the `loss` of its last pass, and the `kl` in it. `late`
    is set where it comes: the exchange that asked for it has ended.
    """

    client: int
    update: bytes
    private: bytes | None = None
    seconds: float = 0.0
    inner: float = 0.0
    train: Mapping[str, float] = field(default_factory=dict)
    late: bool = False


def is_receipt(client: int, private: bytes) -> bool:
    """Whether a client kept the thing itself, at a site of its own, and gave its digest for it."""
    return re.fullmatch(rb"%d-[0-9a-f]{64}" % client, private) is not None


@dataclass(frozen=True)
class Failure:
    """A client that sent nothing that can be used, and why."""

    client: int
    reason: str
