"""SCAFFOLD (Karimireddy et al., 2020), option II.

    local    y <- y - lr (g(y) - c_k + c),  t_k steps of plain SGD from y = x
    control  c_k' = c_k - c + (x - y) / (t_k lr)
    server   theta = FedAvg's mean,   c <- c + sum_k (c_k' - c_k) / K,   K = all registered clients
    state    c on the server, c_k on every client that took part;  floats per weight: 2 down, 2 up

The control follows from the weights: d_k = c_k' - c_k + c and x - y_k have one direction, and with
|x - y_k| / |d_k| = t_k lr the same length: in the backbone, and in rows that were trained before,
for those of new classes begin where their warm-up ends. So weights alone are compared with those of
the others, as FedAvg's are, and the steps with what the images announced allow. In batches of one
size, the last one left out if it is of one image, and with n_k >= n_j

    1 <= t_k / t_j <= ceil(n_k / (n_j - 1))

An honest walk is  y_k - x = -t_k lr (g_k - c_k + c)  with the mean gradient g_k. Who was heard in
the last round has c_k near g_k, and hardly differs from others. For who was away, c_k is a gradient
of other weights, perhaps of another task (or 0, if it is new): it walks what gradients have changed
by since. The others show how much that is: they walked it when they came back first. So a distance
is none to speak of up to the longest typical walk since the client was heard,

    W_k = max over the rounds since of median_j |x - y_j|

With momentum or Adam (x - y) / (t_k lr) is not the mean gradient, so the optimiser is plain SGD.
Prototypes of classes that a client has never held have the control 0. Warm-up is not part of the
t_k steps: x is where they begin. A client whose update is not accepted keeps its old control. Main
setting: `lr`, grid 0.003 ... 0.1. Controls of clients that were last asked long ago are those of
other weights: at 0.1 that throws single clients off on CIFAR-100 with ten of a hundred clients a
round, at 0.03 none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from fedbnn.bayes.flatten import Layout
from fedbnn.config.schema import Positive
from fedbnn.heads import checks
from fedbnn.heads.prototypes import grow, padded
from fedbnn.methods.aggregation import (
    Aggregator,
    Fold,
    PointFold,
    ServerStep,
    Spec,
    largest,
)
from fedbnn.methods.base import Assignment, LocalObjective, Method, Tensors
from fedbnn.networks import Classifier
from fedbnn.protocol.messages import Refused, Update
from fedbnn.protocol.state import State

BACKBONE, PROTOTYPES = "backbone.scaffold", "prototypes.scaffold"
ALIKE, STEPS, ROUNDED, TINY = 0.99, 1.25, 1e-4, 1e-30
WALKS, ANYBODY = "walks", ""
"""W_k by client on the server, the last for those who were not heard yet."""


class ScaffoldAggregator(Aggregator):
    """FedAvg's exchange, with the change of the client's control beside the weights."""

    def broadcast(self, state: State) -> State:
        """All but who was heard when."""
        sent = super().broadcast(state)
        return replace(sent, notes={key: sent.notes[key] for key in sent.notes if key != WALKS})

    def expected(self, state: State, counts: Mapping[str, int]) -> Spec:
        """Weights, and the change of the client's control in the same shapes."""
        weights = super().expected(state, counts)
        return weights | {BACKBONE: weights["backbone"], PROTOTYPES: weights["prototypes"]}

    def defect(self, state: State, update: Update) -> str | None:
        """A control that does not follow from the weights: c_k' - c_k + c = (x - y) / (t_k lr)."""
        rows = state["prototypes"][trained(state, update)[1]]
        whole = follows(state["backbone"], *step_and_gradient(state, update))
        if not (whole and follows(rows, *rows_and_gradients(state, update))):
            return "its control does not follow from its weights"
        return super().defect(state, update)

    def apart(self, state: State, updates: Sequence[Update]) -> checks.Apart:
        """The buffers, the size of the prototypes' controls, which are gradients, and the steps."""
        sizes = {u.client: largest(u.tensors[PROTOTYPES]) for u in updates if u.counts}
        rows = checks.apart_in_size(sizes, "controls of prototypes")
        return checks.farthest(super().apart(state, updates), rows, apart_in_steps(state, updates))

    def walked(self, state: State, client: int) -> float:
        """W_k: the longest typical walk since the client was heard."""
        walks = longest_walks(state)
        return walks.get(str(client), walks[ANYBODY])

    def fold(self, state: State) -> Fold:
        """FedAvg's fold, and the sum of the control changes."""
        return ScaffoldFold(state, self.step)


