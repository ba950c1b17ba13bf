"""The only way in: an update crosses the gate as bytes and is accepted, or refused with one reason.

In order: size, safetensors header, schema, run / round / exchange / client known and not heard yet, digest of the
order it answers, same tensors, shapes and types, finite, plausible number of images, positive precision; and, once
all have answered, the influence of each against the median of the others. Nothing is broadcast, repaired or executed.
What is accepted was read and checked once; as long as it fits into memory it is not read again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil, inf, isfinite

import torch

from fedbnn.defense import influence
from fedbnn.defense.checks import CHECKS, ExpectedUpdate, Lengths, addressed
from fedbnn.defense.updates import Refused, read_update
from fedbnn.errors import ConfigError, FederationError
from fedbnn.messages import Failure, FitResult, Update
from fedbnn.storage.rejected import Rejected
from fedbnn.storage.spool import MEMORY, Spool

__all__ = ["Candidates", "ExpectedUpdate", "Gate"]
TRAIN = "train"


@dataclass(frozen=True)
class Gate:
    """What the server lets in.

    Args:
        max_megabytes: an update of more bytes is refused unread.
        influence_cap: how far one client may move the fold and still count in full, measured by the error of the fold
            without it; at twice that it is refused. 1.7 holds one forger within twice the honest error (the formulas are
            in fedbnn/defense/influence.py). null trusts everybody.
        quorum: how many clients must be accepted: a fraction of those asked up to 1, a number of clients above 1.
        deadline_seconds: how long one client may take; null waits for ever.
        keep_rejected: how many refused updates stay on disk, with their reasons.
    """

    max_megabytes: float = 512.0
    influence_cap: float | None = 1.7
    quorum: float = 0.5
    deadline_seconds: float | None = 3600.0
    keep_rejected: int = 20

    def __post_init__(self) -> None:
        for name in ("max_megabytes", "influence_cap", "quorum", "deadline_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ConfigError(f"{name} must be above 0, not {value}", f"gate.{name}")
        if self.influence_cap is not None and self.influence_cap < 1:
            raise ConfigError(
                f"influence_cap must be at least 1, not {self.influence_cap}", "gate.influence_cap"
            )
        if self.keep_rejected < 0:
            raise ConfigError(
                f"keep_rejected must not be below 0, not {self.keep_rejected}", "gate.keep_rejected"
            )

    def needed(self, asked: int) -> int:
        """How many of the clients asked must be accepted; never less than one."""
        return max(1, ceil(self.quorum * asked - 1e-9) if self.quorum <= 1 else ceil(self.quorum))


@dataclass
class Candidates:
    """One exchange at the gate: `admit` every answer, `close`, then iterate over (update, trust) in client order.

    `failed` and `refused` say by client what was not folded and why, `pulls` how far each stood from the others.
    """

    gate: Gate
    call: ExpectedUpdate
    spool: Spool
    rejected: Rejected
    failed: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    trust: dict[int, float] = field(default_factory=dict)
    pulls: dict[int, float] = field(default_factory=dict)
    bytes_up: int = 0
    _heard: set[int] = field(default_factory=set)
    _samples: dict[int, int] = field(default_factory=dict)
    _rows: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    _known: dict[int, Lengths] = field(default_factory=dict)
    _read: dict[int, Update] = field(default_factory=dict)
    _room: int = MEMORY

    def admit(self, answer: FitResult | Failure) -> bool:
        """Accept an answer for folding, or note by name why not."""
        if isinstance(answer, Failure):
            self.failed[answer.client] = answer.reason
            return False
        self.bytes_up += len(answer.update)
        try:
            update = self._checked(answer)
        except Refused as refusal:
            self._refuse(answer.client, answer.update, str(refusal))
            return False
        self._samples[update.client] = update.samples
        self.spool.put(update.client, answer.update)
        if len(answer.update) <= self._room:
            self._room -= len(answer.update)
            self._read[update.client] = update
        return True

    def _checked(self, reply: FitResult) -> Update:
        """The update, after every check that needs no other client."""
        limit = self.gate.max_megabytes * 2**20
        if len(reply.update) > limit:
            raise Refused(
                f"too large: {len(reply.update) / 2**20:.1f} MB, the cap is {self.gate.max_megabytes:g} MB"
            )
        update = read_update(reply.update)
        addressed(update, self.call)
        self._hear(update, reply)
        for check in CHECKS:
            check(update, self.call)
        if self.gate.influence_cap is not None:
            self._place(update)
        return update

    def _hear(self, update: Update, reply: FitResult) -> None:
        """Each client speaks for itself, once, and before it has been given up."""
        if update.client != reply.client:
            raise Refused(f"claims to be client {update.client}")
        if reply.client in self._heard:
            raise Refused("answered twice")
        if reply.client in self.failed:
            raise Refused("answered late, after it had been given up")
        self._heard.add(reply.client)

    def _place(self, update: Update) -> None:
        """Keep where this update stands, to compare it with the others."""
        point = self.call.influence(update).float().contiguous()
        if not isfinite(influence.largest(point)):
            raise Refused("its influence is not finite")
        self.spool.beside("points").put(update.client, point.view(torch.uint8).numpy().data)
        if self.call.exchange == TRAIN and update.samples:
            self._rows[update.client], self._known[update.client] = (
                influence.row_lengths(update.tensors),
                self.call.known(update),
            )

    def _refuse(self, client: int, payload: bytes, reason: str) -> None:
        self.refused[client] = reason
        self.rejected.keep(self.call.round, self.call.exchange, client, payload, reason)

    def close(self) -> None:
        """Compare the accepted with each other, refuse who stands too far out, and insist on the quorum."""
        self.trust = dict.fromkeys(self.spool, 1.0)
        if self.gate.influence_cap is not None:
            self._compare(list(self.trust), self.gate.influence_cap)
        self._insist_on_quorum()

    def _compare(self, clients: list[int], cap: float) -> None:
        """Trust of every accepted client from its distance to the others; one that did not move is never refused."""
        squares = influence.squared_distances(self.spool.beside("points"), clients)
        pulls = influence.pulls(squares, [self._samples[client] for client in clients])
        self.pulls = dict(zip(clients, pulls, strict=True))
        moved = [
            client
            for client, length in zip(clients, squares[:-1, -1].tolist(), strict=True)
            if length
        ]
        for client, pull in self.pulls.items():
            long, name = influence.row_ratio(self._rows, moved, client, self._known.get(client, {}))
            near, usual = influence.trust(pull, cap), influence.trust(long, influence.LONG)
            self.trust[client] = min(near if client in moved else max(near, influence.LEAST), usual)
            if not usual:
                self._expel(client, f"its {name} are {long:.3g} times as long as usual")
            elif not self.trust[client]:
                self._expel(
                    client,
                    f"influence {pull:.3g} times the error of the others, the cap is {cap:g}",
                )

    def _expel(self, client: int, reason: str) -> None:
        self._refuse(client, self.spool[client], reason)
        self.spool.drop(client)
        del self.trust[client]
        self._read.pop(client, None)

    def _insist_on_quorum(self) -> None:
        asked = len(self.call.sample_counts)
        needed = self.gate.needed(asked)
        if len(self.trust) < needed:
            lost = {**self.failed, **self.refused}
            reasons = "; ".join(f"client {client}: {lost[client]}" for client in sorted(lost)[:5])
            what = f"round {self.call.round}: {len(self.trust)} of {asked} clients can be folded, the quorum is {needed}"
            raise FederationError(
                what,
                reasons,
                "nothing was changed; resume when the clients are well, or lower gate.quorum",
            )

    def __iter__(self) -> Iterator[tuple[Update, float]]:
        for client, trust in self.trust.items():
            yield self._read.get(client) or read_update(self.spool[client]), trust
