"""The figures of methods x seeds on one stream: curves with bands over the seeds, and what the methods cost."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedbnn.evaluation.predictions import REGIMES
from fedbnn.report.figure_style import (
    FAINT,
    MARKERS,
    REGIME_COLOURS,
    canvas,
    colour,
    legend_below,
    line_style,
    percent_axis,
    settled,
    style,
)
from fedbnn.report.figures import draw_matrix, draw_reliability, draw_schedule
from fedbnn.report.tables import MOMENTS, SPOKEN, by_method

Json = Mapping[str, Any]


def of_comparison(runs: Sequence[Json], diagnostics: Sequence[Json]) -> dict[str, Figure]:
    """All figures of these runs, by name; `diagnostics` belong to the runs one by one."""
    with style():
        return settled(
            {
                "focus_on_now": focus_on_now(runs),
                "averages": averages(runs),
                "accuracy_matrix": accuracy_matrices(runs),
                "forgetting": forgetting(runs),
                "reliability": reliability(runs, diagnostics),
                "novelty": novelty(runs),
                "cost": cost(runs),
            }
        )


def now(runs: Sequence[Json]) -> Figure:
    """Focus-on-Now by itself, in the style of all figures."""
    with style():
        return settled({"now": focus_on_now(runs)})["now"]


def focus_on_now(runs: Sequence[Json]) -> Figure:
    """Focus-on-Now accuracy, mean and standard deviation over the seeds, above the schedule of the tasks."""
    figure = canvas(6.4, 6.4)
    *curves, strip = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": (4, 4, 1)})
    for axes, regime in zip(curves, REGIMES, strict=True):
        for place, (method, mine) in enumerate(by_method(runs).items()):
            draw_band(axes, [run["fon"][regime] for run in mine], method, place)
        percent_axis(axes, f"Focus-on-Now accuracy, {SPOKEN[regime]}")
    draw_schedule(strip, max((run["shares"] for run in runs), key=len), runs[0]["task_names"])
    legend_below(figure, curves[0])
    return figure


def draw_band(axes: Axes, curves: Sequence[Sequence[float | None]], label: str, place: int) -> None:
    """Mean of several curves with a band of one standard deviation, at the rounds that all of them have."""
    table = np.array(
        [[np.nan if value is None else value for value in curve] for curve in curves], dtype=float
    )
    known = np.isfinite(table).all(axis=0)
    rounds, mean = np.flatnonzero(known) + 1, table[:, known].mean(axis=0)
    axes.plot(rounds, mean, label=label, **line_style(place))
    if len(curves) > 1:
        spread = table[:, known].std(axis=0, ddof=1)
        axes.fill_between(
            rounds, mean - spread, mean + spread, color=colour(place), alpha=0.18, linewidth=0
        )


def _numbers(runs: Sequence[Json], *path: str) -> tuple[float, float]:
    """Mean and standard deviation (0 for one seed) of a number of the results."""
    values = [_read(run, path) for run in runs]
    present = [value for value in values if value is not None]
    return (float(np.mean(present)) if present else np.nan), (
        float(np.std(present, ddof=1)) if len(present) > 1 else 0.0
    )


def _read(run: Json, path: Sequence[str]) -> float | None:
    value: Any = run
    for key in path:
        value = None if value is None else value[key]
    return value if value is None else float(value)


def averages(runs: Sequence[Json]) -> Figure:
    """Average accuracy at task ends (pale) and at the end (full), in both regimes, with the chance level."""
    grouped = by_method(runs)
    figure = canvas(5.4, 3.4)
    for axes, regime in zip(figure.subplots(1, 2, sharey=True), REGIMES, strict=True):
        for place, moment in enumerate(MOMENTS):
            numbers = [_numbers(mine, regime, f"avg_{moment}") for mine in grouped.values()]
            _bars(
                axes,
                numbers,
                place,
                colour=REGIME_COLOURS[regime],
                alpha=0.55 if moment == "ts" else 1.0,
                label=MOMENTS[moment],
            )
        chance, _ = _numbers(runs, "chance", regime, "avg_fin")
        axes.axhline(chance, color=FAINT, linestyle=":", linewidth=1.2, label="chance @Fin")
        percent_axis(axes, SPOKEN[regime])
        axes.set_xticks(range(len(grouped)), list(grouped), rotation=35, ha="right")
    figure.axes[1].set_ylabel("")
    legend_below(figure, figure.axes[0])
    return figure


def _bars(
    axes: Axes,
    numbers: Sequence[tuple[float, float]],
    place: int,
    colour: str,
    alpha: float,
    label: str,
) -> None:
    """One of two bars at every method, with its spread."""
    where = np.arange(len(numbers)) + 0.38 * place - 0.19
    means, spreads = zip(*numbers, strict=True)
    axes.bar(where, means, width=0.36, color=colour, alpha=alpha, label=label)
    axes.errorbar(where, means, yerr=spreads, fmt="none", ecolor=FAINT, elinewidth=1.2, capsize=2)


def accuracy_matrices(runs: Sequence[Json]) -> Figure:
    """The accuracy matrix of every method, averaged over its seeds: methods down, regimes across."""
    grouped, names = by_method(runs), runs[0]["task_names"]
    figure = canvas(5.4, (1.2 + 0.3 * len(names)) * len(grouped))
    rows = figure.subplots(len(grouped), 2, squeeze=False)
    for line, (method, mine) in zip(rows, grouped.items(), strict=True):
        for axes, regime in zip(line, REGIMES, strict=True):
            draw_matrix(
                axes,
                _mean_matrix([run[regime]["matrix"] for run in mine]),
                names,
                f"{method}, {SPOKEN[regime]}",
            )
    return figure


def _mean_matrix(matrices: Sequence[Sequence[Sequence[float | None]]]) -> list[list[float | None]]:
    """Entry by entry; empty where any of them is."""
    tasks = range(len(matrices[0]))
    entries = [[[matrix[row][column] for matrix in matrices] for column in tasks] for row in tasks]
    return [
        [
            None if None in values else float(np.mean(np.array(values, dtype=float)))
            for values in row
        ]
        for row in entries
    ]


def forgetting(runs: Sequence[Json]) -> Figure | None:
    """Average forgetting of every method."""
    grouped = by_method(runs)
    if len(runs[0]["task_names"]) < 2:
        return None
    figure = canvas(5.4, 3.0)
    axes = figure.subplots()
    for place, regime in enumerate(REGIMES):
        numbers = [_numbers(mine, regime, "forgetting") for mine in grouped.values()]
        _bars(axes, numbers, place, colour=REGIME_COLOURS[regime], alpha=1.0, label=SPOKEN[regime])
    axes.set_xticks(range(len(grouped)), list(grouped), rotation=35, ha="right")
    axes.set(title="Forgetting (lower is better)", ylabel="points")
    legend_below(figure, axes)
    return figure


def reliability(runs: Sequence[Json], diagnostics: Sequence[Json]) -> Figure | None:
    """One reliability curve per method, all seeds together."""
    pairs = [
        (run["method"], one["reliability"])
        for run, one in zip(runs, diagnostics, strict=True)
        if one.get("reliability")
    ]
    if not pairs:
        return None
    figure = canvas(5.4, 3.6)
    for axes, regime in zip(figure.subplots(1, 2, sharey=True), REGIMES, strict=True):
        for place, method in enumerate(dict.fromkeys(name for name, _ in pairs)):
            bins = _pooled([one[regime] for name, one in pairs if name == method])
            draw_reliability(axes, bins, colour(place), method, shadow=False)
        axes.set(title=SPOKEN[regime], xlabel="confidence")
    figure.axes[0].set_ylabel("fraction right")
    legend_below(figure, figure.axes[0])
    return figure


def _pooled(bins: Sequence[Json]) -> dict[str, Any]:
    """The bins of several runs as one."""
    images = np.array([one["images"] for one in bins], dtype=float)
    total = images.sum(axis=0)
    means = {
        name: (np.array([one[name] for one in bins]) * images).sum(axis=0) / np.maximum(total, 1)
        for name in ("confidence", "accuracy")
    }
    return {"images": total, **means}


def novelty(runs: Sequence[Json]) -> Figure | None:
    """How well each method's uncertainty tells unseen from seen classes; 0.5 is a coin."""
    grouped = {
        method: mine
        for method, mine in by_method(runs).items()
        if any(run["novelty"] for run in mine)
    }
    if not grouped:
        return None
    figure = canvas(5.4, 3.0)
    axes = figure.subplots()
    for place, (name, fill) in enumerate(
        (("entropy", colour(2)), ("mutual_information", colour(3)))
    ):
        numbers = [_numbers(mine, "novelty", name) for mine in grouped.values()]
        _bars(axes, numbers, place, colour=fill, alpha=1.0, label=name.replace("_", " "))
    axes.axhline(0.5, color=FAINT, linestyle=":", linewidth=1.2)
    axes.set_xticks(range(len(grouped)), list(grouped), rotation=35, ha="right")
    axes.set(title="Seen against unseen classes", ylabel="AUROC", ylim=(0, 1))
    legend_below(figure, axes)
    return figure