def step_and_gradient(state: State, update: Update) -> tuple[Tensor, Tensor]:
    """x - y_k and d_k = c_k' - c_k + c of the backbone."""
    step = state["backbone"].double() - update.tensors["backbone"]
    return step, update.tensors[BACKBONE].double() + state[BACKBONE]


def rows_and_gradients(state: State, update: Update) -> tuple[Tensor, Tensor]:
    """x - y_k and d_k of the rows that were trained before; others begin where warm-up ends."""
    own, known = trained(state, update)
    step = state["prototypes"][known].double() - update.tensors["prototypes"][own]
    gradient = update.tensors[PROTOTYPES][own].double() + state[PROTOTYPES][known]
    return step.flatten(), gradient.flatten()


def trained(state: State, update: Update) -> tuple[Tensor, Tensor]:
    """Rows of an update that nobody warms up any more, and where they are in the state."""
    index = state.index(update.classes)
    own = (state["prototypes.samples"][index] > 0).nonzero().flatten()
    return own, index[own]


def follows(weights: Tensor, step: Tensor, gradient: Tensor) -> bool:
    """Whether d_k and x - y_k have one direction, or no step is left that is not rounding."""
    rounded = step.norm() <= ROUNDED * weights.double().norm()
    return bool(rounded or gradient @ step >= ALIKE * step.norm() * gradient.norm())


def apart_in_steps(state: State, updates: Sequence[Update]) -> checks.Apart:
    """How far |x - y_k| / |d_k| = t_k lr is beyond what the median other allows: limit 1.25.

    By client j it is least <= t_k lr <= most, where x - y_k is known up to its rounding.
    """
    rounded = max(ROUNDED * float(state["backbone"].double().norm()), TINY)
    found, lengths = checks.Apart(), dict[int, tuple[float, float]]()
    for one in updates:
        step, gradient = step_and_gradient(state, one)
        lengths[one.client] = float(step.norm()), float(gradient.norm())
    moved = [u for u in updates if lengths[u.client][0] > rounded and lengths[u.client][1]]

    def beyond(own: Update, other: Update) -> float:
        (walk, control), (there, by) = lengths[own.client], lengths[other.client]
        least, most = (there / by * ratio for ratio in steps_between(own.samples, other.samples))
        return max(control * least / (walk + rounded), walk / (control * most + rounded))

    for one in updates:
        by_others = [beyond(one, other) for other in moved if other is not one]
        if len(by_others) > 1:
            found[one.client] = checks.lower_median(by_others) / STEPS, "steps to its control"
    return found


def steps_between(own: int, other: int) -> tuple[float, float]:
    """The least and the most that t_k / t_j can be for clients of n_k and n_j images."""
    if own < other:
        least, most = steps_between(other, own)
        return 1 / most, 1 / least
    return 1.0, float(-(-own // max(other - 1, 1)))


def longest_walks(state: State) -> dict[str, float]:
    """W_k of every client that was heard, and of anybody else."""
    return dict(cast(Any, state.notes[WALKS]))


class ScaffoldFold(PointFold):
    """FedAvg's fold of the weights; c + sum_k (c_k' - c_k) / K of the controls; W_k."""

    def __init__(self, state: State, step: ServerStep) -> None:
        super().__init__(state, step)
        controls = (BACKBONE, PROTOTYPES)
        self.changes = {n: torch.zeros_like(state[n], dtype=torch.float64) for n in controls}
        self.walks: dict[str, float] = {}

    def add(self, update: Update, trust: float = 1.0) -> None:
        """Fold one update in; its control change counts as far as it is trusted."""
        super().add(update, trust)
        if update.samples:
            rows, step = self.state.index(update.classes), step_and_gradient(self.state, update)[0]
            self.walks[str(update.client)] = float(step.norm())
            self.changes[BACKBONE].add_(update.tensors[BACKBONE], alpha=trust)
            self.changes[PROTOTYPES][rows] += trust * update.tensors[PROTOTYPES].double()

    def close(self) -> State:
        """The folded state with the new server control."""
        clients = int(cast(Any, self.state.notes["registered"]))
        steps = {name: total / clients for name, total in self.changes.items()}
        new = {name: (self.state[name].double() + step).float() for name, step in steps.items()}
        usual = checks.lower_median([*self.walks.values()])
        walks = {client: max(far, usual) for client, far in longest_walks(self.state).items()}
        return super().close().having(new, **{WALKS: walks | dict.fromkeys(self.walks, 0.0)})


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
        controls = {BACKBONE: backbone, PROTOTYPES: prototypes}
        return state.having(controls, registered=clients, **{WALKS: {ANYBODY: 0.0}})

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
