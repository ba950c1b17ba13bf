"""The figures of runs, from results.json and, under `diagnostics`, diagnostics.json alone.

One run shows its inside (uncertainty, posterior, communication), several show what tells them apart
(averages, novelty, cost); a figure without numbers is left out. A method has one colour and one
mark everywhere, a regime one kind of line. Curves are means over the seeds, bands and whiskers one
standard deviation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from fedbnn.evaluation.evaluate import HEADS, REGIMES, UNCERTAINTIES
from fedbnn.report import style
from fedbnn.report.schedule import Names, draw_schedule
from fedbnn.report.tables import SPOKEN
from fedbnn.report.values import Cell, Results, Runs, Varied, by_method, over_seeds, task_names

Curves = Sequence[Sequence[float | None]]
Lines = Mapping[str, Sequence[Cell]]
Looks = Mapping[str, Mapping[str, Any]]
BINNED = ("confidence", "accuracy")
TRAINED = {"loss": "Training loss", "kl": "KL to the prior"}
ORACLE, SPARSE = "oracle: all images so far, now", 12
"""An oracle, and how few rounds are told apart by a mark each."""
ACROSS = 5
"""Accuracy matrices of several methods stand so many in a row."""
ENOUGH = 5
"""Images of which a fraction says something."""


def every(runs: Runs, sweep: Varied | None = None) -> dict[str, Figure]:
    """All figures that these runs have the numbers for, by name."""
    inside, apart = (uncertainty, posterior_scale, communication), (averages, novelty, cost)
    first, last = ((), inside) if len(runs) == 1 else (apart, ())
    seen = (focus_on_now, *first, accuracy_matrix, forgetting, surprise)
    chosen = (*seen, training, reliability, *last)
    with style.house():
        drawn = {draw.__name__: draw(runs) for draw in chosen if not sweep}
        if sweep:
            drawn = {"sweep": swept(runs, sweep), "focus_on_now": focus_on_now(sweep.named(runs))}
        return {name: style.settled(figure) for name, figure in drawn.items() if figure}


def _looks(runs: Runs) -> dict[str, dict[str, Any]]:
    """Those of all methods of a page, so that one keeps its own in figures that leave some out."""
    return style.looks(by_method(runs))


def focus_on_now(runs: Runs) -> Figure:
    """Accuracy on the data of the moment, round by round, above the schedule of the tasks."""
    figure = Figure(figsize=(6.4, 6.4))
    *panels, strip = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": (4, 4, 1)})
    for axes, regime in zip(panels, REGIMES, strict=True):
        curves = {
            method: [run["fon"][regime] for run in mine] for method, mine in by_method(runs).items()
        }
        _draw_curves(axes, curves, _looks(runs), style.REGIME_LINES[regime])
        style.percent_axis(axes, f"Focus-on-Now accuracy, {SPOKEN[regime]}")
    _draw_tasks(strip, runs)
    return style.legend_below(figure)


def _draw_tasks(strip: Axes, runs: Runs) -> None:
    """The schedule of the tasks below curves by round."""
    longest, names = max((run["shares"] for run in runs), key=len), task_names(runs)
    draw_schedule(strip, longest, names, letters=60 // len(names) if len(names) <= 10 else 0)


def surprise(runs: Runs) -> Figure | None:
    """A sign of drift that needs no labels: how unsure models are of images of the next round."""
    told = [run for run in runs if any(value is not None for value in run["surprise"])]
    if not told:
        return None
    figure = Figure(figsize=(6.4, 3.6))
    axes, strip = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (4, 1)})
    curves = {name: [run["surprise"] for run in mine] for name, mine in by_method(told).items()}
    _draw_curves(axes, curves, _looks(runs))
    axes.set(title="Drift without labels: the images of the next round", ylabel="mean entropy")
    axes.set_ylim(0, 1.05 * axes.dataLim.ymax)
    _draw_tasks(strip, runs)
    return style.legend_below(figure)


def oracle(rows: Sequence[Mapping[str, float]]) -> Figure:
    """The head of a run beside one that forgets nothing, by round, in both regimes."""
    rounds = [row["round"] for row in rows]
    with style.house():
        figure = Figure(figsize=(6.4, 3.4))
        for axes, regime in zip(figure.subplots(1, 2, sharey=True), REGIMES, strict=True):
            ours, best = ([row[f"{name} {regime}"] for row in rows] for name in HEADS)
            axes.fill_between(rounds, ours, best, color=style.FAINT, alpha=0.25, linewidth=0)
            mark = "o" if len(rounds) < SPARSE else None
            axes.plot(rounds, best, color=style.GREEN, marker=mark, label=ORACLE)
            axes.plot(rounds, ours, color=style.BLUE, marker=mark, label="head of the run")
            style.percent_axis(axes, SPOKEN[regime], "round")
            style.by_round(axes)
        return style.settled(style.legend_below(figure))


def training(runs: Runs) -> Figure | None:
    """Loss of the clients' last pass, and the KL in it where weights are a posterior, by round."""
    shown: dict[str, dict[str, Curves]] = {}
    for name in TRAINED:
        for method, mine in by_method([run for run in runs if _trained(run, name)]).items():
            shown.setdefault(name, {})[method] = [_trained(run, name) for run in mine]
    if not shown:
        return None
    figure = Figure(figsize=(5.4, 3.2))
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, (name, curves) in zip(panels, shown.items(), strict=True):
        _draw_curves(axes, curves, _looks(runs))
        axes.set(title=TRAINED[name], xlabel="round")
        style.by_round(axes)
    figure.axes[0].set_ylabel("nats an image")
    return style.legend_below(figure)


