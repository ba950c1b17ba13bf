"""Figures say what the numbers say, for complete, unfinished and odd runs."""

import gc
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from functools import cache

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from fedbnn.evaluation.results import Facts, diagnostics, results
from fedbnn.methods import METHODS
from fedbnn.report import figures, schedule, style
from fedbnn.report.values import Varied

RUN = [
    "focus_on_now",
    "accuracy_matrix",
    "forgetting",
    "surprise",
    "training",
    "reliability",
    "uncertainty",
    "posterior_scale",
    "communication",
]
GRID = [
    "focus_on_now",
    "averages",
    "novelty",
    "cost",
    "accuracy_matrix",
    "forgetting",
    "surprise",
    "training",
    "reliability",
]


@cache
def _alone(name: str, runs: str) -> Figure | None:
    """One figure of these runs."""
    with style.house():
        figure = getattr(figures, name)(json.loads(runs))
        return style.settled(figure) if figure else None


def alone(name: str, runs: list, lines: list | None = None) -> Figure | None:
    """One figure of these runs, where the others are of no interest; None where it is left out."""
    told = diagnostics(lines or [])
    return _alone(name, json.dumps([{**run, "diagnostics": told} for run in runs]))


@cache
def _drawn(runs: str) -> dict[str, Figure]:
    """The figures of these runs, as they are kept in files; nobody draws on them again."""
    return figures.every(json.loads(runs))


def of_run(run: dict, lines: list | None = None) -> dict[str, Figure]:
    """The figures of one run, whose diagnostics are made of these lines."""
    return _drawn(json.dumps([{**run, "diagnostics": diagnostics(lines) if lines else {}}]))


def of_grid(grid: list, lines: list | None = None) -> dict[str, Figure]:
    """The figures of several runs."""
    return _drawn(json.dumps([{**run, "diagnostics": diagnostics(lines or [])} for run in grid]))


def test_a_run_has_all_its_figures_as_pictures_and_for_print(run, lines, tmp_path) -> None:
    drawn = of_run(run, lines)
    assert list(drawn) == RUN
    for path in style.save(drawn, tmp_path / "figures"):
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")


def test_the_curve_leaves_out_rounds_that_were_not_evaluated(run, lines) -> None:
    for axes, regime in zip(of_run(run, lines)["focus_on_now"].axes[:2], run["fon"], strict=True):
        curve, values = axes.lines[0], run["fon"][regime]
        assert list(curve.get_xdata()) == [1, 2, *range(4, 13)]
        assert list(curve.get_ydata()) == [value for value in values if value is not None]


def test_the_schedule_fills_every_round_with_the_shares_of_its_tasks() -> None:
    shares = [[1.0, 0.0], [0.75, 0.25], [0.0, 1.0]]
    axes = schedule.schedule(shares, ["a", "b"]).axes[0]
    areas = [area.get_data() for area in axes.patches]
    assert np.array([area.values - area.baseline for area in areas]).T.tolist() == shares
    assert all(area.edges.tolist() == [0.5, 1.5, 2.5, 3.5] for area in areas)
    assert {text.get_text() for text in axes.texts} == {"a", "b"}


@pytest.mark.parametrize("tasks", [1, 7, pytest.param(30, marks=pytest.mark.slow)])
def test_the_schedule_shows_every_task_in_its_own_colour_and_by_its_name(tasks, tmp_path) -> None:
    names = [f"the classes of task {number}" for number in range(tasks)]
    figure = schedule.schedule(np.eye(tasks).repeat(4, axis=0).tolist(), names, "one after another")
    [path] = style.save({"schedule": figure}, tmp_path / "deep")
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    shown, counts = np.unique(pixels, axis=0, return_counts=True)
    large = {tuple(colour) for colour, count in zip(shown, counts, strict=True) if count > 4000}
    assert len(large - {(255, 255, 255), (0x1B, 0x1F, 0x23)}) == tasks
    texts = figure.axes[0].texts + (figure.legends[0].get_texts() if figure.legends else [])
    assert [text.get_text() for text in texts] == names


def test_the_matrix_shows_its_numbers_and_leaves_the_future_empty(run, lines) -> None:
    left, right = (part.axes[0] for part in of_run(run, lines)["accuracy_matrix"].subfigs)
    assert len(left.texts) == 6
    assert right.texts[0].get_text() == f"{run['class_agnostic']['matrix'][0][0]:.0f}"


