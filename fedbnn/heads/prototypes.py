"""The prototypes: one row (weights and bias) per class ever met, found by the name of the class."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbnn.protocol.state import State


def empty(width: int) -> dict[str, Tensor]:
    """The tensors of no class, for `width` features."""
    samples = torch.zeros(0, dtype=torch.float64)
    return {"prototypes": torch.zeros(0, width + 1), "prototypes.samples": samples}


def grow(state: State, classes: Iterable[str], scale: float | None) -> State:
    """Rows of 0 for classes not met before, in all that has rows; the initial scale of a scale."""
    new = tuple(sorted(set(classes) - set(state.classes)))
    if not new:
        return state
    count, fill = len(state.classes) + len(new), {"prototypes.scale": scale or 0.0}
    rows = {name: rows for name, rows in state.tensors.items() if name.startswith("prototypes")}
    larger = {name: padded(one, count, fill.get(name, 0.0)) for name, one in rows.items()}
    return State({**state.tensors, **larger}, state.classes + new, state.notes)


def trained(state: State) -> tuple[str, ...]:
    """Classes whose row has been folded at least once."""
    counts = state["prototypes.samples"].tolist()
    return tuple(name for name, count in zip(state.classes, counts, strict=True) if count > 0)


def padded(rows: Tensor, count: int, value: float = 0.0) -> Tensor:
    """The rows, followed by rows of `value` up to `count`."""
    return torch.cat([rows, rows.new_full((count - len(rows), *rows.shape[1:]), value)])


def gathered(state: State, name: str, classes: tuple[str, ...]) -> Tensor:
    """The rows of these classes, 0 for unknown ones."""
    known = tuple(one for one in classes if one in state.classes)
    found = torch.zeros(len(classes), state[name].shape[1])
    if known:
        places = torch.tensor([classes.index(one) for one in known])
        found[places] = state[name][state.index(known)]
    return found


@dataclass(frozen=True)
class Assembly:
    """The rows of a client's classifier by `classes`; its own `held` classes come first.

    They come from the `holder`: the server's state, or the client's where prototypes stay at home.
    """

    holder: State
    classes: tuple[str, ...]
    held: int

    @property
    def index(self) -> Tensor:
        """Places of these rows in the holder."""
        return self.holder.index(self.classes)

    @property
    def rows(self) -> Tensor:
        """Weights and bias (means, once Bayesian)."""
        return self.holder["prototypes"][self.index]

    @property
    def scales(self) -> Tensor:
        """Scales of the rows."""
        return self.holder["prototypes.scale"][self.index]

    @property
    def fresh(self) -> Tensor:
        """Which rows nobody has trained yet, as a mask."""
        return self.holder["prototypes.samples"][self.index] == 0

    def kept(self, rows: dict[str, Tensor], counts: Iterable[int]) -> State:
        """The holder with its trained rows put back and the images behind them counted."""
        samples = self.holder["prototypes.samples"].clone()
        samples[self.index[: self.held]] += torch.tensor(list(counts), dtype=torch.float64)
        back = {n: self.holder[n].index_copy(0, self.index, row) for n, row in rows.items()}
        return self.holder.having({**back, "prototypes.samples": samples})
