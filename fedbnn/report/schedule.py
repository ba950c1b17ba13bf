"""Pictures of a stream before anybody trains: which task when, which classes on which client."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedbnn.report import style

Names = Sequence[str]
Shares = Sequence[Sequence[float]]


def schedule(shares: Shares, names: Names, title: str = "") -> Figure:
    """Which share of the clients works on which task, and when; names beside it if need be."""
    with style.house():
        figure = Figure(figsize=(9, 3.2))
        axes, letters = figure.subplots(), max(map(len, names))
        room = letters * len(names) <= 80
        draw_schedule(axes, shares, names, letters if room else 0)
        axes.set(title=title, ylabel="share of the clients")
        if not room:
            figure.legend(loc="outside right upper", fontsize=7, ncols=1 + len(names) // 16)
        return style.settled(figure)


def draw_schedule(axes: Axes, shares: Shares, names: Names, letters: int) -> None:
    """Stacked areas, one a task; a name of so many letters stands where its task is strongest."""
    table = np.array([row for row in shares if len(row)], dtype=float).reshape(-1, len(names))
    edges, below = np.arange(len(table) + 1) + 0.5, np.zeros(len(table))
    for name, share, fill in zip(names, table.T, style.colours(len(names)), strict=True):
        area: Any = {"facecolor": fill, "edgecolor": "white", "linewidth": 0.5, "alpha": 0.55}
        axes.stairs(below + share, edges, baseline=below, fill=True, label=name, **area)
        if letters and share.any():
            strongest = np.flatnonzero(share >= share.max() - 1e-9)
            middle = (below + share / 2)[strongest[len(strongest) // 2]]
            said, place = style.short(name, letters), strongest.mean() + 1
            axes.text(place, middle, said, ha="center", va="center", fontsize=8)
        below = below + share
    axes.set(ylabel="tasks", xlabel="round", ylim=(0, 1), yticks=[], xlim=(0.5, edges[-1]))
    axes.grid(visible=False)
