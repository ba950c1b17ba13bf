"""The schedule of a stream for people: rows of a table, and a picture."""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from datamodules.scenarios import Schedule
from datamodules.stream import FederatedStream

OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_DARK = {"#0072B2", "#009E73", "#D55E00"}


@dataclass(frozen=True)
class ScheduleRow:
    """One task in a run of rounds in which the same tasks are active; clients and shares at its first and last round."""

    first: int
    last: int
    task: str
    clients: tuple[int, int]
    shares: tuple[float, float]
    classes: tuple[str, ...]


def phases(schedule: Schedule, clients: int) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Runs of rounds with the same active tasks: first round, last round, the tasks."""

    def active(round: int) -> tuple[int, ...]:
        return tuple(
            task for task, count in enumerate(schedule.clients_on(round, clients)) if count
        )

    runs = [
        (tasks, list(rounds)) for tasks, rounds in groupby(range(1, schedule.rounds + 1), active)
    ]
    return tuple((rounds[0], rounds[-1], tasks) for tasks, rounds in runs)


def schedule_rows(stream: FederatedStream) -> tuple[ScheduleRow, ...]:
    """Which task, which share of the clients, which classes, when."""
    rows = []
    for first, last, tasks in phases(stream.schedule, stream.num_clients):
        shares = stream.shares(first), stream.shares(last)
        for task in tasks:
            share = shares[0][task], shares[1][task]
            clients = round(share[0] * stream.num_clients), round(share[1] * stream.num_clients)
            rows.append(
                ScheduleRow(
                    first, last, stream.tasks[task].name, clients, share, stream.tasks[task].classes
                )
            )
    return tuple(rows)


def draw_schedule(stream: FederatedStream, path: Path) -> None:
    """Stacked shares of the tasks over the rounds, as a PNG."""
    rounds = np.arange(1, stream.rounds + 1)
    shares = 100 * np.array([stream.shares(int(round)) for round in rounds])
    names = [task.name for task in stream.tasks]
    colours = _colours(len(names))
    figure = Figure(figsize=(9, 3.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    edges = np.repeat(np.arange(stream.rounds + 1), 2)[1:-1] + 0.5
    axes.stackplot(
        edges,
        np.repeat(shares, 2, axis=0).T,
        colors=colours,
        labels=names,
        edgecolor="white",
        linewidth=0.8,
    )
    _dress(axes, stream)
    _name_areas(axes, rounds, shares, names, colours)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _colours(count: int) -> list[str]:
    """Colours that colour-blind readers can tell apart; with many tasks neighbours still differ in lightness."""
    if count <= len(OKABE_ITO):
        return list(OKABE_ITO[:count])
    scale = colormaps["cividis"](np.linspace(0, 1, count))
    return ["#" + "".join(f"{round(255 * part):02x}" for part in colour[:3]) for colour in scale]


def _dress(axes: Axes, stream: FederatedStream) -> None:
    axes.set(
        xlim=(0.5, stream.rounds + 0.5),
        ylim=(0, 100),
        xlabel="round",
        ylabel="clients on the task (%)",
    )
    axes.spines[["top", "right"]].set_visible(False)
    title = f"{stream.incremental}-incremental, {stream.num_clients:,} clients, {stream.clients_per_round} a round"
    axes.set_title(title, loc="left", fontsize=10)


def _name_areas(
    axes: Axes, rounds: np.ndarray, shares: np.ndarray, names: list[str], colours: list[str]
) -> None:
    """Each name in the middle of its area, or in a legend where there is no room."""
    room = len(rounds) / len(names) >= 0.012 * len(rounds) * max(map(len, names))
    if not room:
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(1.0, 1.0),
            frameon=False,
            fontsize=7,
            ncols=1 + len(names) // 16,
        )
        return
    below = np.cumsum(shares, axis=1) - shares
    for task, name in enumerate(names):
        weight = shares[:, task] / shares[:, task].sum()
        place = weight @ rounds, weight @ (below[:, task] + shares[:, task] / 2)
        ink = "white" if colours[task] in _DARK else "black"
        axes.text(*place, name, ha="center", va="center", color=ink, fontsize=9)
