"""SCAFFOLD (Karimireddy et al., 2020), option II.

    local    y <- y - lr (g(y) - c_k + c),  t_k steps of plain SGD from y = x
    control  c_k' = c_k - c + (x - y) / (t_k lr)
    server   theta = FedAvg's mean,   c <- c + sum_k (c_k' - c_k) / K,   K = all registered clients
    state    c on the server, c_k on every client that ever took part;  floats per weight: 2 down, 2 up

With momentum or Adam (x - y) / (t_k lr) is not the mean gradient, so the optimiser is plain SGD. Rows of classes that a
client has never held have the control 0. Warm-up is not part of the t_k steps: x is where they begin. A client whose
update is not accepted keeps its old control. Main knob: `lr`, grid 0.01, 0.03, 0.1, 0.3.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from fedbnn.bayes.flatten import Layout
from fedbnn.messages import Update
from fedbnn.methods import folds
from fedbnn.methods.aggregation import pieces
from fedbnn.methods.base import Assignment, Fold, LocalObjective, Method, Spec
from fedbnn.methods.rows import by_parameter, gathered, padded, scattered
from fedbnn.networks import Classifier
from fedbnn.state import State

BACKBONE, ROWS = "scaffold.backbone", "scaffold.rows"


@dataclass(frozen=True)
class Scaffold(Method):
    """Control variates on server and clients take the drift between clients out of their steps."""

    formula: ClassVar[str] = "y -= lr (g - c_k + c);  theta = sum_k (n_k / N) y_k"
    optimizer: ClassVar[str | None] = "sgd"
    needs_rows: ClassVar[bool] = True

    lr: float | None = 0.1

    def start(self, state: State, layout: Layout, clients: int) -> State:
        """The server's control is 0."""
        controls = {
            BACKBONE: torch.zeros_like(state["backbone"]),
            ROWS: torch.zeros_like(state["rows"]),
        }
        return state.having(controls, registered=clients)

    def prepare(self, state: State, round: int, classes: Sequence[str], layout: Layout) -> State:
        """Control 0 for new rows."""
        grown = super().prepare(state, round, classes, layout)
        return grown.having({ROWS: padded(state[ROWS], len(grown.classes))})

    def expected(self, state: State, exchange: str, classes: Sequence[str]) -> Spec:
        """Weights, and the change of the client's control in the same shapes."""
        return super().expected(state, exchange, classes) | {
            BACKBONE: (tuple(state["backbone"].shape), torch.float32),
            ROWS: ((len(classes), state["rows"].shape[1]), torch.float32),
        }

    def fold(self, state: State, exchange: str) -> Fold:
        """FedAvg's fold, and the sum of the control changes."""
        return ScaffoldFold(state)

    def influence(self, state: State, update: Update) -> Iterator[Tensor]:
        """Where weights and control change stand among those of the others."""
        yield from super().influence(state, update)
        yield from pieces(update.tensors[BACKBONE])

    def objective(
        self, assignment: Assignment, network: Classifier, layout: Layout
    ) -> LocalObjective:
        """Cross-entropy with corrected gradients."""
        return Controlled(
            assignment,
            network,
            layout,
            self.softmax(assignment.instruction.state, assignment.classes),
        )


class Controlled(LocalObjective):
    """The corrected steps of one client, and its control after them."""

    def __init__(
        self, assignment: Assignment, network: Classifier, layout: Layout, columns: tuple[str, ...]
    ) -> None:
        state, private = assignment.instruction.state, assignment.private or State({})
        self.held, self.private = assignment.classes, private
        self.server = {"backbone": state[BACKBONE], "rows": gathered(state, ROWS, self.held)}
        own_backbone = (
            private["backbone"] if "backbone" in private else torch.zeros_like(state[BACKBONE])
        )
        self.own = {
            "backbone": own_backbone,
            "rows": gathered(private, "rows", self.held, state[ROWS].shape[1]),
        }
        weights = dict(network.named_parameters())
        backbone = {slot.name: weights[f"backbone.{slot.name}"] for slot in layout.slots}
        rows = torch.cat([network.head.weight, network.head.bias[:, None]], 1).detach()
        self.start = {"backbone": layout.flatten(backbone), "rows": rows[: len(self.held)].clone()}
        shift = {name: self.server[name] - self.own[name] for name in self.own}
        self.shift = by_parameter(layout, shift["backbone"], padded(shift["rows"], len(columns)))
        self.control: dict[str, Tensor] = {}

    def correct(self, network: Classifier, lr: float) -> None:
        """g <- g - c_k + c."""
        for name, weight in network.named_parameters():
            assert weight.grad is not None
            weight.grad.add_(self.shift[name])

    def sends(self, weights: dict[str, Tensor], steps: int, lr: float) -> dict[str, Tensor]:
        """The weights y, and c_k' - c_k = (x - y) / (t_k lr) - c."""
        change = {
            name: (self.start[name] - weights[name]) / (steps * lr) - self.server[name]
            for name in self.own
        }
        self.control = {name: self.own[name] + change[name] for name in change}
        return weights | {BACKBONE: change["backbone"], ROWS: change["rows"]}

    def keeps(self) -> State:
        """c_k', with the rows of classes held in earlier rounds as they were."""
        known = self.private.classes + tuple(
            name for name in self.held if name not in self.private.classes
        )
        rows = gathered(self.private, "rows", known, self.control["rows"].shape[1])
        kept = State({"backbone": self.control["backbone"], "rows": rows}, known)
        return kept.having({"rows": scattered(rows, kept.index(self.held), self.control["rows"])})


class ScaffoldFold(folds.PointFold):
    """FedAvg's fold of the weights; c + sum_k (c_k' - c_k) / K of the controls."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.registered = int(cast(Any, state.notes["registered"]))
        self.controls = {
            name: torch.zeros_like(state[name], dtype=torch.float64) for name in (BACKBONE, ROWS)
        }

    def add(self, update: Update, trust: float = 1.0) -> None:
        """Fold one update in; its control change counts as far as it is trusted."""
        super().add(update, trust)
        if update.samples:
            self.controls[BACKBONE] += trust * update.tensors[BACKBONE].double()
            self.controls[ROWS][self.state.index(update.classes)] += (
                trust * update.tensors[ROWS].double()
            )

    def close(self) -> State:
        """The folded state with the new server control."""
        new = {
            name: self.state[name].double() + total / self.registered
            for name, total in self.controls.items()
        }
        return super().close().having({name: value.float() for name, value in new.items()})
