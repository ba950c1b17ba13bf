"""FCIL: GLFC, federated class-incremental learning (Dong et al., CVPR 2022). It replays stored images.

    local    min  (1 - a) L_GC + a L_RD
             L_GC  = mean_i (g_i / mean of g over its group) BCE(f(x_i), y_i),  g_i = 1 - p(y_i | x_i), groups: new, old classes
             L_RD  = BCE(f(x_i), y_i with the old model's answers in the columns of old classes)
             BCE is summed over the columns, with f - log(C - 1) as log-odds so that a row of zeros begins at 1 / C
    server   FedAvg's mean; as proxy it keeps the best global model since the last transition
    state    exemplars on the clients (up to `memory` images each), two models of the past on the server
    communication  floats per weight: up to 3 down, 1 up, and three numbers up

Transition: the normalised entropy H / log C of the global model's answers on the client's new images exceeds the mean of
the last round by `threshold`. That mean comes from the server, since a client sampled once in ten rounds has no recent
one. A client in transition learns from the best model so far, any other from the best one before the last transition,
which comes when half of the round's images are in transition.

Proxy: the original sends gradients of perturbed prototypes, from which the server rebuilds images to choose the best
model with. Left out here: with `prototype` each client scores the global model on its own prototypes (the image nearest to
its class mean) and sends the mean loss alone, so nothing needs to be perturbed; with `off` the newest model is taken.
Exemplars of a class are those of the client's last round with it. Main knob: `distil` (a), grid 0.25, 0.5, 0.75, 0.9.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from fedbnn.bayes.flatten import Layout
from fedbnn.errors import ConfigError
from fedbnn.images import ImageSet
from fedbnn.messages import Update
from fedbnn.methods import folds
from fedbnn.methods.base import Assignment, Fold, LocalObjective, Method, Spec
from fedbnn.methods.exemplars import remembered, replay
from fedbnn.methods.fcil_client import SIGNALS, Compensated, signals
from fedbnn.methods.snapshots import OldColumns, Teacher, recall, remember, rename
from fedbnn.networks import Classifier
from fedbnn.state import State

BEST, OLD, ENTROPY, LOSS = "fcil.best", "fcil.old", "fcil.entropy", "fcil.loss"
MAJORITY = 0.5


@dataclass(frozen=True)
class FCIL(Method):
    """GLFC: exemplars, compensated gradients and distillation from an old model that a proxy chose.

    Args:
        memory: most images that one client stores.
        distil: a in [0, 1], the weight of the relation distillation.
        threshold: rise of the normalised entropy that means a transition.
        proxy: how the old model is chosen.
    """

    formula: ClassVar[str] = (
        "min (1 - a) compensated BCE + a relation distillation, with stored images"
    )
    replay: ClassVar[bool] = True
    needs_rows: ClassVar[bool] = True

    memory: int = 2000
    distil: float = 0.25
    threshold: float = 0.25
    proxy: Literal["prototype", "off"] = "prototype"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory < 1 or not 0 <= self.distil <= 1 or self.threshold <= 0:
            raise ConfigError(
                "memory must be at least 1, distil in [0, 1], threshold above 0", "method"
            )

    def holds(self, counts: Mapping[str, int], private: State | None) -> dict[str, int]:
        """The images of the round, and those in memory of other classes."""
        return {**counts, **remembered(private, counts)}

    def images(self, images: ImageSet, private: State | None) -> ImageSet:
        """The same as images."""
        return replay(images, private)

    def expected(self, state: State, exchange: str, classes: Sequence[str]) -> Spec:
        """Weights, and entropy, transition and prototype loss."""
        return super().expected(state, exchange, classes) | {SIGNALS: ((3,), torch.float32)}

    def defect(self, state: State, update: Update) -> str | None:
        """An entropy in [0, 1], a transition or none, a loss."""
        entropy, moved, loss = update.tensors[SIGNALS].tolist()
        return (
            None
            if 0 <= entropy <= 1 and moved in (0, 1) and loss >= 0
            else "its signals are out of range"
        )

    def fold(self, state: State, exchange: str) -> Fold:
        """FedAvg's fold, and the proxy's choice."""
        return FCILFold(state, self.proxy == "prototype")

    def objective(
        self, assignment: Assignment, network: Classifier, layout: Layout
    ) -> LocalObjective:
        """Compensated gradients, and distillation from the old model that fits the client's situation."""
        state = assignment.instruction.state
        found = signals(
            assignment,
            network.backbone,
            float(state[ENTROPY]) + self.threshold if ENTROPY in state else None,
        )
        teacher = self._teacher(state, bool(found[1]), network, layout)
        columns = self.softmax(state, assignment.classes)
        old = None if teacher is None else OldColumns(teacher, state, columns)
        return Compensated(assignment, network, columns, old, found, self.distil, self.memory)

    def _teacher(
        self, state: State, moved: bool, network: Classifier, layout: Layout
    ) -> Teacher | None:
        """The best (or newest) model in transition, else the one of the last transition."""
        if moved and self.proxy == "off":
            return recall(remember(state, BEST, state), BEST, network.backbone, layout)
        return recall(state, BEST if moved else OLD, network.backbone, layout)

    def stored(self, private: State) -> int:
        """The exemplars of one client."""
        return len(private["labels"])

    def facts(self) -> dict[str, Any]:
        """That it replays, how much, and how the old model is chosen."""
        return {"memory_per_client": self.memory, "proxy": self.proxy}


class FCILFold(folds.PointFold):
    """FedAvg's fold; then the proxy looks at what the clients said about the model they were sent."""

    def __init__(self, state: State, chooses: bool) -> None:
        super().__init__(state)
        self.chooses = chooses
        self.signals = folds.WeightedMean(torch.zeros(3))

    def add(self, update: Update, trust: float = 1.0) -> None:
        """Fold one update in."""
        super().add(update, trust)
        self.signals.add(update.tensors[SIGNALS], trust * update.samples)

    def close(self) -> State:
        """The folded state, with the models of the past in their new places."""
        entropy, moved, loss = self.signals.value().tolist()
        state = super().close().having({ENTROPY: torch.tensor(entropy)})
        if moved >= MAJORITY:
            return (
                rename(state, BEST, OLD)
                if BEST in state.notes
                else remember(state, OLD, self.state)
            )
        if self.chooses and (BEST not in state.notes or loss <= float(state[LOSS])):
            return remember(state, BEST, self.state).having({LOSS: torch.tensor(loss)})
        return state