def _trained(run: Results, name: str) -> list[float | None]:
    """One number of the clients' training, by round; empty if there is none."""
    found = {one["round"]: one[name] for one in run.get("train", ()) if name in one}
    return [found.get(number) for number in range(1, run["rounds"] + 1)] if found else []


def _draw_curves(axes: Axes, curves: Mapping[str, Curves], looks: Looks, line: str = "-") -> None:
    """Each method's mean over its seeds, and its band, at the rounds that all of them have.

    Bands of many methods are fainter: they lie on each other.
    """
    for place, method in enumerate(curves):
        table, look = np.array(curves[method], dtype=float), looks[method]
        known = np.isfinite(table).all(axis=0)
        rounds, mean = np.flatnonzero(known) + 1, table[:, known].mean(axis=0)
        apart = max(1, len(rounds) // 12)
        marks: Any = {"markersize": 4, "markevery": (place * apart // len(curves), apart)}
        axes.plot(rounds, mean, label=method, linestyle=line, **marks, **look)
        if len(table) > 1:
            wide = table[:, known].std(axis=0, ddof=1)
            faint = min(0.18, 0.7 / len(curves))
            band: Any = {"color": look["color"], "alpha": faint, "linewidth": 0}
            axes.fill_between(rounds, mean - wide, mean + wide, **band)


def _heights(cells: Sequence[Cell]) -> Any:
    """Means and spreads, NaN where there are none."""
    return np.array([(cell.value, cell.spread) for cell in cells], dtype=float).reshape(-1, 2).T


def _dots(
    panels: Mapping[str, Lines], marks: Names, levels: Sequence[float], looks: Looks
) -> Figure:
    """Panels with a line for each name: two numbers, as a full and a hollow mark, with spreads.

    The dotted line in each panel is the level to hold them against.
    """
    names = list(next(iter(panels.values())))
    figure = Figure(figsize=(5.4, 1.5 + 0.27 * len(names)))
    drawn = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, lines), level in zip(drawn, panels.items(), levels, strict=True):
        axes.axvline(level, **style.DOTTED)
        for place, (name, cells) in enumerate(lines.items()):
            _draw_line(axes, place, cells, looks[name])
        axes.set(title=title, ylim=(len(names) - 0.4, -0.6))
        axes.set_yticks(range(len(names)), list(map(style.short, names)))
        axes.grid(visible=False, axis="y")
    ink: Any = {"color": style.INK, "marker": "o", "linestyle": "none"}
    faces = zip(marks, (style.INK, "none"), strict=True)
    shown = [Line2D([], [], label=said, markerfacecolor=face, **ink) for said, face in faces]
    figure.legend(handles=shown, loc="outside lower center", ncols=2, fontsize=8)
    return figure


def _draw_line(axes: Axes, place: int, cells: Sequence[Cell], look: Mapping[str, Any]) -> None:
    """Two numbers of one name, joined; what is missing is not drawn."""
    values, wide = _heights(cells)
    axes.plot(values, [place] * 2, color=look["color"], linewidth=1, alpha=0.6)
    for value, spread, face in zip(values, wide, (look["color"], "none"), strict=True):
        marks: Any = {"markersize": 6, "markerfacecolor": face, "elinewidth": 1, "capsize": 2}
        axes.errorbar(value, place, xerr=spread, linestyle="none", **marks, **look)


def averages(runs: Runs) -> Figure:
    """Average accuracy at the end (full) and at task ends (hollow), with the chance level."""
    panels: dict[str, Lines] = {}
    for regime, spoken in SPOKEN.items():
        panels[f"{spoken}, in %"] = {
            method: [over_seeds(mine, regime, name) for name in ("avg_fin", "avg_ts")]
            for method, mine in by_method(runs).items()
        }
    chance = [over_seeds(runs, "chance", regime, "avg_fin") for regime in REGIMES]
    return _dots(panels, ("@Fin", "@TS"), _heights(chance)[0], _looks(runs))


def forgetting(runs: Runs) -> Figure | None:
    """How far accuracy fell from its best: of one method task by task, of several on average."""
    grouped, tasks = by_method(runs), task_names(runs)[:-1]
    if not tasks:
        return None
    looks = _looks(runs)
    lines: Lines = {
        method: [over_seeds(mine, regime, "forgetting") for regime in REGIMES]
        for method, mine in grouped.items()
    }
    if len(grouped) == 1:
        looks = dict.fromkeys(tasks, *looks.values())
        lines = {
            name: [over_seeds(runs, regime, "forgetting_by_task", task) for regime in REGIMES]
            for task, name in enumerate(tasks)
        }
    title = "Forgetting in points (less is better)"
    return _dots({title: lines}, list(SPOKEN.values()), [0.0], looks)


def novelty(runs: Runs) -> Figure | None:
    """How well each method tells unseen from seen classes; 0.5 is a coin."""
    shown = {"entropy": "entropy", "unknown_class": "odds of an unknown class"}
    lines: Lines = {
        method: [over_seeds(mine, "novelty", name) for name in shown]
        for method, mine in by_method([run for run in runs if run["novelty"]]).items()
    }
    spoken = [*shown.values()]
    panels = {"Seen against unseen classes, AUROC": lines}
    return _dots(panels, spoken, [0.5], _looks(runs)) if lines else None


def accuracy_matrix(runs: Runs) -> Figure:
    """Accuracy of every task at the end of every task: a map a method, the regimes apart."""
    grouped, names = by_method(runs), task_names(runs)
    alone, across = len(grouped) == 1, min(len(grouped), ACROSS)
    down, small = -(-len(grouped) // across), len(names) > 6 or across > 2
    tall = 0.9 + (0.24 if small else 0.36) * len(names)
    figure = Figure(figsize=(5.4, tall) if alone else (max(5.4, 1.9 * across), 2 * tall * down))
    parts: Any = figure.subfigures(1, 2) if alone else figure.subfigures(2, 1)
    for part, regime in zip(parts, REGIMES, strict=True):
        part.suptitle(SPOKEN[regime], x=0.01, ha="left", fontsize=10, fontweight="bold")
        part.supxlabel("tested task", fontsize=8)
        part.supylabel("after task", fontsize=8)
        panels = part.subplots(down, across, squeeze=False).flatten()
        for axes, (method, mine) in zip(panels, grouped.items(), strict=False):
            tables = np.array([run[regime]["matrix"] for run in mine], dtype=float)
            axes.set_title("" if alone else method, fontsize=8)
            _draw_matrix(axes, tables.mean(axis=0), names, small)
        for axes in panels[len(grouped) :]:
            axes.set_axis_off()
    return figure


def _draw_matrix(axes: Axes, values: Any, names: Names, small: bool) -> None:
    """A heat map with its numbers written in; what was not evaluated stays empty."""
    axes.imshow(values, vmin=0, vmax=100, cmap="cividis", aspect="auto")
    text: Any = {"ha": "center", "va": "center", "fontsize": 6 if small else 9, "in_layout": False}
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value) and len(names) <= 12:
            ink = "white" if value < 55 else "black"
            axes.text(column, row, f"{value:.0f}", color=ink, **text)
    ticks, said = range(len(names)), list(map(style.short, names))
    if small:
        said = [str(place + 1) for place in ticks]
    wide = max(map(len, said)) > 4
    axes.set_xticks(ticks, said, rotation=35 if wide else 0, ha="right" if wide else "center")
    axes.set_yticks(ticks, said)
    axes.tick_params(labelsize=6 if small else 9, length=2)
    axes.grid(visible=False)


def reliability(runs: Runs) -> Figure | None:
    """Accuracy against confidence, one curve a method; of a single one also where images are."""
    found = by_method([run for run in runs if run["diagnostics"].get("reliability")])
    if not found:
        return None
    figure = Figure(figsize=(5.4, 3.6))
    for axes, regime in zip(figure.subplots(1, 2, sharey=True), REGIMES, strict=True):
        axes.plot([0, 1], [0, 1], **style.DOTTED)
        for method, mine in found.items():
            bins = [run["diagnostics"]["reliability"][regime] for run in mine]
            look, dashes = _looks(runs)[method], style.REGIME_LINES[regime]
            line = {"label": method, "linestyle": dashes, **look}
            _draw_reliability(axes, bins, len(found) == 1, **line)
        axes.set(title=SPOKEN[regime], xlabel="confidence", xlim=(0, 1), ylim=(0, 1))
    figure.axes[0].set_ylabel("fraction right")
    return style.legend_below(figure)


def _draw_reliability(axes: Axes, bins: Runs, shadow: bool, **look: Any) -> None:
    """One curve of the bins of several runs together; bins with next to no images are left out."""
    images = np.array([one["images"] for one in bins], dtype=float)
    total = images.sum(axis=0)
    parts, known = [[one[name] for one in bins] for name in BINNED], total >= ENOUGH
    means = [(np.array(part) * images).sum(axis=0)[known] / total[known] for part in parts]
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
    told = [name for name in UNCERTAINTIES if max(map(abs, histograms[name]["edges"])) > 1e-6]
    for axes, name in zip(figure.subplots(1, len(told), squeeze=False)[0], told, strict=True):
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
    style.by_round(axes)
    axes.legend()
    return figure


def communication(runs: Runs) -> Figure:
    """Bytes one run has sent so far, and where its seconds went."""
    figure = Figure(figsize=(5.4, 2.8))
    sent, clock = figure.subplots(1, 2)
    for way, line in (("up", style.BLUE), ("down", style.VERMILION)):
        total = np.cumsum(runs[0]["bytes_by_round"][way]) / 1e6
        sent.plot(np.arange(len(total)) + 1, total, color=line, label=way)
    sent.set(title="Communication", xlabel="round", ylabel="MB so far", ylim=(0, None))
    style.by_round(sent)
    sent.legend()
    within = ("round", "inner", "fold")
    parts = {one: time for one, time in runs[0]["seconds_by_part"].items() if one not in within}
    clock.barh(list(parts), list(parts.values()), color=style.GREEN)
    clock.set(title="Time", xlabel="seconds")
    return figure


def cost(runs: Runs) -> Figure:
    """Final class-agnostic accuracy against megabytes sent, and seconds if runs were alone."""
    figure, grouped = Figure(figsize=(5.4, 3.4)), by_method(runs)
    quiet = all(run.get("quiet") for run in runs)
    panels = figure.subplots(1, 1 + quiet, sharey=True, squeeze=False)[0]
    for method, look in _looks(runs).items():
        mine, look["linestyle"] = grouped[method], "none"
        height = np.array([run["class_agnostic"]["avg_fin"] for run in mine], dtype=float)
        spent = [((run["bytes_up"] + run["bytes_down"]) / 1e6, run["seconds"]) for run in mine]
        for axes, along in zip(panels, zip(*spent, strict=True), strict=False):
            axes.plot(along, height, label=method, alpha=0.8, **look)
    for axes, said in zip(panels, ("MB up and down", "seconds"), strict=False):
        axes.margins(x=0.08)
        axes.set(xlabel=said, xlim=(0, None))
    panels[0].set(title="What accuracy costs", ylabel="class-agnostic @Fin in %")
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
        for method, look in _looks(runs).items():
            mine = [by_method(points[one]).get(method, []) for one in values]
            heights, wide = _heights([over_seeds(some, regime, "avg_fin") for some in mine])
            line: Any = {"capsize": 3, "linestyle": style.REGIME_LINES[regime], **look}
            axes.errorbar(list(map(float, values)), heights, wide, label=method, **line)
        style.percent_axis(axes, f"{SPOKEN[regime]} @Fin", sweep.key)
    return style.legend_below(figure)
