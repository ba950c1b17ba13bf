"""The figures of runs, from results.json and, under `diagnostics`, diagnostics.json alone.

One run shows its inside (uncertainty, posterior, communication), several show what tells them apart
(averages, novelty, cost); a figure without numbers is left out. Curves are means over the seeds,
with bands of one standard deviation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from fedbnn.evaluation.evaluate import REGIMES, UNCERTAINTIES
from fedbnn.report import style
from fedbnn.report.tables import MOMENTS, SPOKEN, Cell, Runs, Varied, by_method, over_seeds, spread

Names = Sequence[str]
Shares = Sequence[Sequence[float]]
Curves = Sequence[Sequence[float | None]]
Series = Mapping[str, Sequence[Cell]]


def every(runs: Runs, sweep: Varied | None = None) -> dict[str, Figure]:
    """All figures that these runs have the numbers for, by name."""
    inside, apart = (uncertainty, posterior_scale, communication), (averages, novelty, cost)
    first, last = ((), inside) if len(runs) == 1 else (apart, ())
    chosen = (focus_on_now, *first, accuracy_matrix, forgetting, reliability, *last)
    with style.house():
        drawn = {draw.__name__: draw(runs) for draw in chosen if not sweep}
        if sweep:
            drawn = {"sweep": swept(runs, sweep), "focus_on_now": focus_on_now(sweep.named(runs))}
        return {name: style.settled(figure) for name, figure in drawn.items() if figure}


def _each(grouped: Mapping[str, Runs], *path: str) -> list[Cell]:
    """Mean and spread of one number of each method."""
    return [over_seeds(mine, *path) for mine in grouped.values()]


def _heights(cells: Sequence[Cell]) -> Any:
    """Means and spreads, NaN where there are none."""
    pairs = [(cell.value, cell.spread) for cell in cells]
    return np.array(pairs, dtype=float).reshape(-1, 2).T


def focus_on_now(runs: Runs) -> Figure:
    """Accuracy on the data of the moment, round by round, above the schedule of the tasks."""
    figure = Figure(figsize=(6.4, 6.4))
    *panels, strip = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": (4, 4, 1)})
    for axes, regime in zip(panels, REGIMES, strict=True):
        for place, (method, mine) in enumerate(by_method(runs).items()):
            _draw_band(axes, [run["fon"][regime] for run in mine], method, place)
        style.percent_axis(axes, f"Focus-on-Now accuracy, {SPOKEN[regime]}")
    longest, names = max((run["shares"] for run in runs), key=len), runs[0]["task_names"]
    draw_schedule(strip, longest, names, letters=60 // len(names) if len(names) <= 10 else 0)
    return style.legend_below(figure)


def _draw_band(axes: Axes, curves: Curves, label: str, place: int) -> None:
    """Mean and deviation of several curves, at the rounds that all of them have."""
    table, look = np.array(curves, dtype=float), style.line_style(place)
    known = np.isfinite(table).all(axis=0)
    rounds, mean = np.flatnonzero(known) + 1, table[:, known].mean(axis=0)
    axes.plot(rounds, mean, label=label, markersize=2.5, **look)
    if len(curves) > 1:
        wide = table[:, known].std(axis=0, ddof=1)
        band = {"color": look["color"], "alpha": 0.18, "linewidth": 0}
        axes.fill_between(rounds, mean - wide, mean + wide, **band)


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


def _bars(axes: Axes, names: Names, series: Series, *looks: Any) -> None:
    """Two bars at every name, with their spreads over the seeds."""
    whiskers: Any = {"fmt": "none", "ecolor": style.FAINT, "elinewidth": 1.2, "capsize": 2}
    for place, (label, cells) in enumerate(series.items()):
        where, (heights, wide) = np.arange(len(cells)) + 0.38 * place - 0.19, _heights(cells)
        axes.bar(where, heights, width=0.36, label=label, **looks[place])
        axes.errorbar(where, heights, wide, **whiskers)
    axes.set_xticks(range(len(names)), list(map(style.short, names)), rotation=35, ha="right")


def _bar_chart(names: Names, series: Series, level: float, *fills: str, **said: Any) -> Figure:
    """A figure of nothing but bars, and a line at the level to hold them against."""
    figure = Figure(figsize=(5.4, 3.0))
    axes = figure.subplots()
    _bars(axes, names, series, *({"color": fill} for fill in fills))
    axes.axhline(level, **style.DOTTED)
    axes.set(**said)
    return style.legend_below(figure)


def averages(runs: Runs) -> Figure:
    """Average accuracy at task ends (pale) and at the end (full), with the chance level."""
    grouped, figure = by_method(runs), Figure(figsize=(5.4, 3.4))
    for axes, regime in zip(figure.subplots(1, 2, sharey=True), REGIMES, strict=True):
        paths = {said: (regime, f"avg_{moment}") for moment, said in MOMENTS.items()}
        series = {said: _each(grouped, *path) for said, path in paths.items()}
        pale, full = ({"color": style.REGIME_COLOURS[regime], "alpha": part} for part in (0.55, 1))
        _bars(axes, list(grouped), series, pale, full)
        [[chance], _] = _heights([over_seeds(runs, "chance", regime, "avg_fin")])
        axes.axhline(chance, label="chance @Fin", **style.DOTTED)
        style.percent_axis(axes, SPOKEN[regime])
    figure.axes[1].set_ylabel("")
    return style.legend_below(figure)


def accuracy_matrix(runs: Runs) -> Figure:
    """Accuracy of every task at the end of every task: methods down, regimes across."""
    grouped, names = by_method(runs), runs[0]["task_names"]
    figure = Figure(figsize=(5.4, (1.3 + 0.36 * len(names)) * len(grouped)))
    lines = figure.subplots(len(grouped), 2, sharey=True, squeeze=False)
    for line, (method, mine) in zip(lines, grouped.items(), strict=True):
        for axes, regime in zip(line, REGIMES, strict=True):
            tables = np.array([run[regime]["matrix"] for run in mine], dtype=float)
            _draw_matrix(axes, tables.mean(axis=0), names, f"{method}, {SPOKEN[regime]}")
        line[0].set_ylabel("after task")
    for axes in lines[-1]:
        axes.set_xlabel("tested task")
    return figure


def _draw_matrix(axes: Axes, values: Any, names: Names, title: str) -> None:
    """A heat map with its numbers written in; what was not evaluated stays empty."""
    axes.imshow(values, vmin=0, vmax=100, cmap="cividis", aspect="auto")
    text: Any = {"ha": "center", "va": "center", "fontsize": 9 if len(names) <= 6 else 6}
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value) and len(names) <= 12:
            ink = "white" if value < 55 else "black"
            axes.text(column, row, f"{value:.0f}", color=ink, **text)
    ticks, names = range(len(names)), list(map(style.short, names))
    wide = max(map(len, names)) > 4
    axes.set_xticks(ticks, names, rotation=35 if wide else 0, ha="right" if wide else "center")
    axes.set_yticks(ticks, names)
    axes.set_title(title)
    axes.grid(visible=False)


def forgetting(runs: Runs) -> Figure | None:
    """How far accuracy fell from its best: of one method task by task, of several on average."""
    grouped, tasks = by_method(runs), runs[0]["task_names"][:-1]
    if not tasks:
        return None
    alone, series = len(grouped) == 1, {}
    for regime, spoken in SPOKEN.items():
        drops = zip(*(run[regime]["forgetting_by_task"][:-1] for run in runs), strict=True)
        each = _each(grouped, regime, "forgetting")
        series[spoken] = list(map(spread, drops)) if alone else each
    names, fills = tasks if alone else list(grouped), style.REGIME_COLOURS.values()
    said = {"title": "Forgetting (lower is better)", "ylabel": "points lost"}
    return _bar_chart(names, series, 0.0, *fills, **said)


def reliability(runs: Runs) -> Figure | None:
    """Accuracy against confidence, one curve a method; of a single one also where images are."""
    found = by_method([run for run in runs if run["diagnostics"].get("reliability")])
    if not found:
        return None
    figure = Figure(figsize=(5.4, 3.6))
    for axes, regime in zip(figure.subplots(1, 2, sharey=True), REGIMES, strict=True):
        axes.plot([0, 1], [0, 1], **style.DOTTED)
        for place, (method, mine) in enumerate(found.items()):
            bins = [run["diagnostics"]["reliability"][regime] for run in mine]
            _draw_reliability(axes, bins, len(found) == 1, label=method, **style.line_style(place))
        axes.set(title=SPOKEN[regime], xlabel="confidence", xlim=(0, 1), ylim=(0, 1))
    figure.axes[0].set_ylabel("fraction right")
    return style.legend_below(figure)


def _draw_reliability(axes: Axes, bins: Runs, shadow: bool, **look: Any) -> None:
    """One curve of the bins of several runs together; bins without images are left out."""
    images = np.array([one["images"] for one in bins], dtype=float)
    total = images.sum(axis=0)
    parts = [np.array([one[name] for one in bins]) for name in ("confidence", "accuracy")]
    means = [(part * images).sum(axis=0)[total > 0] / total[total > 0] for part in parts]
    axes.plot(*means, markersize=4, **look)
    if shadow:
        share, edges = total / max(total.sum(), 1), np.linspace(0, 1, len(total) + 1)
        axes.stairs(share, edges, fill=True, color=style.FAINT, alpha=0.3, linewidth=0)


def uncertainty(runs: Runs) -> Figure | None:
    """How uncertain one model is about images of seen and of not yet seen classes."""
    histograms = runs[0]["diagnostics"].get("uncertainty")
    if not histograms or not sum(histograms["entropy"]["unseen"]):
        return None
    figure, taken = Figure(figsize=(5.4, 3.0)), histograms["round"]
    by_round = {one["round"]: one for one in (runs[0]["novelty"] or {"by_round": []})["by_round"]}
    for axes, name in zip(figure.subplots(1, 2), UNCERTAINTIES, strict=True):
        for part, line in (("seen", style.BLUE), ("unseen", style.VERMILION)):
            counts, edges = np.array(histograms[name][part], dtype=float), histograms[name]["edges"]
            share = counts / max(counts.sum(), 1)
            axes.stairs(share, edges, fill=True, alpha=0.35, color=line)
            axes.stairs(share, edges, color=line, label=f"{part} classes")
        area = by_round.get(taken, {}).get(name)
        said = f"nats (AUROC {area:.2f})" if area is not None else "nats"
        axes.set(title=name.replace("_", " "), xlabel=said)
    figure.axes[0].set_ylabel(f"share of images (round {taken})")
    return style.legend_below(figure)


def posterior_scale(runs: Runs) -> Figure | None:
    """The spread of one model's weights: median, and the band that holds nine weights in ten."""
    posterior = runs[0]["posterior"]
    if not posterior:
        return None
    figure = Figure(figsize=(5.4, 3.0))
    axes, rounds = figure.subplots(), [one["round"] for one in posterior]
    for name, line in (("backbone", style.GREEN), ("prototypes", style.PURPLE)):
        low, middle, high = np.array([one["scale"].get(name, [np.nan] * 3) for one in posterior]).T
        axes.plot(rounds, middle, color=line, label=name)
        axes.fill_between(rounds, low, high, color=line, alpha=0.2, linewidth=0)
    title = "Posterior scale of the weights"
    axes.set(title=title, xlabel="round", ylabel="standard deviation", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.legend()
    return figure


def communication(runs: Runs) -> Figure:
    """Bytes one run has sent so far, and where its seconds went."""
    figure = Figure(figsize=(5.4, 2.8))
    sent, clock = figure.subplots(1, 2)
    up, down = (
        ("up", "clients to server", style.BLUE),
        ("down", "server to clients", style.VERMILION),
    )
    for way, said, line in (up, down):
        total = np.cumsum(runs[0]["bytes_by_round"][way]) / 1e6
        sent.plot(np.arange(len(total)) + 1, total, color=line, label=said)
    sent.set(title="Communication", xlabel="round", ylabel="MB so far", ylim=(0, None))
    sent.legend()
    within = ("round", "inner", "fold")
    parts = {one: time for one, time in runs[0]["seconds_by_part"].items() if one not in within}
    clock.barh(list(parts), list(parts.values()), color=style.GREEN)
    clock.set(title="Time", xlabel="seconds")
    return figure


def novelty(runs: Runs) -> Figure | None:
    """How well each method's uncertainty tells unseen from seen classes; 0.5 is a coin."""
    grouped = by_method([run for run in runs if run["novelty"]])
    series = {name.replace("_", " "): _each(grouped, "novelty", name) for name in UNCERTAINTIES}
    said = {"title": "Seen against unseen classes", "ylabel": "AUROC", "ylim": (0, 1)}
    fills = style.GREEN, style.PURPLE
    return _bar_chart(list(grouped), series, 0.5, *fills, **said) if grouped else None


def cost(runs: Runs) -> Figure:
    """Final class-agnostic accuracy against what it cost: megabytes sent, and seconds."""
    figure = Figure(figsize=(5.4, 3.4))
    sent, clock = figure.subplots(1, 2, sharey=True)
    for place, (method, mine) in enumerate(by_method(runs).items()):
        height = np.array([run["class_agnostic"]["avg_fin"] for run in mine], dtype=float)
        look = style.line_style(place) | {"linestyle": "none"}
        bytes_sent = [(run["bytes_up"] + run["bytes_down"]) / 1e6 for run in mine]
        sent.plot(bytes_sent, height, label=method, alpha=0.8, **look)
        clock.plot([run["seconds"] for run in mine], height, alpha=0.8, **look)
    sent.set(title="Communication", xlabel="MB up and down", ylabel="class-agnostic @Fin in %")
    clock.set(title="Time", xlabel="seconds")
    return style.legend_below(figure)


def swept(runs: Runs, sweep: Varied) -> Figure | None:
    """Average accuracy over the values of a setting, if they are numbers; one line a method."""
    points = sweep.points(runs)
    try:
        values = sorted(points, key=float)
    except ValueError:
        return None
    figure = Figure(figsize=(5.4, 3.4))
    for axes, regime in zip(figure.subplots(1, 2, sharey=True), REGIMES, strict=True):
        for place, method in enumerate(by_method(runs)):
            mine = {one: by_method(points[one]).get(method, []) for one in values}
            heights, wide = _heights(_each(mine, regime, "avg_fin"))
            look = {"capsize": 3, "label": method, **style.line_style(place)}
            axes.errorbar(list(map(float, values)), heights, wide, **look)
        style.percent_axis(axes, f"{SPOKEN[regime]} @Fin", sweep.key)
    return style.legend_below(figure)
