"""The prototype library: one row (weights and bias) per class ever met, found by the name of the class."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fedbnn.state import State


def grow(state: State, classes: Iterable[str], scale: float | None) -> State:
    """Add rows for classes not met before: mean 0, identical everywhere, with the initial scale once Bayesian."""
    new = tuple(sorted(set(classes) - set(state.classes)))
    if not new:
        return state
    width = state["rows"].shape[1]
    zeros = torch.zeros(len(new), width)
    grown = {
        "rows": torch.cat([state["rows"], zeros]),
        "rows.samples": torch.cat(
            [state["rows.samples"], torch.zeros(len(new), dtype=torch.float64)]
        ),
    }
    if "rows.scale" in state and scale is not None:
        grown["rows.scale"] = torch.cat([state["rows.scale"], torch.full_like(zeros, scale)])
    larger = state.having(grown)
    return State(larger.tensors, state.classes + new, larger.notes)


def trained(state: State) -> tuple[str, ...]:
    """Classes whose row has been folded at least once."""
    return tuple(
        name
        for name, count in zip(state.classes, state["rows.samples"].tolist(), strict=True)
        if count > 0
    )


def fresh(state: State, classes: tuple[str, ...]) -> Tensor:
    """Which of these classes have a row that nobody has trained yet, as a mask."""
    return state["rows.samples"][state.index(classes)] == 0


def empty(width: int) -> dict[str, Tensor]:
    """The tensors of a library without classes, for `width` features."""
    return {"rows": torch.zeros(0, width + 1), "rows.samples": torch.zeros(0, dtype=torch.float64)}
