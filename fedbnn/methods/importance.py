"""EWC and MAS, federated: weights that mattered for the past are held where they were.

    local    min_theta  CE(theta; D_k) + 1/2 sum_j s_j (theta_j - theta*_j)^2
    server   FedAvg's mean;  at a consolidation  theta* <- theta  and
             Omega <- gamma Omega + sum_k n_k Omega_k / N
    state    Omega, theta* (once there is an Omega)
    floats per weight: 1 down, 1 up; 3 down after the first consolidation; 1 down, 1 up more in it

    EWC  (Kirkpatrick et al., 2017; online: Schwarz et al., 2018)  s = lambda Omega
         Omega_k = mean over images of sum_y p(y|x) (d log p(y|x) / d theta)^2,   y from the model
    MAS  (Aljundi et al., 2018)  s = 2 lambda Omega, for its penalty has no 1/2
         Omega_k = mean over images of |d ||f(x)||^2 / d theta|,   f = logits of all seen classes

Omega_k is measured in a second exchange of the round, under the new global weights, by the clients
of that round. A prototype nobody measured has importance 0. s is capped at 1 / lr (see `Penalty`).
The Fisher is that of the likelihood the client trains: the softmax over the classes it holds. Main
setting: `strength` (lambda), grids 10 ... 1e4 and 0.01 ... 10.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedbnn.config.schema import Count, NonNegative, UnitInterval
from fedbnn.heads.checks import Apart, apart_in_size
from fedbnn.heads.prototypes import gathered, trained
from fedbnn.methods.aggregation import Aggregator, Fold, WeightedMean, largest, pieces
from fedbnn.methods.base import Assignment, Consolidation, LocalObjective, Method, Penalty, Tensors
from fedbnn.networks import Classifier
from fedbnn.protocol.messages import Update
from fedbnn.protocol.state import State

EXCHANGE = "importance"
SITES = ("backbone", "prototypes")
BATCH, FLOATS = 256, 2**22
Output = Callable[..., Tensor]
Measured = tuple[tuple[str, ...], Callable[[Tensor], Tensors]]


@dataclass(frozen=True)
class ImportanceMethod(Method, ABC):
    """A method that anchors weights by their importance.

    `idle` are the nats of penalty that importances hold which are none to speak of.

    Args:
        strength: lambda, the weight of the penalty.
        decay: gamma in [0, 1], what is left of older importances at a consolidation.
        every: consolidate every so many rounds; null at the true end of each task, and every 10
            rounds where tasks overlap.
    """

    notes: ClassVar[Mapping[str, str]] = {"penalty_cap": "stiffness of a weight at most 1 / lr"}
    factor: ClassVar[float] = 1.0
    idle: ClassVar[float] = 0.0

    share: Literal["global"] = "global"
    strength: NonNegative = 1.0
    decay: UnitInterval = 1.0
    every: Count | None = None

    @abstractmethod
    def measured(self, assignment: Assignment, network: Classifier) -> Measured:
        """Classes whose prototypes are measured, and the sum of importances over some images."""

    @property
    def consolidation(self) -> Consolidation:
        """Importances are exchanged and summed, weights become anchors."""
        return Importances(self.every, method=self)

    def objective(self, assignment: Assignment, network: Classifier) -> LocalObjective:
        """Cross-entropy and the pull towards theta*, once there has been a consolidation."""
        state = assignment.instruction.state
        if "backbone.anchor" not in state:
            return LocalObjective()
        columns, named = self.softmax(state, assignment.classes), assignment.layout.by_parameter
        importance, anchor = (
            named(state[f"backbone.{kind}"], gathered(state, f"prototypes.{kind}", columns))
            for kind in ("importance", "anchor")
        )
        strength = self.factor * self.strength
        return Penalty({name: (strength * importance[name], anchor[name]) for name in anchor})


@dataclass(frozen=True)
class EWC(ImportanceMethod):
    """FedAvg with weights held by their Fisher information, of which who is sure has hardly any.

    Args:
        draws: labels drawn from the model per image, an unbiased estimate; null takes the exact
            expectation over classes.
    """

    formula: ClassVar[str] = "min CE + lambda/2 sum Omega (theta - theta*)^2; Omega = Fisher"
    idle: ClassVar[float] = 0.2

    strength: NonNegative = 100.0
    draws: Count | None = 4

    def measured(self, assignment: Assignment, network: Classifier) -> Measured:
        """The diagonal Fisher of the client's own softmax."""
        columns = self.softmax(assignment.instruction.state, assignment.classes)
        return columns, lambda images: fisher_sum(network, images, self.draws)


