"""Pictures of a stream before anybody trains: which task when, which classes on which client."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.animation import PillowWriter
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedbnn.report import style

Names = Sequence[str]
Shares = Sequence[Sequence[float]]
Held = Mapping[int, Mapping[str, int]]
FRAMES, FAST = 24, 2


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
    style.by_round(axes)
    axes.grid(visible=False)


def frames(rounds: int) -> list[int]:
    """The rounds of a moving picture: all, or some at equal distances with the last."""
    return sorted({round(place) for place in np.linspace(1, rounds, min(rounds, FRAMES))})


def moving(held: Mapping[int, Held], asked: Mapping[int, Collection[int]], path: Path) -> None:
    """Which client holds how many images of which class, round after round, as an animated GIF.

    The area of a bubble is the number of images; full ones are those of the round's participants.
    """
    everybody = [counts for clients in held.values() for counts in clients.values()]
    met = [sorted(set().union(*clients.values()), key=_natural) for clients in held.values()]
    classes = list(dict.fromkeys(name for names in met for name in names))
    most = max((count for counts in everybody for count in counts.values()), default=1)
    with style.house():
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        writer = PillowWriter(fps=FAST)
        with writer.saving(figure, str(path), dpi=100):
            for number, clients in held.items():
                axes.clear()
                _draw_bubbles(axes, clients, classes, asked[number], most)
                axes.set_title(f"round {number} of {max(held)}")
                writer.grab_frame()


def _draw_bubbles(
    axes: Axes, held: Held, classes: Names, asked: Collection[int], most: int
) -> None:
    """Clients along, classes up."""
    height = {name: place for place, name in enumerate(classes)}
    points = [(k, height[name], n) for k, counts in held.items() for name, n in counts.items()]
    along, up, images = np.array(points, dtype=float).reshape(-1, 3).T
    widest = min(400.0, 4e4 / max(len(held), len(classes)) ** 1.5)
    here = np.isin(along, list(asked))
    for part, look in ((~here, (style.FAINT, 0.35)), (here, (style.BLUE, 0.85))):
        fill, alpha = look
        axes.scatter(along[part], up[part], widest * images[part] / most, color=fill, alpha=alpha)
    names = list(map(style.short, classes))
    ticks = range(len(names)) if len(names) <= 20 else range(0, len(names), 10)
    axes.set_yticks(ticks, [names[place] for place in ticks], fontsize=7)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="client", xlim=(-1, max(held) + 1), ylim=(-1, len(names)))


def _natural(name: str) -> tuple[int, str]:
    """2 stands before 10."""
    return len(name), name