def test_a_point_run_has_no_posterior_and_a_finished_stream_no_unseen_classes(lines, facts) -> None:
    bare = [{**line, "posterior": None, "novelty": None, "diagnostics": None} for line in lines]
    run = results(bare, facts)
    for name in ("posterior_scale", "uncertainty", "reliability"):
        assert alone(name, [run], bare) is None


def test_a_bin_of_a_few_images_is_no_point_of_the_reliability_curve(run, lines) -> None:
    """The bins hold 0, 3, 6, ... images: the first two say nothing."""
    axes = of_run(run, lines)["reliability"].axes[0]
    confidence = [(place + 0.5) / 15 for place in range(2, 15)]
    assert np.allclose(axes.lines[1].get_xdata(), confidence)
    assert np.allclose(axes.lines[1].get_ydata(), [0.9 * value for value in confidence])


def test_an_unfinished_run_and_a_single_task_can_be_drawn(lines, facts, tmp_path) -> None:
    early = results(lines[:2], facts)
    alone = [{**line, "tasks": line["tasks"][:1], "shares": [1.0]} for line in lines]
    single = results(alone, Facts("fedavg", "one", 0, 12, ("only",), (12,)))
    for part, run in (("early", early), ("single", single)):
        drawn = of_run(run)
        assert len(style.save(drawn, tmp_path / part)) == len(drawn)
    assert "forgetting" not in of_run(single)


def test_bands_are_one_standard_deviation_over_the_seeds(grid) -> None:
    figure = of_grid(grid)["focus_on_now"]
    curves = np.array([run["fon"]["task_aware"] for run in grid[:3]], dtype=float)
    known = np.isfinite(curves).all(axis=0)
    line, band = figure.axes[0].lines[0], figure.axes[0].collections[0]
    assert np.allclose(line.get_ydata(), curves[:, known].mean(axis=0))
    heights = band.get_paths()[0].vertices[:, 1]
    assert math.isclose(
        heights.max(), (curves.mean(axis=0) + curves.std(axis=0, ddof=1))[known].max()
    )


def test_a_comparison_has_all_its_figures(grid, lines, tmp_path) -> None:
    drawn = of_grid(grid, lines)
    assert list(drawn) == GRID
    assert len(style.save(drawn, tmp_path)) == len(GRID)


def test_bands_of_many_methods_leave_each_other_visible() -> None:
    """Where all of them lie on each other, half of what is below shows through at least."""
    curves, seen = [[1.0, 2.0], [3.0, 4.0]], {}
    for many in (2, 4, 10):
        axes = Figure().subplots()
        named = {f"method {place}": curves for place in range(many)}
        figures._draw_curves(axes, named, style.looks(named))
        bands = [band.get_alpha() for band in axes.collections]
        seen[many] = math.prod(1 - alpha for alpha in bands)
        assert len(bands) == many
    assert seen[2] == pytest.approx(0.82**2)
    assert min(seen.values()) > 0.45


def test_one_seed_has_no_band_and_a_sweep_has_a_point_per_value(grid) -> None:
    single = [grid[0], grid[3]]
    figure = alone("focus_on_now", single)
    assert not figure.axes[0].collections
    varied = Varied("clients a round", ["20"] * len(grid) + ["10"] * len(single))
    drawn = figures.every([*grid, *single], varied)
    assert list(drawn) == ["sweep", "focus_on_now"]
    line = drawn["sweep"].axes[0].lines[0]
    assert list(line.get_xdata()) == [10.0, 20.0]
    finals = [run["task_aware"]["avg_fin"] for run in grid[:3]]
    assert list(line.get_ydata()) == pytest.approx([finals[0], sum(finals) / 3])


def test_a_sweep_over_words_has_no_axis_to_stand_on(grid) -> None:
    assert list(figures.every(grid[:2], Varied("share", ["a", "b"]))) == ["focus_on_now"]


def dots(axes: Axes) -> dict[str, list[float]]:
    """The full and the hollow mark on the line of each name."""
    names = [label.get_text() for label in axes.figure.axes[0].get_yticklabels()]
    marks = [line for line in axes.lines if line.get_marker() not in ("None", "|", "none", None)]
    places = {name: [] for name in names}
    for mark in marks:
        places[names[int(mark.get_ydata()[0])]].append(float(mark.get_xdata()[0]))
    return places


