"""Draws the pictures of the documentation, from the code they are about: `python docs/pictures.py`.

They go to docs/pictures; the test suite draws them again and compares.
"""

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from datamodules.scenarios import consecutive, dirichlet, gradual  # noqa: E402
from fedbnn import Gaussian  # noqa: E402
from fedbnn.report import style  # noqa: E402
from fedbnn.report.schedule import draw_schedule  # noqa: E402

CLIENTS = 100
BOXES = {
    "stream": ((0.09, 0.75), "who takes part,\nwith which images"),
    "client": ((0.36, 0.75), "trains from the\nprior it was sent"),
    "gate": ((0.64, 0.75), "refuses what no\nhonest client sends"),
    "aggregation": ((0.91, 0.75), "multiplies\nthe factors"),
    "evaluation": ((0.91, 0.22), "metrics, report,\ntracking"),
    "ledger": ((0.64, 0.22), "commits the\nround to disk"),
    "prior": ((0.36, 0.22), "of the next round:\nthe new posterior"),
}
ARROWS = [
    ("stream", "client", "images"),
    ("client", "gate", r"factor $q_k / q_0$"),
    ("gate", "aggregation", ""),
    ("aggregation", "evaluation", ""),
    ("aggregation", "ledger", ""),
    ("ledger", "prior", ""),
    ("prior", "client", r"prior $q_0$"),
]
WIDE, TALL = 0.17, 0.36


def round_picture() -> Figure:
    """One round, from the stream to the prior of the next."""
    figure = Figure(figsize=(8, 3.2))
    axes = figure.subplots()
    for name, (place, said) in BOXES.items():
        _box(axes, place, name, said)
    for start, end, said in ARROWS:
        _arrow(axes, start, end, said)
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.set_axis_off()
    return figure


def _box(axes: Axes, place: tuple[float, float], name: str, said: str) -> None:
    """A name, and below it what happens there."""
    corner = place[0] - WIDE / 2, place[1] - TALL / 2
    fill = style.BLUE if name in ("aggregation", "client", "prior") else style.FAINT
    look = {"boxstyle": "round,pad=0.005", "edgecolor": fill, "facecolor": f"{fill}22"}
    axes.add_patch(FancyBboxPatch(corner, WIDE, TALL, **look))
    axes.text(place[0], place[1] + 0.08, name, ha="center", va="center", fontweight="bold")
    axes.text(place[0], place[1] - 0.06, said, ha="center", va="center", fontsize=7.5)


def _arrow(axes: Axes, start: str, end: str, said: str) -> None:
    """From the edge of one box to the edge of another, with a word beside it."""
    (x, y), (to_x, to_y) = BOXES[start][0], BOXES[end][0]
    level, upright = y == to_y, x == to_x
    across = 0 if upright else np.sign(to_x - x) * (WIDE / 2 + 0.01)
    up = 0 if level else np.sign(to_y - y) * (TALL / 2 + 0.02)
    begin, finish = (x + across, y + up), (to_x - across, to_y - up)
    look = {"arrowstyle": "-|>", "mutation_scale": 11, "color": style.INK, "linewidth": 1}
    axes.add_patch(FancyArrowPatch(begin, finish, **look))
    where = (begin[0] + finish[0]) / 2, (begin[1] + finish[1]) / 2
    shift = (0, 0.04) if level else (0.012, 0)
    beside = {"ha": "center" if level else "left", "va": "bottom" if level else "center"}
    spot = where[0] + shift[0], where[1] + shift[1]
    axes.text(*spot, said, fontsize=7.5, parse_math=True, **beside)


def aggregation_picture() -> Figure:
    """One weight: two clients, their product with the prior, and the mean of their means."""
    figure = Figure(figsize=(6.4, 3))
    axes, along = figure.subplots(), torch.linspace(-3, 3, 150, dtype=torch.float64)
    moments = {"prior": (0.0, 1.0), "client 1, many images": (1.0, 0.3)}
    moments |= {"client 2, few images": (-1.0, 0.8)}
    made = {name: Gaussian.from_moments(*map(torch.tensor, two)) for name, two in moments.items()}
    prior, *clients = made.values()
    product = prior
    for client in clients:
        product = product * (client / prior)
    made["their product: the next prior"] = product
    colours = style.FAINT, style.VERMILION, style.GREEN, style.BLUE
    for (name, one), colour in zip(made.items(), colours, strict=True):
        height = torch.exp(-((along - one.loc) ** 2) * one.precision / 2) / one.scale
        height = height / (2 * torch.pi) ** 0.5
        axes.plot(along, height, color=colour, label=name)
        axes.fill_between(along, height, color=colour, alpha=0.12, linewidth=0)
    mean = sum(float(client.loc) for client in clients) / len(clients)
    axes.axvline(mean, label="mean of the clients: FedAvg", **style.DOTTED)
    axes.set(xlabel="value of one weight", ylabel="density", yticks=[], ylim=(0, None))
    axes.legend(fontsize=8, loc="upper left")
    return figure


