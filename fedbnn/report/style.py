"""How all figures look: one palette that colour-blind readers can tell apart, thin grids, no state.

Figures are saved as PNG and PDF; in a page they stand as SVG whose ink follows the page's own text
colour, in light and dark.
"""

import io
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from fedbnn.machine import postponed
from fedbnn.storage.files import folder, write_atomic

LOOKS = {
    "fedbnn": ("#0072B2", "o"),
    "fedavg": ("#D55E00", "s"),
    "fedprox": ("#E69F00", "D"),
    "exact": ("#009E73", "P"),
    "scaffold": ("#CC79A7", "^"),
    "lwf": ("#56B4E9", "X"),
    "fedbnn_authors": ("#8C6BF0", "h"),
    "ewc": ("#B5446E", "v"),
    "fcil": ("#7F7F7F", "<"),
    "mas": ("#99A233", ">"),
    "fedbnn_paper": ("#3FC1B8", "p"),
    "joint": ("#A0642D", "*"),
    "local": ("#F0A3B4", "d"),
    "fedavg_plus": ("#F08A5D", "s"),
    "fedprox_plus": ("#B8860B", "D"),
    "fedbnn_paper_damped": ("#1F8A82", "p"),
}
"""The colour and the mark of each method, the same in all figures."""
OTHERS = [(colour, mark) for mark in ("H", "8", "$+$") for colour, _ in LOOKS.values()]
"""Those of other names, of which each has a usual one."""
BLUE, VERMILION, _, GREEN, PURPLE = [colour for colour, _ in LOOKS.values()][:5]
REGIME_LINES = {"task_aware": "-", "class_agnostic": "--"}
INK, FAINT = "#1b1f23", "#8b949e"
DOTTED: dict[str, Any] = {"color": FAINT, "linestyle": ":", "linewidth": 1.2}
_FILE = Path(__file__).with_name("house.mplstyle")
SHEET = mpl.rc_params_from_file(_FILE, use_default_template=False)


@contextmanager
def house() -> Iterator[None]:
    """Draw in the house style and leave matplotlib as it was; a missing letter is no warning.

    A figure is thousands of objects that hold each other, and none is garbage before it is saved.
    """
    with postponed(), mpl.rc_context(SHEET), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def short(name: str, most: int = 18) -> str:
    """The name, cut where it would crowd out the figure; of an import path the end says most."""
    name = name if len(name) <= most else name.rpartition(":")[2]
    return name if len(name) <= most else f"{name[: most - 1]}…"


def colours(count: int) -> list[str]:
    """A colour for each of so many tasks, from dark to light: bright ones are for methods."""
    return [to_hex(mpl.colormaps["cividis"](place / max(count - 1, 1))) for place in range(count)]


def looks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour and mark of each name: its own, or its usual one if nobody here has that colour.

    Else the next whose colour is free, or when all are taken the next look that is.
    """
    names = list(names)
    chosen = {name: LOOKS[name] for name in names if name in LOOKS}
    for name in names:
        first = crc32(name.encode()) % len(OTHERS)
        usual, taken = OTHERS[first:] + OTHERS[:first], {one for one, _ in chosen.values()}
        free = [look for look in usual if look[0] not in taken]
        free = free or [look for look in usual if look not in chosen.values()] or usual
        chosen.setdefault(name, free[0])
    return {name: {"color": chosen[name][0], "marker": chosen[name][1]} for name in names}


def percent_axis(axes: Axes, title: str, x_label: str = "") -> None:
    """A y axis in percent, up to a little above the highest value in it and those that share it."""
    together = axes.get_shared_y_axes().get_siblings(axes)
    highest = max((float(one.dataLim.y1) for one in together if one.has_data()), default=100.0)
    top = min(102.0, max(10.0, 1.15 * highest))
    axes.set(title=title, xlabel=x_label, ylabel="accuracy in %", ylim=(0, top))


def by_round(axes: Axes) -> None:
    """Rounds along: they are whole numbers."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def legend_below(figure: Figure) -> Figure:
    """The figure with the legend of its first axes under all of it, where it covers nothing."""
    named = figure.axes[0].get_legend_handles_labels()
    figure.legend(*named, loc="outside lower center", ncols=4, fontsize=8)
    return figure


def settled(figure: Figure) -> Figure:
    """The figure, laid out once for all formats; one that has an engine is drawn twice a save."""
    ConstrainedLayoutEngine().execute(figure)
    return figure


def save(figures: Mapping[str, Figure], directory: Path) -> list[Path]:
    """Write each figure as `directory/name.png` and .pdf; the pictures in the same order."""
    paths = {directory / f"{name}.png": figure for name, figure in figures.items()}
    if paths:
        folder(directory)
    for path, figure in paths.items():
        write_atomic(path, _drawn(figure, format="png", dpi=150, facecolor="white"))
        page = _drawn(figure, format="pdf", metadata={"CreationDate": None})
        write_atomic(path.with_suffix(".pdf"), page)
    return list(paths)


def _drawn(figure: Figure, **how: Any) -> bytes:
    """The bytes of a file with this figure."""
    written = io.BytesIO()
    with house():
        figure.savefig(written, **how)
    return written.getvalue()


def inline_svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element for a page, with a name for people who do not see it."""
    written = io.StringIO()
    with house():
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    text = written.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    parts = r"figure|axes|patch|line2d|text|matplotlib\.axis|xtick|ytick|legend"
    text = re.sub(rf'\bid="({parts})[^"]*"', "", text)
    text = re.sub(r' (width|height)="[0-9.]+pt"', "", text, count=2).replace(INK, "currentColor")
    return text.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)