@dataclass(frozen=True)
class MAS(ImportanceMethod):
    """FedAvg with weights held by the sensitivity of the output to them; it needs no labels."""

    formula: ClassVar[str] = (
        "min CE + lambda sum Omega (theta - theta*)^2; Omega = E |d|f|^2/dtheta|"
    )
    factor: ClassVar[float] = 2.0

    strength: NonNegative = 0.01

    def measured(self, assignment: Assignment, network: Classifier) -> Measured:
        """Sensitivity of the logits of all seen classes."""
        state = assignment.instruction.state
        seen = trained(state)
        rows = state["prototypes"][state.index(seen)]
        whole = assignment.layout.classifier(network.backbone, rows).eval()
        return seen, lambda images: sensitivity_sum(whole, images)


@dataclass(frozen=True)
class Importances(Consolidation):
    """Omega_k of every participant, and theta* <- theta."""

    method: ImportanceMethod = field(kw_only=True)

    @property
    def aggregator(self) -> Aggregator:
        """The exchange of importances."""
        method, where = self.method, (EXCHANGE, False, SITES)
        strength = method.factor * method.strength
        return ImportanceAggregator(*where, decay=method.decay, strength=strength, idle=method.idle)

    def measure(self, assignment: Assignment, network: Classifier) -> Tensors:
        """Mean importance of every weight of backbone and prototypes over this client's images."""
        images, state = assignment.images, assignment.instruction.state
        classes, of_batch = self.method.measured(assignment, network)
        sums = [of_batch(batch) for batch, _ in images.loader(BATCH, shuffle=False)]
        total = {name: torch.stack([one[name] for one in sums]).sum(0) for name in sums[0]}
        found = assignment.layout.from_parameters({n: s / len(images) for n, s in total.items()})
        rows = gathered(State({"rows": found["prototypes"]}, classes), "rows", state.classes)
        return {"backbone": found["backbone"], "prototypes": rows}

    def apply(self, state: State) -> State:
        """theta* <- theta."""
        return state.having({f"{site}.anchor": state[site].clone() for site in SITES})


@dataclass(frozen=True)
class ImportanceAggregator(Aggregator):
    """The exchange of importances, one for every weight; `strength` is s / Omega.

    Importances that cost `idle` nats are none to speak of: where everybody is sure, the Fisher is
    hardly anything, and who is not sure stands out. The sensitivity of the output stays.
    """

    decay: float = 1.0
    strength: float = 1.0
    idle: float = 0.0

    def broadcast(self, state: State) -> State:
        """Weights to measure under."""
        return state.only("backbone", "buffers", "prototypes", "prototypes.samples")

    def defect(self, state: State, update: Update) -> str | None:
        """Importances are not negative."""
        negative = any(bool((update.tensors[site] < 0).any()) for site in SITES)
        return "an importance is negative" if negative else None

    def influence(self, state: State, update: Update) -> Iterator[Tensor]:
        """The roots of the importances, which are as large as gradients."""
        return map(torch.sqrt, pieces(update.tensors["backbone"]))

    def calm(self, state: State) -> float:
        """The length of roots of importances that hold nothing."""
        weights = state["backbone"]
        return self._idle(weights.numel(), _size(weights)) * math.sqrt(weights.numel())

    def _idle(self, weights: int, size: float) -> float:
        """sqrt(Omega) at which so many weights that move by their mean square cost `idle` nats.

        s Omega P E[theta^2] / 2 = idle
        """
        penalty = self.strength * weights * size / 2
        return math.sqrt(self.idle / penalty) if penalty else 0.0

    def apart(self, state: State, updates: Sequence[Update]) -> Apart:
        """The size of the prototypes' importances, likewise."""
        sizes = {u.client: math.sqrt(largest(u.tensors["prototypes"])) for u in updates}
        idle = self._idle(state["prototypes"].numel(), max(_size(state[site]) for site in SITES))
        return apart_in_size(sizes, "importances of prototypes", idle)

    def fold(self, state: State) -> Fold:
        """The sum of importances."""
        return ImportanceFold(state, self.decay)


