"""SCAFFOLD (Karimireddy et al., 2020), option II.

    local    y <- y - lr (g(y) - c_k + c),  t_k steps of plain SGD from y = x
    control  c_k' = c_k - c + (x - y) / (t_k lr)
    server   theta = FedAvg's mean,   c <- c + sum_k (c_k' - c_k) / K,   K = all registered clients
    state    c on the server, c_k on every client that took part;  floats per weight: 2 down, 2 up

With momentum or Adam (x - y) / (t_k lr) is not the mean gradient, so the optimiser is plain SGD.
Prototypes of classes that a client has never held have the control 0. Warm-up is not part of the
t_k steps: x is where they begin. A client whose update is not accepted keeps its old control. Main
setting: `lr`, grid 0.003 ... 0.1. Controls of clients that were last asked long ago are those of
other weights: at 0.1 that throws single clients off on CIFAR-100 with ten of a hundred clients a
round, at 0.03 none.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from fedbnn.bayes.flatten import Layout
from fedbnn.config.ranges import Positive
from fedbnn.heads import checks
from fedbnn.heads.prototypes import grow, padded
from fedbnn.methods.aggregation import (
    Aggregator,
    Fold,
    PointFold,
    ServerStep,
    Spec,
    largest,
    pieces,
)
from fedbnn.methods.base import Assignment, LocalObjective, Method, Tensors
from fedbnn.networks import Classifier
from fedbnn.protocol.messages import Refused, Update
from fedbnn.protocol.state import State

BACKBONE, PROTOTYPES = "backbone.scaffold", "prototypes.scaffold"
ALIKE = 0.99


class ScaffoldAggregator(Aggregator):
    """FedAvg's exchange, with the change of the client's control beside the weights."""

    def expected(self, state: State, counts: Mapping[str, int]) -> Spec:
        """Weights, and the change of the client's control in the same shapes."""
        weights = super().expected(state, counts)
        return weights | {BACKBONE: weights["backbone"], PROTOTYPES: weights["prototypes"]}

    def defect(self, state: State, update: Update) -> str | None:
        """A control that does not follow from the weights: c_k' - c_k + c = (x - y) / (t_k lr)."""
        gradient = update.tensors[BACKBONE].double() + state[BACKBONE]
        step = state["backbone"].double() - update.tensors["backbone"]
        length = step.norm() * gradient.norm()
        rounded = step.norm() <= 1e-4 * state["backbone"].double().norm()
        if not rounded and gradient @ step < ALIKE * length:
            return "its control does not follow from its weights"
        return super().defect(state, update)

    def influence(self, state: State, update: Update) -> Iterator[Tensor]:
        """Where weights and control change stand among those of the others."""
        return chain(super().influence(state, update), pieces(update.tensors[BACKBONE]))

    def apart(self, state: State, updates: Sequence[Update]) -> checks.Apart:
        """The buffers, and the size of the prototypes' controls, which are gradients."""
        sizes = {u.client: largest(u.tensors[PROTOTYPES]) for u in updates if u.counts}
        rows = checks.apart_in_size(sizes, "controls of prototypes")
        return checks.farthest(super().apart(state, updates), rows)

    def fold(self, state: State) -> Fold:
        """FedAvg's fold, and the sum of the control changes."""
        return ScaffoldFold(state, self.step)


class ScaffoldFold(PointFold):
    """FedAvg's fold of the weights; c + sum_k (c_k' - c_k) / K of the controls."""

    def __init__(self, state: State, step: ServerStep) -> None:
        super().__init__(state, step)
        controls = (BACKBONE, PROTOTYPES)
        self.changes = {n: torch.zeros_like(state[n], dtype=torch.float64) for n in controls}

    def add(self, update: Update, trust: float = 1.0) -> None:
        """Fold one update in; its control change counts as far as it is trusted."""
        super().add(update, trust)
        if update.samples:
            rows = self.state.index(update.classes)
            self.changes[BACKBONE].add_(update.tensors[BACKBONE], alpha=trust)
            self.changes[PROTOTYPES][rows] += trust * update.tensors[PROTOTYPES].double()

    def close(self) -> State:
        """The folded state with the new server control."""
        clients = int(cast(Any, self.state.notes["registered"]))
        steps = {name: total / clients for name, total in self.changes.items()}
        new = {name: (self.state[name].double() + step).float() for name, step in steps.items()}
        return super().close().having(new)


