"""Tensors with one row per class, found by the name of the class, and tensors by the names of a network's parameters."""

import torch
from torch import Tensor

from fedbnn.bayes.flatten import Layout
from fedbnn.state import State


def padded(rows: Tensor, count: int) -> Tensor:
    """The rows, followed by rows of 0 up to `count`."""
    return torch.cat([rows, rows.new_zeros(count - len(rows), rows.shape[1])])


def gathered(state: State, name: str, classes: tuple[str, ...], width: int | None = None) -> Tensor:
    """The rows of these classes; 0 for classes the state does not know. `width` is needed where it may have no rows."""
    known = tuple(one for one in classes if one in state.classes)
    found = torch.zeros(len(classes), state[name].shape[1] if width is None else width)
    if known:
        places = torch.tensor([classes.index(one) for one in known])
        found[places] = state[name][state.index(known)]
    return found


def scattered(rows: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """A copy of the rows with some of them replaced."""
    return rows.clone().index_copy_(0, index, values)


def by_parameter(layout: Layout, backbone: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """A flat backbone vector and rows as tensors by the names of a classifier's parameters."""
    named = {f"backbone.{name}": value for name, value in layout.views(backbone).items()}
    return {
        **named,
        "head.weight": rows[:, :-1].contiguous(),
        "head.bias": rows[:, -1].contiguous(),
    }
