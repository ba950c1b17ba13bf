"""The curves of `fedbnn bench scale`: flat is good."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure


def draw(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Seconds of a round and peak memory over the number of registered clients."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, key, label in zip(
        figure.subplots(1, 2), ("round_seconds", "peak_mib"), ("seconds a round", "peak memory, MiB"), strict=True
    ):
        axes.plot([row["registered"] for row in rows], [row[key] for row in rows], "o-")
        axes.set(xscale="log", xlabel="registered clients, 10 a round", ylabel=label, ylim=(0, None))
        axes.grid(alpha=0.3)
    return figure
