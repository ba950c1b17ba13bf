"""The figures of one run, each from results.json and diagnostics.json alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from fedbnn.evaluation.predictions import REGIMES
from fedbnn.report.figure_style import (
    BLUE,
    FAINT,
    GREEN,
    PURPLE,
    REGIME_COLOURS,
    VERMILION,
    canvas,
    colour,
    legend_below,
    percent_axis,
    settled,
    short,
    style,
)
from fedbnn.report.tables import SPOKEN

Json = Mapping[str, Any]


def of_run(results: Json, diagnostics: Json) -> dict[str, Figure]:
    """All figures that this run has the numbers for, by name."""
    with style():
        return settled(
            {
                "focus_on_now": focus_on_now(results),
                "accuracy_matrix": accuracy_matrix(results),
                "forgetting": forgetting(results),
                "reliability": reliability(diagnostics),
                "uncertainty": uncertainty(results, diagnostics),
                "posterior_scale": posterior_scale(results),
                "communication": communication(results),
            }
        )


def focus_on_now(results: Json) -> Figure:
    """Accuracy on the data of the moment, round by round, above the schedule of the tasks."""
    figure, curve = with_schedule(results["shares"], results["task_names"])
    for regime in REGIMES:
        rounds, values = present(results["fon"][regime])
        curve.plot(
            rounds,
            values,
            color=REGIME_COLOURS[regime],
            label=SPOKEN[regime],
            marker="o",
            markersize=3,
        )
    percent_axis(curve, "Focus-on-Now accuracy")
    legend_below(figure, curve)
    return figure


def present(values: Sequence[float | None]) -> tuple[list[int], list[float]]:
    """Rounds (from 1) and values where there are values."""
    pairs = [(number, value) for number, value in enumerate(values, 1) if value is not None]
    return [number for number, _ in pairs], [value for _, value in pairs]


def with_schedule(shares: Sequence[Sequence[float]], names: Sequence[str]) -> tuple[Figure, Axes]:
    """A figure with one large plot and, under it on the same x axis, the share of each task in every round."""
    figure = canvas(6.4, 4.0)
    upper, lower = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (4, 1)})
    draw_schedule(lower, shares, names)
    return figure, upper


def schedule(shares: Sequence[Sequence[float]], names: Sequence[str]) -> Figure:
    """The schedule alone: which share of the clients works on which task, and when."""
    with style():
        figure = canvas(6.4, 2.2)
        draw_schedule(figure.subplots(), shares, names)
    return figure


def draw_schedule(axes: Axes, shares: Sequence[Sequence[float]], names: Sequence[str]) -> None:
    """Stacked bars, one per round, one colour per task; a name stands where its task is strongest."""
    table = np.array([row for row in shares if len(row)], dtype=float).reshape(-1, len(names))
    rounds, below = np.arange(1, len(table) + 1), np.zeros(len(table))
    for task, name in enumerate(names):
        axes.bar(
            rounds,
            table[:, task],
            bottom=below,
            width=1.0,
            color=colour(task),
            alpha=0.55,
            linewidth=0,
        )
        _label(axes, rounds, table[:, task], below, name, len(names))
        below = below + table[:, task]
    axes.set(
        ylabel="tasks", xlabel="round", ylim=(0, 1), yticks=[], xlim=(0.5, max(len(table), 1) + 0.5)
    )
    axes.grid(visible=False)


def _label(axes: Axes, rounds: Any, share: Any, below: Any, name: str, tasks: int) -> None:
    """The task's name in the middle of its strongest rounds, unless there are too many tasks to read."""
    if tasks <= 10 and len(share) and share.max() > 0:
        strongest = np.flatnonzero(share >= share.max() - 1e-9)
        place = strongest[len(strongest) // 2]
        middle = below[place] + share[place] / 2
        axes.text(
            rounds[strongest].mean(),
            middle,
            short(name, 60 // tasks),
            ha="center",
            va="center",
            fontsize=8,
        )


def accuracy_matrix(results: Json) -> Figure:
    """Accuracy of every task at the end of every task, in both regimes."""
    names = results["task_names"]
    figure = canvas(5.4, 1.4 + 0.42 * len(names))
    for axes, regime in zip(figure.subplots(1, 2, sharey=True), REGIMES, strict=True):
        draw_matrix(axes, results[regime]["matrix"], names, SPOKEN[regime])
        axes.set_xlabel("tested task")
    figure.axes[0].set_ylabel("after task")
    return figure


def draw_matrix(
    axes: Axes, matrix: Sequence[Sequence[float | None]], names: Sequence[str], title: str
) -> None:
    """A heat map with its numbers written in; what was not evaluated stays empty."""
    values = np.array(
        [[np.nan if value is None else value for value in row] for row in matrix], dtype=float
    )
    axes.imshow(values, vmin=0, vmax=100, cmap="cividis", aspect="auto")
    size = 9 if len(names) <= 6 else 6
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value) and len(names) <= 12:
            axes.text(
                column,
                row,
                f"{value:.0f}",
                ha="center",
                va="center",
                fontsize=size,
                color="white" if value < 55 else "black",
            )
    ticks, names = range(len(names)), list(map(short, names))
    axes.set_xticks(
        ticks,
        names,
        rotation=35 if max(map(len, names)) > 4 else 0,
        ha="right" if max(map(len, names)) > 4 else "center",
    )
    axes.set_yticks(ticks, names)
    axes.set_title(title)
    axes.grid(visible=False)


def forgetting(results: Json) -> Figure | None:
    """How far each task fell from its best earlier accuracy to the end."""
    names = results["task_names"][:-1]
    if not names:
        return None
    figure = canvas(5.4, 1.4 + 0.35 * len(names))
    axes, rows = figure.subplots(), np.arange(len(names))
    for place, regime in enumerate(REGIMES):
        drops = [
            np.nan if value is None else value
            for value in results[regime]["forgetting_by_task"][:-1]
        ]
        axes.barh(
            rows + 0.38 * place - 0.19,
            drops,
            height=0.36,
            color=REGIME_COLOURS[regime],
            label=SPOKEN[regime],
        )
    axes.axvline(0, color=FAINT, linewidth=0.8)
    axes.set_yticks(rows, list(map(short, names)))
    axes.invert_yaxis()
    axes.set(
        title="Forgetting by task", xlabel="points lost from the best earlier evaluation to the end"
    )
    legend_below(figure, axes)
    return figure


def reliability(diagnostics: Json) -> Figure | None:
    """Accuracy against confidence: on the diagonal a model is as sure as it is right; bars show where the images are."""
    bins = diagnostics.get("reliability")
    if not bins:
        return None
    figure = canvas(5.4, 3.4)
    for axes, regime in zip(figure.subplots(1, 2, sharey=True), REGIMES, strict=True):
        draw_reliability(axes, bins[regime], REGIME_COLOURS[regime])
        axes.set(title=SPOKEN[regime], xlabel="confidence")
    figure.axes[0].set_ylabel("fraction right")
    return figure


def draw_reliability(
    axes: Axes, bins: Json, line: str, label: str | None = None, shadow: bool = True
) -> None:
    """One reliability curve; bins without images are left out."""
    images = np.array(bins["images"], dtype=float)
    filled = images > 0
    axes.plot([0, 1], [0, 1], color=FAINT, linewidth=1, linestyle=":")
    if shadow:
        edges = np.linspace(0, 1, len(images) + 1)
        axes.bar(
            edges[:-1],
            images / max(images.sum(), 1),
            width=1 / len(images),
            align="edge",
            color=FAINT,
            alpha=0.3,
            linewidth=0,
        )
    confidence, right = np.array(bins["confidence"])[filled], np.array(bins["accuracy"])[filled]
    axes.plot(confidence, right, color=line, marker="o", markersize=4, label=label)
    axes.set(xlim=(0, 1), ylim=(0, 1))


def uncertainty(results: Json, diagnostics: Json) -> Figure | None:
    """How uncertain the model is about images of seen and of not yet seen classes."""
    histograms = diagnostics.get("uncertainty")
    if not histograms or not sum(histograms["entropy"]["unseen"]):
        return None
    figure = canvas(5.4, 3.0)
    areas = (
        {one["round"]: one for one in results["novelty"]["by_round"]}.get(histograms["round"], {})
        if results["novelty"]
        else {}
    )
    for axes, name in zip(figure.subplots(1, 2), ("entropy", "mutual_information"), strict=True):
        _draw_histogram(axes, histograms[name])
        area = f" (AUROC {areas[name]:.2f})" if areas.get(name) is not None else ""
        axes.set(title=name.replace("_", " "), xlabel=f"nats{area}")
    figure.axes[0].set_ylabel(f"share of images (round {histograms['round']})")
    legend_below(figure, figure.axes[0])
    return figure


def _draw_histogram(axes: Axes, histogram: Json) -> None:
    for name, line in (("seen", BLUE), ("unseen", VERMILION)):
        counts = np.array(histogram[name], dtype=float)
        axes.stairs(
            counts / max(counts.sum(), 1), histogram["edges"], fill=True, alpha=0.35, color=line
        )
        axes.stairs(
            counts / max(counts.sum(), 1), histogram["edges"], color=line, label=f"{name} classes"
        )


def posterior_scale(results: Json) -> Figure | None:
    """The spread of the weights over the rounds: median, and the band that holds nine weights in ten."""
    if not results["posterior"]:
        return None
    figure = canvas(5.4, 3.0)
    axes, rounds = figure.subplots(), [one["round"] for one in results["posterior"]]
    for name, line in (("backbone", GREEN), ("rows", PURPLE)):
        values = [one["scale"].get(name) for one in results["posterior"]]
        table = np.array([value or [np.nan] * 3 for value in values], dtype=float)
        axes.plot(
            rounds,
            table[:, 1],
            color=line,
            label="feature extractor" if name == "backbone" else "class rows",
        )
        axes.fill_between(rounds, table[:, 0], table[:, 2], color=line, alpha=0.2, linewidth=0)
    axes.set(
        title="Posterior scale of the weights",
        xlabel="round",
        ylabel="standard deviation",
        yscale="log",
    )
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend()
    return figure


def communication(results: Json) -> Figure:
    """Bytes sent so far, and where the seconds went."""
    figure = canvas(5.4, 2.8)
    stats, clock = figure.subplots(1, 2)
    for way, line in (("up", BLUE), ("down", VERMILION)):
        total = np.cumsum(results["bytes_by_round"][way]) / 1e6
        stats.plot(
            range(1, len(total) + 1),
            total,
            color=line,
            label={"up": "clients to server", "down": "server to clients"}[way],
        )
    stats.set(title="Communication", xlabel="round", ylabel="MB so far", ylim=(0, None))
    stats.legend()
    parts = {
        part: seconds
        for part, seconds in results["seconds_by_part"].items()
        if part not in ("round", "inner", "fold")
    }
    clock.barh(list(parts), list(parts.values()), color=GREEN)
    clock.set(title="Time", xlabel="seconds")
    return figure