def _size(weights: Tensor) -> float:
    """E[theta^2]; 0 of none."""
    return float(weights.double().square().mean()) if weights.numel() else 0.0


class ImportanceFold:
    """Omega <- gamma Omega + sum_k n_k Omega_k / N, for backbone and prototypes."""

    def __init__(self, state: State, decay: float) -> None:
        self.state, self.decay = state, decay
        self.means = {site: WeightedMean(torch.zeros_like(state[site])) for site in SITES}

    def add(self, update: Update, trust: float = 1.0) -> None:
        """Add the importances of one client, as far as it is trusted."""
        for site, mean in self.means.items():
            mean.add(trust * update.tensors[site], update.samples)

    def close(self) -> State:
        """The state with the new importances; weights are as they were."""
        found = {f"{site}.importance": mean.value() for site, mean in self.means.items()}
        for name in found.keys() & self.state.tensors.keys():
            found[name] = found[name] + self.decay * self.state[name]
        return self.state.having(found)


def fisher_sum(network: Classifier, images: Tensor, draws: int | None) -> Tensors:
    """sum_x sum_y p(y|x) (d log p(y|x) / d theta)^2 by parameter, over pairs (image, label)."""
    with torch.no_grad():
        weights = network(images).softmax(1)
    labels = torch.arange(weights.shape[1]).expand_as(weights)
    if draws is not None:
        labels = weights.multinomial(draws, replacement=True)
        weights = torch.full_like(labels, 1 / draws, dtype=weights.dtype)
    pairs = images.repeat_interleave(labels.shape[1], 0), labels.reshape(-1)
    return summed(
        network,
        lambda logits, label: logits.log_softmax(0).gather(0, label[None])[0],
        pairs,
        lambda gradient, weight: torch.einsum("i,i...->...", weight, gradient.square()),
        weights.reshape(-1),
    )


def sensitivity_sum(network: Classifier, images: Tensor) -> Tensors:
    """sum_x | d ||f(x)||^2 / d theta | by parameter."""
    return summed(network, lambda f: f.square().sum(), (images,), lambda g: g.abs().sum(0))


def summed(
    network: Classifier, output: Output, batch: tuple[Tensor, ...], term: Output, *beside: Tensor
) -> Tensors:
    """sum_i term(d output(logits_i, ...) / d theta, beside_i) by the names of the parameters.

    `batch` holds the images and what else `output` takes for each of them. No loop over images:
    vmap(grad), with at most `FLOATS` gradient values in memory at once.
    """
    weights = {name: weight.detach() for name, weight in network.named_parameters()}
    statistics = {name: value.detach() for name, value in network.named_buffers()}
    chunk = max(1, FLOATS // sum(weight.numel() for weight in weights.values()))

    def of_one(weights: Tensors, image: Tensor, *rest: Tensor) -> Tensor:
        logits = functional_call(network, {**weights, **statistics}, (image[None],))[0]
        return output(logits, *rest)

    gradients = vmap(grad(of_one), in_dims=(None, *[0] * len(batch)))
    total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for places in torch.arange(len(batch[0])).split(chunk):
        found = gradients(weights, *(column[places] for column in batch))
        for name, gradient in found.items():
            total[name] += term(gradient, *(column[places] for column in beside))
    return total
