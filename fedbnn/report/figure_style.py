"""How all figures look: one palette that colour-blind readers can tell apart, thin grids, no state between figures.

Figures are saved as PNG; in a page they stand as SVG whose ink follows the page's own text colour, in light and dark.
"""

import io
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#7F7F7F",
)
PALETTE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY)
MARKERS = "osD^vPX"
LINES = ("-", "--", "-.", ":")
REGIME_COLOURS = {"task_aware": BLUE, "class_agnostic": VERMILION}
INK, FAINT = "#1b1f23", "#8b949e"

STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.5,
    "grid.color": FAINT,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "fedbnn",
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    ),
}


@contextmanager
def style() -> Iterator[None]:
    """Draw in the house style, and leave matplotlib as it was; a letter that the font lacks is not worth a warning."""
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def short(name: str, most: int = 18) -> str:
    """The name, cut where it would crowd out the figure."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def canvas(width: float, height: float) -> Figure:
    """An empty figure whose parts make room for each other."""
    return Figure(figsize=(width, height), layout="constrained")


def colour(place: int) -> str:
    """The colour of the n-th thing."""
    return PALETTE[place % len(PALETTE)]


def line_style(place: int) -> dict[str, Any]:
    """Colour and dashes of the n-th line: beyond the palette, lines still differ."""
    return {"color": colour(place), "linestyle": LINES[(place // len(PALETTE)) % len(LINES)]}


def percent_axis(axes: Axes, title: str, x_label: str = "") -> None:
    """A y axis in percent, from 0 to a little above the highest value in it and in those that share it."""
    together = axes.get_shared_y_axes().get_siblings(axes)
    highest = max((float(one.dataLim.y1) for one in together if one.has_data()), default=100.0)
    axes.set(
        title=title,
        xlabel=x_label,
        ylabel="accuracy in %",
        ylim=(0, min(102.0, max(10.0, 1.15 * highest))),
    )


def legend_below(figure: Figure, axes: Axes) -> None:
    """The legend of these axes under the whole figure, where it covers nothing."""
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8
    )


def settled(drawn: Mapping[str, Figure | None]) -> dict[str, Figure]:
    """The figures there are, each laid out once for all formats."""
    found = {name: figure for name, figure in drawn.items() if figure is not None}
    for figure in found.values():
        engine = figure.get_layout_engine()
        if engine is not None:
            engine.execute(figure)
        figure.set_layout_engine("none")
    return found


def save(figures: Mapping[str, Figure], directory: Path) -> list[Path]:
    """Write each figure as `directory/name.png`; the paths in the same order."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{name}.png" for name in figures]
    with style():
        for path, figure in zip(paths, figures.values(), strict=True):
            figure.savefig(path, dpi=150, facecolor="white")
    return paths


def inline_svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element for a page, with a name for people who do not see it."""
    written = io.StringIO()
    with style():
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    text = written.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(
        r'\bid="(figure|axes|patch|line2d|text|matplotlib\.axis|xtick|ytick|legend)[^"]*"', "", text
    )
    text = re.sub(r' (width|height)="[0-9.]+pt"', "", text, count=2).replace(INK, "currentColor")
    return text.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)
