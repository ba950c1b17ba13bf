"""What rounds are made of: the parts of a federation, and what is counted of a round."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

from torch import nn

from fedbnn.bayes.flatten import Layout
from fedbnn.config.schema import Count
from fedbnn.defense import privacy
from fedbnn.defense.budget import Budget
from fedbnn.defense.gate import Candidates, Gate
from fedbnn.defense.privacy import Privacy
from fedbnn.defense.robust import Moves
from fedbnn.errors import ConfigError
from fedbnn.federation.engines import Engine
from fedbnn.heads import ExactHead, Head, LinearHead
from fedbnn.methods import FedBNN, Method
from fedbnn.methods.importance import EWC
from fedbnn.protocol.messages import FitResult
from fedbnn.protocol.state import State
from fedbnn.protocol.stream import Stream
from fedbnn.storage.files import Rejected
from fedbnn.storage.ledger import Ledger
from fedbnn.tracking.console import Watcher

Record = dict[str, Any]
SampleCounts = dict[int, dict[str, int]]
COUNTS = "counts"
"""In a roll call, what was announced."""


@dataclass(frozen=True)
class Late:
    """What becomes of answers that come after their round.

    Args:
        late: `fold` multiplies the factor of a slow client into the round after the one in which it
            comes; `refuse` does not wait for it. Engines that end a client at its deadline (all but
            Flower on sites) have no late answers.
        max_staleness: how many rounds after it was asked for a factor may still be used.
    """

    late: Literal["refuse", "fold"] = "refuse"
    max_staleness: Count = 3

    @property
    def rounds(self) -> int:
        """How many rounds an order outlives its own."""
        return self.max_staleness if self.late == "fold" else 0


@dataclass
class Order:
    """An instruction to train: its digest, and the clients that still owe an answer to it."""

    prior: str
    owing: set[int]


@dataclass(frozen=True)
class Federation:
    """All that the rounds need; `evaluate` gives a part of a record, `watchers` see every round.

    `asked` has every instruction to train that was sent, by round, and who owes an answer to it;
    `budget` is the account of a run whose clients are private.
    """

    run: str
    stream: Stream
    method: Method
    head: Head
    backbone: nn.Module
    layout: Layout
    engine: Engine
    gate: Gate
    ledger: Ledger
    rejected: Rejected
    evaluate: Callable[[State, int, Mapping[int, bytes]], Record]
    watchers: Sequence[Watcher]
    late: Late = field(default_factory=Late)
    asked: dict[int, Order] = field(default_factory=dict)
    privacy: Privacy = field(default_factory=Privacy)
    budget: Budget | None = None


def check(
    private: Privacy,
    gate: Gate,
    when: Late,
    method: Method,
    head: Head,
    layout: Layout,
    stream: Stream,
) -> None:
    """Refuse parts that do not go together, in one line."""
    privacy.check(private, gate, method, head, layout)
    if private.on and when.late == "fold":
        what, fix = "a late answer would be counted twice", "set federation.late: refuse"
        raise ConfigError(what, "privacy", fix)
    if when.late == "fold":
        _only_factors(method)
    if private.on and stream.held and not stream.tasks[0].classes:
        what = "private clients announce nothing, and no test images name the classes"
        fix = "give the server a test folder with every class"
        raise ConfigError(what, "privacy", fix)
    _fitting(method, head, moves=bool(layout.size))


def _only_factors(method: Method) -> None:
    """Only factors can wait: weights and moments are worth nothing on another prior."""
    factors = isinstance(method, FedBNN) and method.fold_by != "moments"
    if not (factors and method.shares_prototypes):
        what = "only factors may come late, and this method sends none"
        fix = "use method fedbnn with fold_by product or scaled, or federation.late: refuse"
        raise ConfigError(what, "federation.late", fix)


def _fitting(method: Method, head: Head, moves: bool) -> None:
    """Refuse a head that a method cannot feed; `moves` says whether the backbone has weights."""
    if not isinstance(head, LinearHead) and not method.shares_prototypes:
        what = "class posteriors are shared, so they cannot stay on the clients"
        raise ConfigError(what, "head.name", "use head: linear")
    if not method.trains and not isinstance(head, ExactHead):
        what = "a method that trains nothing has only class posteriors over fixed features"
        raise ConfigError(what, "head.name", "use head: exact")
    if isinstance(method, EWC) and isinstance(head, ExactHead) and head.prior_mean:
        what = "the Fisher matrix of ewc is that of a network without a prior mean"
        raise ConfigError(what, "head.prior_mean", "leave it out, or use another method")
    fixed = not (method.trains and moves)
    if isinstance(head, ExactHead) and head.features == "backbone" and not fixed:
        what = "the features of a backbone that is trained move"
        fix = "use random_conv, a frozen network (network.trained: []), or method: exact"
        raise ConfigError(what, "head.features", fix)


@dataclass
class RoundStats:
    """What a round cost and who did not count (in full), summed over its exchanges.

    `counts` has the images by class of those who count so far, `more` of those who are asked for
    statistics without having trained, `trust` the clients folded with less than 1, `late` how many
    rounds ago some were asked; bytes and `seconds` are those of every exchange by its name
    (`train`, `statistics`, ...) and of what is inside them: `fold`, and `inner`: forward, backward
    and optimiser on the clients. `train` is what clients say of their training, `load` how many
    cores the whole machine and this process kept busy: seconds mean something where nobody else
    did. `audit` has of every exchange how far it moved the model in all and by client.
    """

    round: int
    counts: SampleCounts
    more: SampleCounts = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)
    bytes_down: dict[str, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    trust: dict[int, float] = field(default_factory=dict)
    late: dict[int, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"inner": 0.0, "fold": 0.0})
    train: dict[int, Mapping[str, float]] = field(default_factory=dict)
    load: dict[str, float] = field(default_factory=dict)
    audit: dict[str, Record] = field(default_factory=dict)

    def add(self, candidates: Candidates, moves: Moves) -> None:
        """Count what came through the gate in one exchange, and what did not."""
        self.audit[candidates.call.exchange] = candidates.audited(moves)
        on_time = candidates.trust.keys() - candidates.late
        spared = self.counts.keys() - candidates.call.sample_counts
        counted = sorted((on_time | spared) & self.counts.keys())
        self.counts = {client: self.counts[client] for client in counted}
        self.bytes_up[candidates.call.exchange] = candidates.bytes_up
        self.failed |= candidates.failed
        self.refused |= candidates.refused
        late = candidates.late.items()
        self.late |= {client: age for client, age in late if client in candidates.trust}
        for client, trust in candidates.trust.items():
            if trust < 1:
                self.trust[client] = min(trust, self.trust.get(client, 1.0))

    def heard(self, answer: FitResult) -> None:
        """What an answer says besides its update."""
        self.seconds["inner"] += answer.inner
        if answer.train:
            self.train[answer.client] = answer.train

    def trained(self) -> dict[str, float]:
        """sum_k n_k x_k / sum_k n_k of loss and KL, over the clients that count and say them."""
        counted = [client for client in sorted(self.train) if client in self.counts]
        images = {client: sum(self.counts[client].values()) for client in counted}
        found: dict[str, float] = {}
        for name in ("loss", "kl"):
            said = [client for client in counted if name in self.train[client]]
            total = sum(images[client] * self.train[client][name] for client in said)
            found |= {name: total / sum(images[client] for client in said)} if said else {}
        return found

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Note how many seconds this takes."""
        began = perf_counter()
        yield
        self.seconds[name] = perf_counter() - began + self.seconds.get(name, 0.0)