def streams_picture() -> Figure:
    """The three schedules that a stream can have."""
    ends = (25, 50, 75, 100)
    shown = {
        "separate: all clients change together": consecutive(ends),
        "staggered: each client with a delay of its own": consecutive(ends, stagger=10),
        "gradual: tasks overlap, clients change one by one": gradual(
            [(0, 30), (20, 55), (45, 80), (70, 100)]
        ),
    }
    figure = Figure(figsize=(6.4, 5))
    panels = figure.subplots(3, 1, sharex=True)
    for axes, (title, schedule) in zip(panels, shown.items(), strict=True):
        rounds = range(1, schedule.rounds + 1)
        shares = [np.array(schedule.clients_on(number, CLIENTS)) / CLIENTS for number in rounds]
        draw_schedule(axes, shares, [f"task {number}" for number in range(1, 5)], letters=8)
        axes.set(title=title, xlabel="round" if axes.get_subplotspec().is_last_row() else "")
        axes.set_ylabel("clients")
    return figure


def clients_picture() -> Figure:
    """How ten classes of 100 images are divided among twenty clients."""
    figure = Figure(figsize=(6.4, 2.6))
    labels = np.repeat(np.arange(10), 100)
    for axes, alpha in zip(figure.subplots(1, 3, sharey=True), (0.1, 1.0, 100.0), strict=True):
        owners = dirichlet(labels, 20, alpha, seed=0)
        held = np.zeros((10, 20))
        np.add.at(held, (labels, owners), 1)
        drawn = axes.imshow(held, cmap="Blues", vmin=0, vmax=50, origin="lower", aspect="auto")
        axes.set(title=f"alpha = {alpha:g}", xlabel="client", xticks=range(0, 20, 5))
        axes.grid(visible=False)
    figure.axes[0].set(ylabel="class", yticks=range(10))
    figure.colorbar(drawn, ax=figure.axes, label="images", extend="max", pad=0.02)
    return figure


def badges() -> dict[str, str]:
    """Words on two grounds, as read from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest = project["requires-python"].removeprefix(">=")
    said = {"license": ("license", project["license"]), "python": ("python", f"{lowest}+")}
    said |= {"paper": ("arXiv", "2405.14291"), "typed": ("types", "mypy strict")}
    return {name: _badge(*words) for name, words in (said | {"docs": ("docs", "read")}).items()}


def _badge(left: str, right: str) -> str:
    """An SVG of 20 pixels' height."""
    wide = [10 + 6.6 * len(word) for word in (left, right)]
    whole, middle = sum(wide), wide[0]
    text = 'font-family="Verdana, DejaVu Sans, sans-serif" font-size="11" fill="#fff"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole:.0f}" height="20" role="img" '
        f'aria-label="{left}: {right}">'
        f'<rect width="{whole:.0f}" height="20" rx="3" fill="#0072b2"/>'
        f'<path d="M3 0h{middle - 3:.0f}v20H3a3 3 0 0 1-3-3V3a3 3 0 0 1 3-3z" fill="#444c56"/>'
        f'<g {text} text-anchor="middle"><text x="{middle / 2:.0f}" y="14">{left}</text>'
        f'<text x="{middle + wide[1] / 2:.0f}" y="14">{right}</text></g></svg>\n'
    )


PICTURES = {
    "round": round_picture,
    "aggregation": aggregation_picture,
    "streams": streams_picture,
    "clients": clients_picture,
}


def draw(folder: Path) -> Sequence[Path]:
    """All pictures, as SVG files in a folder."""
    (folder / "badges").mkdir(parents=True, exist_ok=True)
    paths = []
    for name, make in PICTURES.items():
        with style.house():
            figure = style.settled(make())
            paths.append(folder / f"{name}.svg")
            figure.savefig(paths[-1], facecolor="white", metadata={"Date": None})
    for name, text in badges().items():
        paths.append(folder / "badges" / f"{name}.svg")
        paths[-1].write_text(text, encoding="utf-8")
    return paths


if __name__ == "__main__":
    for path in draw(ROOT / "docs/pictures"):
        print(path)
