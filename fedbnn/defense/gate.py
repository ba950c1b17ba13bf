"""The only way in: an update crosses the gate as bytes and is accepted, or refused with one reason.

In order: size, safetensors header, digest, schema; run, round, exchange, client known and not heard
yet; the instruction it answers; same tensors, shapes and types; finite; the images it announced;
what weights, variances and statistics cannot contradict; and, once all have answered, its influence
and what has units of its own against those of the others. What a client keeps for itself comes the
same way: size, bytes, tensors, finite, no more than it was shown.
Nothing is broadcast, repaired or executed. What is accepted was read and checked once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, isfinite

import torch
from torch import Tensor

from fedbnn.config.schema import AtLeastOne, NonNegativeCount, Positive, UnitInterval
from fedbnn.defense import robust, rules
from fedbnn.defense.robust import Moves, moves_of_points
from fedbnn.errors import FederationError
from fedbnn.heads import checks
from fedbnn.methods.aggregation import largest
from fedbnn.protocol.messages import Failure, FitResult, Refused, Update, is_receipt, read_update
from fedbnn.protocol.state import Malformed, State
from fedbnn.storage.files import Rejected, Spool

Spec = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
TRAIN = "train"
LARGEST = 1e18


@dataclass(frozen=True)
class Gate:
    """What the server lets in.

    Args:
        max_megabytes: an update of more bytes is refused unread.
        influence_cap: how far one client may move the aggregate and still count in full, measured
            by the error of the aggregate without it; at twice that it is refused. 1.7 holds one
            forger within twice the honest error (formulas: fedbnn/defense/robust.py). null trusts
            everybody.
        robust: who counts: by `influence`, or by a rule of the literature instead, for weights and
            statistics (formulas: fedbnn/defense/rules.py). What has units of its own, rows and
            class means, is compared under every rule.
        forgers: the share of clients that rules of the literature take to lie.
        quorum: how many clients must be accepted: a fraction of those asked up to 1, a number of
            clients above 1.
        deadline_seconds: how long one client may take; null waits for ever.
        keep_rejected: how many refused updates stay on disk with their reasons, 512 MB in all.
    """

    max_megabytes: Positive = 512.0
    influence_cap: AtLeastOne | None = 1.7
    robust: rules.Rule = "influence"
    forgers: UnitInterval = 0.2
    quorum: Positive = 0.5
    deadline_seconds: Positive | None = 3600.0
    keep_rejected: NonNegativeCount = 20

    def needed(self, asked: int) -> int:
        """How many of the clients asked must be accepted; never less than one."""
        return max(1, ceil(self.quorum * asked - 1e-9) if self.quorum <= 1 else ceil(self.quorum))


@dataclass(frozen=True)
class ExpectedUpdate:
    """What the server asked in one exchange, and so what it may be answered.

    `prior` is the digest of the instruction, `sample_counts` the images by class of every client
    asked. `expected` gives the tensors of an update of so many images by class, `defect` says why
    an update cannot be folded, `influence` puts it as a point among the others, piece by piece, and
    `known` says how long its rows are on the server, by tensor. `apart` gives by client how far it
    stands from the others in what has units of its own, 1 where trust begins to fall, and in what.
    `kept` gives the tensors of what a client may keep for itself, given that and the images it
    announced; where a memory of images changes in between, it `forgets` some of these. With
    `receipts` the digest of it does, where the client keeps the thing at a site of its own.
    `centred` gives an update in numbers of which the middle can be taken (and back, with +1), where
    there are such; `rows` says whether its prototypes have a row for each class it holds.
    `private` gives what may be known of private clients in place of what they sent. Distances below
    `calm` of a client are none to speak of. `announces` says that nobody has announced anything
    yet: an answer does.
    """

    run: str
    round: int
    exchange: str
    prior: str
    sample_counts: Mapping[int, Mapping[str, int]]
    expected: Callable[[Mapping[str, int]], Spec]
    defect: Callable[[Update], str | None]
    influence: Callable[[Update], Iterable[Tensor]]
    known: Callable[[Update], Mapping[str, Sequence[float]]]
    apart: Callable[[Sequence[Update]], checks.Apart] = lambda _updates: {}
    kept: Callable[[State, Mapping[str, int]], Spec] = lambda _own, _announced: {}
    forgets: bool = False
    receipts: bool = True
    centred: Callable[[Update, int], Update] | None = None
    rows: bool = True
    private: Callable[[Sequence[Update]], Iterator[Update]] | None = None
    calm: Callable[[int], float] = lambda _client: 0.0
    announces: bool = False

    def announced(self, update: Update) -> Mapping[str, int]:
        """The images by class that its client has announced; the one of no name counts them all."""
        if self.announces:
            return update.counts or {"": update.samples}
        return self.sample_counts[update.client]


@dataclass
class Candidates:
    """One exchange at the gate: `admit` every answer, `close`, then iterate over (update, trust).

    They come in client order. `trust` is the weight of every client that is folded, `failed` and
    `refused` say by client what is not and why, `pulls` how far each stood from the others, and
    `late` how many rounds ago a client was asked for the answer that is folded now; `received` has
    the bytes of every client's answers, `squares` the squared distances between those `placed`, and
    `heard` are the clients that have spoken for themselves.
    """

    gate: Gate
    call: ExpectedUpdate
    spool: Spool
    rejected: Rejected
    failed: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    trust: dict[int, float] = field(default_factory=dict)
    pulls: dict[int, float] = field(default_factory=dict)
    late: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    placed: Sequence[int] = ()
    squares: Tensor | None = None
    heard: set[int] = field(default_factory=set)
    _accepted: dict[int, Update] = field(default_factory=dict)

    @property
    def bytes_up(self) -> int:
        """The bytes of all answers."""
        return sum(self.received.values())

    def admit(self, answer: FitResult | Failure, call: ExpectedUpdate | None = None) -> bool:
        """Accept an answer for folding, or note by name why not; `call` is that of a late one."""
        if isinstance(answer, Failure):
            if answer.client in self.call.sample_counts and answer.client not in self.heard:
                self.failed[answer.client] = answer.reason
            return False
        self.received[answer.client] = len(answer.update) + self.received.get(answer.client, 0)
        try:
            update = self._checked(answer, call or self.call)
        except Refused as refusal:
            self.refuse(answer.client, answer.update, str(refusal))
            return False
        if call is not None:
            self.late[update.client] = self.call.round - update.round
        kept = self.spool.put(update.client, answer.update)
        self._accepted[update.client] = update if kept is answer.update else read_update(kept)
        return True

    def _checked(self, reply: FitResult, call: ExpectedUpdate) -> Update:
        """The update, after every check that needs no other client."""
        self.sized(reply.update)
        update = read_update(reply.update)
        _addressed(update, call)
        self._hear(update, reply)
        _same_sites(update, call)
        _finite(update.tensors)
        _plausible(update, call)
        if (reason := call.defect(update)) is not None:
            raise Refused(reason)
        own = reply.private
        if own is not None and not (call.receipts and is_receipt(reply.client, own)):
            self._kept(own, call, reply.client)
        return update

    def sized(self, payload: bytes) -> None:
        """Raise `Refused` for more bytes than are read."""
        size, cap = len(payload) / 2**20, self.gate.max_megabytes
        if size > cap:
            raise Refused(f"too large: {size:.1f} MB, the cap is {cap:g} MB")

    def _kept(self, payload: bytes, call: ExpectedUpdate, client: int) -> None:
        """What a client wants to get back the next time is as good as what it sends."""
        try:
            self.sized(payload)
            own = State.from_bytes(payload)
            if len(set(own.classes)) < len(own.classes):
                raise Refused("a class is named twice")
            _same_tensors(call.kept(own, call.sample_counts[client]), own.tensors)
            _finite(own.tensors)
        except (Malformed, Refused) as error:
            raise Refused(f"what it keeps for itself: {str(error)[:200]}") from error

    def _hear(self, update: Update, reply: FitResult) -> None:
        """Each client speaks for itself, once, and before it has been given up."""
        if update.client != reply.client:
            raise Refused(f"claims to be client {update.client}")
        if reply.client in self.heard:
            raise Refused("answered twice")
        if reply.client in self.failed:
            raise Refused("answered late, after it had been given up")
        self.heard.add(reply.client)

    def refuse(self, client: int, payload: bytes, reason: str) -> None:
        """Note by name why an answer does not count, and keep it for a person to look at."""
        self.refused[client] = reason
        self.rejected.keep(self.call.round, self.call.exchange, client, payload, reason)

    def close(self) -> None:
        """Compare the accepted, refuse those that stand too far out, insist on the quorum.

        Where nobody is asked, since all of a round come late from another, there is none.
        """
        self.trust = dict.fromkeys(sorted(self._accepted), 1.0)
        cap, ours = self.gate.influence_cap, self.gate.robust == "influence"
        if cap is not None or not ours:
            self._distances()
        if cap is not None:
            self._compare(self._remaining(), cap if ours else inf)
        if not ours:
            self._choose(self._remaining())
        asked = len(self.call.sample_counts)
        needed = self.gate.needed(asked)
        if asked and len(self.trust) < needed:
            lost = {**self.failed, **self.refused}
            reasons = "; ".join(f"client {client}: {lost[client]}" for client in sorted(lost)[:5])
            found = f"{len(self.trust)} of {asked} clients count, the quorum is {needed}"
            fix = "nothing was changed; resume when the clients are well, or lower gate.quorum"
            raise FederationError(f"round {self.call.round}: {found}", reasons, fix)

    def _distances(self) -> None:
        """Expel those at no finite place, and measure the squared distances between the others."""
        squares = self._squares()
        finite = squares[:, -1].isfinite()
        for client, placed in zip([*self.trust], finite[:-1].tolist(), strict=True):
            if not placed:
                self._expel(client, "its influence is not finite")
        self.placed, self.squares = [*self.trust], squares[finite][:, finite]

    def _remaining(self) -> Tensor:
        """Squared distances between those placed that count still, and to where they started."""
        assert self.squares is not None
        here = torch.tensor([*(client in self.trust for client in self.placed), True])
        return self.squares[here][:, here]

    def _squares(self) -> Tensor:
        """Squared distances between all that count so far, and to where they started."""
        points = [self.call.influence(self._accepted[client]) for client in self.trust]
        return robust.squared_distances(points)

    def moves(self, weigh: Callable[[Tensor], Tensor]) -> Moves:
        """How far those who count move the model; `weigh` gives their weights by their images."""
        if self.squares is None:
            self.placed, self.squares = [*self.trust], self._squares()
        images = torch.tensor([float(self._accepted[one].samples) for one in self.trust])
        weights = weigh(images.double()) * torch.tensor([*self.trust.values()]).double()
        return moves_of_points([*self.trust], self._remaining(), weights)

    def _compare(self, squares: Tensor, cap: float) -> None:
        """Trust from the distance to the others; a client that did not move is never refused.

        With a cap of infinity from rows and from what has units of its own alone.
        """
        accepted = [self._accepted[client] for client in self.trust]
        alike = checks.peers([update.counts for update in accepted])
        images = [update.samples for update in accepted]
        pulls = robust.pulls(squares, images, [*map(self.call.calm, self.trust)], alike)
        self.pulls = dict(zip(self.trust, pulls, strict=True))
        moved = [c for c, norm in zip(self.trust, squares[:-1, -1].tolist(), strict=True) if norm]
        trained = [update for update in accepted if update.exchange == TRAIN and update.samples]
        lengths = {update.client: robust.row_lengths(update.tensors) for update in trained}
        counts = {update.client: update.counts for update in trained}
        apart = self.call.apart([update for update in accepted if update.samples])
        for update in accepted:
            client, pull = update.client, self.pulls[update.client]
            far, of = apart.get(client, (0.0, ""))
            known = self.call.known(update)
            long, name = robust.row_ratio(lengths, counts, moved, client, known)
            near, usual = robust.trust(pull, cap), robust.trust(long, robust.LONG)
            like = robust.trust(far, 1.0)
            near = near if client in moved else max(near, robust.LEAST)
            self.trust[client] = min(near, usual, like)
            if not like:
                self._expel(client, f"its {of} are {far:.3g} times as far out as they may be")
            elif not usual:
                self._expel(client, f"its {name} are {long:.3g} times as long as usual")
            elif not self.trust[client]:
                reason = f"influence {pull:.3g} times the error of the others, the cap is {cap:g}"
                self._expel(client, reason)

    @property
    def _by_coordinate(self) -> bool:
        return self.gate.robust in rules.BY_COORDINATE and self.call.centred is not None

    def _choose(self, squares: Tensor) -> None:
        """Trust by a rule of the literature, where it is one of clients; never more than before."""
        if self.trust and not self._by_coordinate:
            gone = self.refused.keys() & self.call.sample_counts.keys() - self.trust.keys()
            found = rules.trusts(self.gate.robust, squares, self.gate.forgers, len(gone))
            both = zip(self.trust.items(), found, strict=True)
            self.trust = {client: min(before, rule) for (client, before), rule in both}

    def _expel(self, client: int, reason: str) -> None:
        self.refuse(client, self.spool[client], reason)
        self.spool.drop(client)
        del self.trust[client], self._accepted[client]

    def audited(self, moves: Moves) -> dict[str, object]:
        """For the record: how far all moved the model; by client bytes, images, trust, its part."""
        images = {who: sum(held.values()) for who, held in self.call.sample_counts.items()}
        entries: dict[str, list[float]] = {}
        for who, size in sorted(self.received.items()):
            trust, part = self.trust.get(who, 0.0), moves.parts.get(who, 0.0)
            entries[str(who)] = [size, images.get(who, 0), round(trust, 4), float(f"{part:.4g}")]
        return {"move": float(f"{moves.whole:.4g}"), "clients": entries}

    def __iter__(self) -> Iterator[tuple[Update, float]]:
        chosen = [client for client, trust in self.trust.items() if trust]
        updates = [self._accepted[client] for client in chosen]
        if self.call.private is not None:
            return ((update, 1.0) for update in self.call.private(updates))
        if self._by_coordinate:
            updates = self._agreed(updates)
        return zip(updates, [self.trust[client] for client in chosen], strict=True)

    def _agreed(self, updates: Sequence[Update]) -> list[Update]:
        """Every update with the numbers that all agree on."""
        assert self.call.centred is not None
        centred = [self.call.centred(update, -1) for update in updates]
        left_out = rules.cut(self.gate.robust, self.gate.forgers)
        found = rules.agreed(centred, self.call.rows, left_out)
        return [self.call.centred(update, 1) for update in found]


def _addressed(update: Update, call: ExpectedUpdate) -> None:
    """This run, this round, this exchange, a client that was asked."""
    if update.run != call.run:
        raise Refused("meant for another run")
    if update.round != call.round:
        raise Refused(f"meant for round {update.round}, this is round {call.round}")
    if update.exchange != call.exchange:
        raise Refused(f"meant for another exchange than {call.exchange}")
    if update.client not in call.sample_counts:
        raise Refused(f"client {update.client} was not asked")


def _same_sites(update: Update, call: ExpectedUpdate) -> None:
    """The same prior and tensors, shapes and types; nothing of classes the client does not hold."""
    if update.prior != call.prior:
        raise Refused("started from another prior")
    unknown = [name for name in update.classes if name not in call.announced(update)]
    if unknown:
        raise Refused(f"answers for a class it does not hold: {unknown[0][:60]!r}")
    _same_tensors(call.expected(update.counts), update.tensors)


def _same_tensors(spec: Spec, found: Mapping[str, Tensor]) -> None:
    """These tensors, of these shapes and types, and no others."""
    for name in sorted(spec.keys() ^ found.keys()):
        raise Refused(f"{'missing' if name in spec else 'unexpected'} tensor {name[:60]!r}")
    for name, (shape, dtype) in spec.items():
        if tuple(found[name].shape) != shape:
            raise Refused(f"{name} has shape {tuple(found[name].shape)}, expected {shape}")
        if found[name].dtype != dtype:
            raise Refused(f"{name} has type {found[name].dtype}, expected {dtype}")


def _finite(tensors: Mapping[str, Tensor]) -> None:
    """No NaN, no infinity, and nothing whose square a float32 cannot hold."""
    for name, tensor in tensors.items():
        most = largest(tensor)
        if not isfinite(most):
            raise Refused(f"{name} is not finite")
        if most > LARGEST:
            raise Refused(f"{name} reaches {most:.3g}, beyond any weight or precision")


def _plausible(update: Update, call: ExpectedUpdate) -> None:
    """The images that the announcement said, in all and by class; of a memory no more."""
    said, claimed = call.announced(update), sum(update.counts.values())
    most = sum(said.values())
    if not 0 <= update.samples <= most:
        raise Refused(f"claims {update.samples} images, the announcement said {most}")
    for name, count in update.counts.items():
        if not (0 if call.forgets else said[name]) <= count <= said[name]:
            raise Refused(f"claims {count} images of {name}, the announcement said {said[name]}")
    if update.counts and claimed != update.samples:
        raise Refused(f"claims {update.samples} images, but {claimed} by class")
    if update.samples < most and not call.forgets:
        raise Refused(f"claims {update.samples} images, the announcement said {most}")