@dataclass(frozen=True)
class Scaffold(Method):
    """Control variates on server and clients take the drift between clients out of their steps."""

    formula: ClassVar[str] = "y -= lr (g - c_k + c);  theta = sum_k (n_k / N) y_k"
    optimizer: ClassVar[str | None] = "sgd"
    exchange: ClassVar[type[Aggregator]] = ScaffoldAggregator

    lr: Positive | None = 0.03
    share: Literal["global"] = "global"

    def start(self, state: State, layout: Layout, clients: int) -> State:
        """The server's control is 0."""
        backbone, prototypes = map(torch.zeros_like, (state["backbone"], state["prototypes"]))
        return state.having({BACKBONE: backbone, PROTOTYPES: prototypes}, registered=clients)

    def kept(self, own: State, state: State, layout: Layout) -> Spec:
        """The client's control: of the backbone, and of classes that the server knows."""
        if not set(own.classes) <= set(state.classes):
            raise Refused("a class that nobody has")
        rows = (len(own.classes), layout.width + 1)
        return {BACKBONE: ((layout.size,), torch.float32), PROTOTYPES: (rows, torch.float32)}

    def objective(self, assignment: Assignment, network: Classifier) -> LocalObjective:
        """Cross-entropy with corrected gradients."""
        columns = self.softmax(assignment.instruction.state, assignment.classes)
        return Controlled(assignment, network, len(columns))


class Controlled(LocalObjective):
    """The corrected steps of one client, and its control after them."""

    def __init__(self, assignment: Assignment, network: Classifier, columns: int) -> None:
        state, layout = assignment.instruction.state, assignment.layout
        self.held = assignment.classes
        nothing = {BACKBONE: torch.zeros_like(state[BACKBONE]), PROTOTYPES: state[PROTOTYPES][:0]}
        self.private = grow(assignment.private or State(nothing), self.held, None)
        self.server, self.own = (
            {"backbone": known[BACKBONE], "prototypes": known[PROTOTYPES][known.index(self.held)]}
            for known in (state, self.private)
        )
        self.start = layout.from_parameters(dict(network.named_parameters()))
        self.start["prototypes"] = self.start["prototypes"][: len(self.held)]
        shift = {name: self.server[name] - self.own[name] for name in self.own}
        self.shift = layout.by_parameter(shift["backbone"], padded(shift["prototypes"], columns))

    def to(self, device: torch.device) -> None:
        """The correction."""
        self.shift = {name: value.to(device) for name, value in self.shift.items()}

    def correct(self, network: Classifier, lr: float) -> None:
        """g <- g - c_k + c."""
        for name, weight in network.named_parameters():
            assert weight.grad is not None
            weight.grad.add_(self.shift[name])

    def answer(self, weights: Tensors, steps: int, lr: float) -> tuple[Tensors, State]:
        """The weights y and c_k' - c_k = (x - y) / (t_k lr) - c are sent, c_k' is kept."""
        gradient = {name: (self.start[name] - weights[name]) / (steps * lr) for name in self.own}
        change = {name: gradient[name] - self.server[name] for name in gradient}
        control = {name: self.own[name] + change[name] for name in change}
        held, rows = self.private.index(self.held), self.private[PROTOTYPES]
        kept = {BACKBONE: control["backbone"]}
        kept[PROTOTYPES] = rows.index_copy(0, held, control["prototypes"])
        sent = {BACKBONE: change["backbone"], PROTOTYPES: change["prototypes"]}
        return weights | sent, self.private.having(kept)
