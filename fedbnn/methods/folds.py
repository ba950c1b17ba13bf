"""Sums that become means: what every fold is made of. float64, one update at a time, in the order given."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedbnn.messages import Update, class_counts
from fedbnn.state import State


class WeightedMean:
    """sum_k w_k x_k / sum_k w_k; with no weight at all, the value it began with."""

    def __init__(self, start: Tensor) -> None:
        self.start = start
        self.total = torch.zeros_like(start, dtype=torch.float64)
        self.weight = 0.0

    def add(self, value: Tensor, weight: float) -> None:
        """Add w x."""
        self.total.add_(value.double(), alpha=weight)
        self.weight += weight

    def value(self) -> Tensor:
        """The mean, in the type of the start."""
        return (self.total / self.weight).to(self.start.dtype) if self.weight else self.start


class RowMeans:
    """A weighted mean for every library row; a row nobody added to stays as it was, bit for bit."""

    def __init__(self, start: Tensor) -> None:
        self.start = start
        self.total = torch.zeros_like(start, dtype=torch.float64)
        self.weight = torch.zeros(len(start), dtype=torch.float64)

    def add(self, rows: Tensor, values: Tensor, weights: Tensor) -> None:
        """Add w_c x_c to these rows."""
        self.total[rows] += weights.view(-1, 1) * values.double()
        self.weight[rows] += weights

    def value(self) -> Tensor:
        """The means."""
        met = self.weight > 0
        result = self.start.clone()
        result[met] = (self.total[met] / self.weight[met].view(-1, 1)).to(self.start.dtype)
        return result


class PointFold:
    """FedAvg: theta = sum_k n_k theta_k / sum_k n_k; each row by its class: h_c = sum_k n_kc h_kc / sum_k n_kc.

    `trust` below 1 pulls a client that weighs too much towards the weights it started from.
    """

    def __init__(self, state: State, names: Sequence[str] = ("backbone", "buffers")) -> None:
        self.state = state
        self.means = {name: WeightedMean(state[name]) for name in names}
        self.rows = RowMeans(state["rows"]) if "rows" in state else None
        self.samples = torch.zeros(len(state.classes), dtype=torch.float64)

    def add(self, update: Update, trust: float = 1.0) -> None:
        """Fold one update in; a client without data changes nothing."""
        if not update.samples:
            return
        for name, mean in self.means.items():
            mean.add(tempered(update.tensors[name], self.state[name], trust), update.samples)
        if self.rows is not None and update.counts:
            index, counts = self.state.index(update.classes), class_counts(update)
            self.rows.add(
                index, tempered(update.tensors["rows"], self.state["rows"][index], trust), counts
            )
            self.samples[index] += counts

    def close(self) -> State:
        """The folded state."""
        folded = {name: mean.value() for name, mean in self.means.items()}
        if self.rows is not None:
            folded |= {
                "rows": self.rows.value(),
                "rows.samples": self.state["rows.samples"] + self.samples,
            }
        return self.state.having(folded)


def tempered(value: Tensor, start: Tensor, trust: float) -> Tensor:
    """start + trust (value - start), and exactly `value` at full trust."""
    return value if trust == 1.0 else start + trust * (value - start)