def test_one_method_forgets_task_by_task_and_several_on_average(grid, run) -> None:
    def shown(runs: list) -> dict[str, list[float]]:
        return dots(alone("forgetting", runs).axes[0])

    both = [run[regime]["forgetting_by_task"][:2] for regime in ("task_aware", "class_agnostic")]
    assert shown([run]) == {
        name: pytest.approx([aware, agnostic])
        for name, aware, agnostic in zip(("one", "two"), *both, strict=True)
    }
    seeds = [one["task_aware"]["forgetting_by_task"][0] for one in grid[:3]]
    assert shown(grid[:3])["one"][0] == pytest.approx(sum(seeds) / 3)
    means = [one["task_aware"]["forgetting"] for one in grid]
    assert shown(grid)["fedavg"][0] == pytest.approx(sum(means[3:6]) / 3)


def test_averages_show_the_end_full_and_the_task_ends_hollow_above_chance(grid) -> None:
    left, right = of_grid(grid)["averages"].axes
    mine = [run["class_agnostic"] for run in grid if run["method"] == "fedavg"]
    expected = [sum(part[name] for part in mine) / 3 for name in ("avg_fin", "avg_ts")]
    assert dots(right)["fedavg"] == pytest.approx(expected)
    assert left.lines[0].get_xdata()[0] == pytest.approx(50.0)


TWELVE = "fedbnn fedavg fedprox scaffold ewc mas lwf fcil joint local fedbnn_paper fedbnn_authors"


def test_twelve_methods_have_twelve_colours_and_marks_and_keep_them_everywhere(grid) -> None:
    looks = style.looks(TWELVE.split())
    assert len({look["color"] for look in looks.values()}) == 12
    assert len({look["marker"] for look in looks.values()}) == 12
    assert style.looks(["mas", "mine", "fedbnn"])["mas"] == looks["mas"]
    mine = style.looks(["mas", "mine", "fedbnn"])["mine"]
    assert mine not in (looks["mas"], looks["fedbnn"])
    both = [grid[3], {**grid[0], "method": "mine"}]
    colours = {
        name: {line.get_color() for line in alone(name, both).axes[0].lines}
        for name in ("focus_on_now", "cost")
    }
    own = {style.looks(["fedavg", "mine"])[name]["color"] for name in ("fedavg", "mine")}
    assert colours == {"focus_on_now": own, "cost": own}


def test_every_method_has_a_look_of_its_own_and_other_names_are_told_apart() -> None:
    assert style.LOOKS.keys() == METHODS.keys()
    assert len(set(style.LOOKS.values())) == len(METHODS)
    many = style.looks([*METHODS, *(f"mine {number}" for number in range(30))]).values()
    assert len({(look["color"], look["marker"]) for look in many}) == len(many)


def test_a_method_of_ones_own_has_a_colour_that_nobody_has() -> None:
    for name in ("mypkg.methods:MyMethod", "other:Mine", "fedsgd"):
        found = style.looks([name, *METHODS][:12])
        assert len({look["color"] for look in found.values()}) == len(found)
    assert style.short("mypkg.methods:MyMethod") == "MyMethod"


@pytest.mark.parametrize("name", ["posterior_scale", "communication"])
def test_rounds_are_whole_numbers_along_an_axis(run, lines, name: str) -> None:
    axes = of_run(run, lines)[name].axes[0]
    axes.set_xlim(1, 2)
    assert [tick for tick in axes.get_xticks() if tick % 1] == []


def test_no_mark_stands_on_the_edge_of_what_is_shown(grid, lines) -> None:
    axes = of_grid(grid, lines)["cost"].axes[0]
    assert max(line.get_xdata().max() for line in axes.lines) < 0.98 * axes.get_xlim()[1]


def test_a_method_keeps_its_look_in_a_figure_that_leaves_others_out(grid) -> None:
    names = [f"mine {number}" for number in range(40)]
    runs = [{**grid[0], "method": name} for name in names]
    runs[:-1] = [{**run, "novelty": None, "train": []} for run in runs[:-1]]
    [curve] = figures.training(runs).axes[0].lines
    _, dots_joined, *_ = figures.novelty(runs).axes[0].lines
    look = style.looks(names)[names[-1]]
    assert curve.get_color() == dots_joined.get_color() == look["color"]
    assert curve.get_marker() == look["marker"]


def test_training_shows_the_loss_of_all_and_the_kl_of_those_who_have_one(grid) -> None:
    loss, kl = of_grid(grid)["training"].axes
    assert [line.get_label() for line in loss.lines] == ["fedbnn", "fedavg", "fcil"]
    assert [line.get_label() for line in kl.lines] == ["fedbnn"]
    assert list(kl.lines[0].get_ydata()) == pytest.approx([0.01 * n for n in range(1, 13)])
    assert alone("training", [{**run, "train": []} for run in grid]) is None


