"""Who sent what in a run, what was refused of it, and how far each client moved the model.

Everything stands in the records of the rounds (`audit` in metrics.jsonl, written at the commit).
How far a client moved the model in an exchange is the length of its part by that of the whole move
(`fedbnn.defense.robust`): in the metric of the prior for weights, of class means for statistics.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedbnn.report import style

MARKS = {"refused": ("x", style.VERMILION), "no answer": ("_", style.FAINT)}
LESS = ("o", style.VERMILION)
FINEST = 2000
EXPLAINED = """\
moved: the client's part of the whole move of the exchange, in the metric of the prior for weights,
of class means for statistics; parts may add up to more than 100 %: clients pull apart"""


@dataclass(frozen=True)
class Entry:
    """What one client did in one exchange of one round; what is refused was not folded.

    `moved` is its part of the exchange's whole move, `lost` says why it does not count: `refused`
    or `no answer`, with the `reason`. Without an exchange it never answered.
    """

    round: int
    client: int
    exchange: str = ""
    bytes: int = 0
    images: int = 0
    trust: float = 0.0
    moved: float = 0.0
    lost: str = ""
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def entries(records: Iterable[Mapping[str, Any]]) -> list[Entry]:
    """Every client of every round, in the order of rounds, clients and exchanges.

    Raises LookupError, TypeError, AttributeError or ValueError for what are no records.
    """
    found: list[Entry] = []
    for number, record in enumerate(records, 1):
        if record["round"] != number:
            raise ValueError(f"the record of round {number} is not there")
        found += _of_round(record)
    return found


def _of_round(record: Mapping[str, Any]) -> list[Entry]:
    """The entries of one round, by client; a client that failed has one without an exchange."""
    refused, failed = (dict(record.get(name) or {}) for name in ("refused", "failed"))
    number = int(record["round"])
    found = [Entry(number, int(who), lost="no answer", reason=str(failed[who])) for who in failed]
    for exchange, told in record["audit"].items():
        whole = float(told["move"] or 0)
        for who, (size, images, trust, part) in told["clients"].items():
            moved = float(part or 0) / whole if whole else 0.0
            lost = ("", "") if trust else ("refused", str(refused.get(who, "")))
            sent = int(size), int(images), float(trust)
            found.append(Entry(number, int(who), str(exchange), *sent, moved, *lost))
    return sorted(found, key=lambda one: one.client)


def rows(found: Sequence[Entry]) -> list[dict[str, object]]:
    """The lines of the table, an exchange each."""
    return [
        {
            "round": one.round,
            "client": one.client,
            "exchange": one.exchange,
            "bytes": f"{one.bytes:,}" if one.exchange else "",
            "images": one.images or "",
            "trust": f"{one.trust:.2f}" if one.exchange else "",
            "moved": f"{one.moved:.0%}" if one.exchange else "",
            "what was refused, and why": f"{one.lost}: {one.reason}" if one.lost else "",
        }
        for one in found
    ]


def by_client(found: Sequence[Entry]) -> list[dict[str, object]]:
    """A line for each client: what it sent and moved in all rounds together."""
    lines, each = [], dict[int, list[Entry]]()
    for one in found:
        each.setdefault(one.client, []).append(one)
    for client, own in sorted(each.items()):
        most = max(own, key=lambda one: one.moved)
        lines.append(
            {
                "client": client,
                "rounds": len({one.round for one in own}),
                "bytes": f"{sum(one.bytes for one in own):,}",
                "refused": sum(one.lost == "refused" for one in own),
                "no answer": sum(one.lost == "no answer" for one in own),
                "down-weighted": sum(0 < one.trust < 1 for one in own),
                "moved at most": f"{most.moved:.0%}",
                "in round": most.round,
                "of": most.exchange,
            }
        )
    return lines


def figure(found: Sequence[Entry]) -> Figure:
    """Clients by rounds: the largest part each had in an exchange; refused and missing are marked.

    A cell is empty where a client was not asked. There are no more of them than can be seen: many
    clients share a row, and many rounds a column.
    """
    clients = sorted({one.client for one in found})
    last, place = max(one.round for one in found), {who: row for row, who in enumerate(clients)}
    height, width = min(len(clients), FINEST), min(last, FINEST)
    cells = np.full((height, width), np.nan)
    for one in found:
        row, column = place[one.client] * height // len(clients), (one.round - 1) * width // last
        cells[row, column] = np.nanmax([cells[row, column], one.moved])
    with style.house():
        size = 9, min(9.0, 1.8 + 0.18 * len(clients))
        drawn = Figure(figsize=size, layout="constrained")
        axes = drawn.subplots()
        how: Any = {"cmap": "cividis_r", "vmin": 0, "vmax": 1, "aspect": "auto"}
        extent = (0.5, last + 0.5, len(clients) - 0.5, -0.5)
        shown = axes.imshow(cells, extent=extent, interpolation="nearest", **how)
        _mark(axes, found, place)
        named = range(0, len(clients), max(1, len(clients) // 25))
        axes.set_yticks(named, [str(clients[row]) for row in named], fontsize=7)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=False)
        axes.set(xlabel="round", ylabel="client", title="How far each client moved the model")
        drawn.colorbar(shown, label="part of the round's move", pad=0.01)
        return style.legend_below(drawn) if axes.collections else drawn


def _mark(axes: Axes, found: Sequence[Entry], place: Mapping[int, int]) -> None:
    """A cross on what was refused, a dash on no answer, a ring around what counted less."""
    for said, (mark, ink) in MARKS.items():
        points = [(one.round, place[one.client]) for one in found if one.lost == said]
        if points:
            axes.scatter(*zip(*points, strict=True), marker=mark, color=ink, label=said)
    less = [(one.round, place[one.client]) for one in found if 0 < one.trust < 1]
    if less:
        ring: Any = {"marker": LESS[0], "facecolors": "none", "edgecolors": LESS[1]}
        axes.scatter(*zip(*less, strict=True), label="down-weighted", **ring)
