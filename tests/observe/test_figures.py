"""Figures say what the numbers say, for complete, unfinished and odd runs."""

import math
import re
import xml.etree.ElementTree as ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from fedbnn.evaluation import diagnostics
from fedbnn.evaluation.results import Facts, results
from fedbnn.report import comparison_figures, figure_style, figures

RUN = [
    "focus_on_now",
    "accuracy_matrix",
    "forgetting",
    "reliability",
    "uncertainty",
    "posterior_scale",
    "communication",
]
GRID = [
    "focus_on_now",
    "averages",
    "accuracy_matrix",
    "forgetting",
    "reliability",
    "novelty",
    "cost",
]


def test_a_run_has_all_its_figures_and_they_are_png(run, lines, tmp_path) -> None:
    drawn = figures.of_run(run, diagnostics.last(lines))
    assert list(drawn) == RUN
    for path in figure_style.save(drawn, tmp_path / "figures"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_curve_leaves_out_rounds_that_were_not_evaluated(run, lines) -> None:
    curve = figures.of_run(run, diagnostics.last(lines))["focus_on_now"].axes[0].lines[0]
    assert list(curve.get_xdata()) == [1, 2, *range(4, 13)]
    assert list(curve.get_ydata()) == [
        value for value in run["fon"]["task_aware"] if value is not None
    ]


def test_the_schedule_fills_every_round_with_the_shares_of_its_tasks() -> None:
    shares = [[1.0, 0.0], [0.75, 0.25], [0.0, 1.0]]
    axes = figures.schedule(shares, ["a", "b"]).axes[0]
    heights = np.array([bar.get_height() for bar in axes.patches]).reshape(2, 3).T
    assert heights.tolist() == shares
    assert {text.get_text() for text in axes.texts} == {"a", "b"}


def test_the_matrix_shows_its_numbers_and_leaves_the_future_empty(run, lines) -> None:
    left, right = figures.of_run(run, diagnostics.last(lines))["accuracy_matrix"].axes
    assert len(left.texts) == 6
    assert right.texts[0].get_text() == f"{run['class_agnostic']['matrix'][0][0]:.0f}"


def test_a_point_run_has_no_posterior_and_a_finished_stream_no_unseen_classes(lines, facts) -> None:
    bare = [{**line, "posterior": None, "novelty": None, "diagnostics": None} for line in lines]
    drawn = figures.of_run(results(bare, facts), diagnostics.last(bare))
    assert not {"posterior_scale", "uncertainty", "reliability"} & set(drawn)


def test_an_unfinished_run_and_a_single_task_can_be_drawn(lines, facts, tmp_path) -> None:
    early = results(lines[:2], facts)
    alone = [{**line, "tasks": line["tasks"][:1], "shares": [1.0]} for line in lines]
    single = results(alone, Facts("fedavg", "one", 0, 12, ("only",), (12,)))
    for part, run in (("early", early), ("single", single)):
        drawn = figures.of_run(run, {})
        assert len(figure_style.save(drawn, tmp_path / part)) == len(drawn)
    assert "forgetting" not in figures.of_run(single, {})


def test_bands_are_one_standard_deviation_over_the_seeds(grid) -> None:
    figure = comparison_figures.of_comparison(grid, [{}] * len(grid))["focus_on_now"]
    curves = np.array([run["fon"]["task_aware"] for run in grid[:3]], dtype=float)
    known = np.isfinite(curves).all(axis=0)
    line, band = figure.axes[0].lines[0], figure.axes[0].collections[0]
    assert np.allclose(line.get_ydata(), curves[:, known].mean(axis=0))
    heights = band.get_paths()[0].vertices[:, 1]
    assert math.isclose(
        heights.max(), (curves.mean(axis=0) + curves.std(axis=0, ddof=1))[known].max()
    )


def test_a_comparison_has_all_its_figures(grid, lines, tmp_path) -> None:
    drawn = comparison_figures.of_comparison(grid, [diagnostics.last(lines)] * len(grid))
    assert list(drawn) == GRID
    assert len(figure_style.save(drawn, tmp_path)) == len(GRID)


def test_one_seed_has_no_band_and_a_sweep_has_a_point_per_value(grid) -> None:
    single = [grid[0], grid[3]]
    figure = comparison_figures.of_comparison(single, [{}, {}])["focus_on_now"]
    assert not figure.axes[0].collections
    swept = comparison_figures.sweep("clients a round", {20.0: grid, 10.0: single})
    assert list(swept.axes[0].lines[0].get_xdata()) == [10.0, 20.0]


def test_drawing_leaves_matplotlib_as_it_was(run, lines) -> None:
    before = dict(mpl.rcParams)
    figure_style.inline_svg(figures.of_run(run, diagnostics.last(lines))["communication"], "x")
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "a $\\frac{1}$ b", "名前", "x" * 300]
)
def test_any_task_name_can_be_drawn_and_is_text(run, name) -> None:
    odd = {**run, "task_names": [name, "two", "three"]}
    for kind in ("forgetting", "focus_on_now", "accuracy_matrix"):
        text = figure_style.inline_svg(figures.of_run(odd, {})[kind], kind)
        assert "<script" not in text
        assert name[:5] in "".join(ElementTree.fromstring(text).itertext())


def test_an_inline_figure_takes_the_colour_of_the_page_and_needs_no_file(run, lines) -> None:
    for name, figure in figures.of_run(run, diagnostics.last(lines)).items():
        text = figure_style.inline_svg(figure, name)
        assert "currentColor" in text
        assert figure_style.INK not in text
        assert not [
            link
            for link in re.findall(r'href="([^"]*)"', text)
            if not link.startswith(("#", "data:image/png"))
        ]


def test_a_percent_axis_ends_above_everything_that_shares_it() -> None:
    left, right = Figure().subplots(1, 2, sharey=True)
    for axes, highest in ((left, 40.0), (right, 20.0)):
        axes.bar([0], [highest])
        figure_style.percent_axis(axes, "")
    assert left.get_ylim() == right.get_ylim() == (0, pytest.approx(46))
    full = Figure().subplots()
    full.plot([1, 2], [100, 99])
    figure_style.percent_axis(full, "")
    assert full.get_ylim() == (0, 102)