def test_seconds_are_drawn_only_where_every_run_had_the_machine_for_itself(grid) -> None:
    assert len(of_grid(grid)["cost"].axes) == 2
    assert len(alone("cost", [*grid[1:], {**grid[0], "quiet": False}]).axes) == 1


def test_a_point_model_has_no_panel_of_disagreement(run, lines) -> None:
    assert len(of_run(run, lines)["uncertainty"].axes) == 3
    for line in lines:
        if line["diagnostics"]:
            bins = line["diagnostics"]["uncertainty"]["mutual_information"]
            line["diagnostics"]["uncertainty"]["mutual_information"] = {**bins, "edges": [0.0] * 31}
    assert len(alone("uncertainty", [run], lines).axes) == 2


def test_drift_is_drawn_where_the_next_task_shows(run, lines, grid) -> None:
    """A line by round for every method, highest in the round before a task begins."""
    drawn = of_run(run, lines)["surprise"].axes[0]
    (curve,) = drawn.get_lines()
    heights = dict(zip(*curve.get_data(), strict=True))
    assert {number for number, height in heights.items() if height > 0.5} == {4, 8}
    methods = {one["method"] for one in grid}
    assert len(of_grid(grid)["surprise"].axes[0].get_lines()) == len(methods)
    without = [{**one, "surprise": [None] * len(one["surprise"])} for one in grid]
    assert alone("surprise", without) is None


def test_every_method_may_have_a_number_that_is_missing(grid) -> None:
    odd = [{**run, "class_agnostic": {**run["class_agnostic"], "avg_ts": None}} for run in grid]
    assert math.isnan(dots(alone("averages", odd).axes[1])["fedavg"][1])


def test_the_matrices_of_ten_methods_fit_a_page(grid) -> None:
    ten = [{**grid[0], "method": name} for name in TWELVE.split()[:10]]
    figure = alone("accuracy_matrix", ten)
    assert figure.get_size_inches()[0] <= 10
    assert figure.get_size_inches()[1] <= 14
    shown = [axes for part in figure.subfigs for axes in part.axes]
    assert len(shown) == 20
    assert all(len(axes.texts) == 6 for axes in shown)


def test_a_figure_is_drawn_once_for_each_format(monkeypatch, run, lines, tmp_path) -> None:
    drawn, draw = [], Figure.draw
    monkeypatch.setattr(Figure, "draw", lambda *both: (drawn.append(gc.isenabled()), draw(*both)))
    figure = of_run(run, lines)["communication"]
    style.inline_svg(figure, "x")
    style.save({"x": figure}, tmp_path)
    assert drawn == [False] * 3
    assert gc.isenabled()


def test_drawing_leaves_matplotlib_as_it_was(run, lines) -> None:
    before = dict(mpl.rcParams)
    style.inline_svg(of_run(run, lines)["communication"], "x")
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "a $\\frac{1}$ b", "名前", "x" * 300]
)
def test_any_task_name_can_be_drawn_and_is_text(run, name) -> None:
    odd = {**run, "task_names": [name, "two", "three"]}
    for kind in ("forgetting", "focus_on_now", "accuracy_matrix"):
        text = style.inline_svg(alone(kind, [odd]), kind)
        assert "<script" not in text
        assert name[:5] in "".join(ElementTree.fromstring(text).itertext())


def test_an_inline_figure_takes_the_colour_of_the_page_and_needs_no_file(run, lines) -> None:
    for name, figure in of_run(run, lines).items():
        text = style.inline_svg(figure, name)
        assert "currentColor" in text
        assert style.INK not in text
        assert not [
            link
            for link in re.findall(r'href="([^"]*)"', text)
            if not link.startswith(("#", "data:image/png"))
        ]


def test_a_percent_axis_ends_above_everything_that_shares_it() -> None:
    left, right = Figure().subplots(1, 2, sharey=True)
    for axes, highest in ((left, 40.0), (right, 20.0)):
        axes.bar([0], [highest])
        style.percent_axis(axes, "")
    assert left.get_ylim() == right.get_ylim() == (0, pytest.approx(46))
    full = Figure().subplots()
    full.plot([1, 2], [100, 99])
    style.percent_axis(full, "")
    assert full.get_ylim() == (0, 102)
