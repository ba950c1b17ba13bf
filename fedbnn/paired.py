"""What the choice of a method changes where everything else is the same."""

from collections.abc import Sequence

from fedbnn.judging import REGIMES
from fedbnn.tables import MOMENTS, SPOKEN, Cell, Results, Row, Table, by_method, spread


def differences(runs: Sequence[Results], reference: str) -> list[Table]:
    """reference - baseline, seed by seed, averaged; nothing without pairs."""
    grouped = by_method(runs)
    own = {run["seed"]: run for run in grouped.get(reference, [])}
    columns = {
        f"{SPOKEN[regime].split('-')[-1]} {MOMENTS[moment]}": (regime, f"avg_{moment}")
        for regime in REGIMES
        for moment in MOMENTS
    }
    rows = []
    for method, others in grouped.items():
        pairs = [(own[other["seed"]], other) for other in others if other["seed"] in own and method != reference]
        if pairs:
            rows.append(Row(f"{reference} − {method}", tuple(_difference(pairs, *path) for path in columns.values())))
    note = "difference of the averages on the same seeds, in points: mean ± standard deviation over the pairs"
    return [Table(f"Paired differences against {reference}", ("pair", *columns), tuple(rows), (note,))] if rows else []


def _difference(pairs: Sequence[tuple[Results, Results]], regime: str, name: str) -> Cell:
    values = [(one[regime][name], other[regime][name]) for one, other in pairs]
    return spread([None if None in pair else pair[0] - pair[1] for pair in values], signed=True)
