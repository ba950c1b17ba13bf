"""The curves of `fedbnn bench scale`: flat is good."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fedbnn.cli.bench_scale import PARTICIPANTS, REGISTERED


def draw(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Seconds of a round and peak memory over the registered clients, and peak memory over the participants."""
    small = [row for row in rows if row["participants"] == PARTICIPANTS]
    large = [row for row in rows if row["registered"] == REGISTERED and row not in small]
    panels = (
        (
            small,
            "registered",
            "round_seconds",
            f"registered clients, {PARTICIPANTS} a round",
            "seconds a round",
        ),
        (
            small,
            "registered",
            "peak_mib",
            f"registered clients, {PARTICIPANTS} a round",
            "peak memory, MiB",
        ),
        (
            large,
            "participants",
            "peak_mib",
            f"participants a round, {REGISTERED:,} registered",
            "peak memory, MiB",
        ),
    )
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    for axes, (mine, across, up, xlabel, ylabel) in zip(figure.subplots(1, 3), panels, strict=True):
        places, heights = [row[across] for row in mine], [row[up] for row in mine]
        axes.plot(places, heights, "o-")
        axes.set(
            xscale="log", xlabel=xlabel, ylabel=ylabel, ylim=(0, 1.2 * max(heights, default=1))
        )
        axes.set_xticks(places, [f"{place:,}" for place in places])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
    return figure