def cost(runs: Sequence[Json]) -> Figure:
    """Final class-agnostic accuracy against what it cost: megabytes sent, and seconds."""
    figure = canvas(5.4, 3.4)
    sent, clock = figure.subplots(1, 2, sharey=True)
    for place, (method, mine) in enumerate(by_method(runs).items()):
        height = [_read(run, ("class_agnostic", "avg_fin")) or np.nan for run in mine]
        point = {
            "color": colour(place),
            "marker": MARKERS[place % len(MARKERS)],
            "linestyle": "none",
            "alpha": 0.8,
        }
        sent.plot(
            [(run["bytes_up"] + run["bytes_down"]) / 1e6 for run in mine],
            height,
            label=method,
            **point,
        )
        clock.plot([run["seconds"] for run in mine], height, **point)
    sent.set(title="Communication", xlabel="MB up and down", ylabel="class-agnostic @Fin in %")
    clock.set(title="Time", xlabel="seconds")
    legend_below(figure, sent)
    return figure


def sweep(setting: str, runs: Mapping[float, Sequence[Json]]) -> Figure:
    """Average accuracy over the values of one setting, with the spread over seeds; one colour per method."""
    values = sorted(runs)
    methods = list(dict.fromkeys(run["method"] for value in values for run in runs[value]))
    with style():
        figure = canvas(5.4, 3.4)
        for axes, regime in zip(figure.subplots(1, 2, sharey=True), REGIMES, strict=True):
            for place, method in enumerate(methods):
                numbers = [
                    _numbers(
                        [run for run in runs[value] if run["method"] == method], regime, "avg_fin"
                    )
                    for value in values
                ]
                means, spreads = zip(*numbers, strict=True)
                axes.errorbar(
                    values,
                    means,
                    yerr=spreads,
                    marker=MARKERS[place % len(MARKERS)],
                    capsize=3,
                    label=method,
                    **line_style(place),
                )
            percent_axis(axes, f"{SPOKEN[regime]} @Fin", setting)
        legend_below(figure, figure.axes[0])
    return figure
