"""What the choice of a method changes on the same seeds, hence on the same stream of images."""

from collections.abc import Sequence

from fedbnn.evaluation.predictions import REGIMES
from fedbnn.report.tables import MOMENTS, SPOKEN, Cell, Results, Row, Table, by_method, spread


def differences(runs: Sequence[Results], reference: str) -> list[Table]:
    """mean_s (a_s - b_s) and its deviation, for accuracies a of the reference and b of another on seed s, where both ran."""
    grouped = by_method(runs)
    own = {run["seed"]: run for run in grouped.get(reference, [])}
    columns = {
        f"{SPOKEN[regime].split('-')[-1]} {MOMENTS[moment]}": (regime, f"avg_{moment}")
        for regime in REGIMES
        for moment in MOMENTS
    }
    rows = []
    for method, others in ((name, mine) for name, mine in grouped.items() if name != reference):
        pairs = [(own[other["seed"]], other) for other in others if other["seed"] in own]
        if pairs:
            rows.append(
                Row(
                    f"{reference} − {method}",
                    tuple(_difference(pairs, *path) for path in columns.values()),
                )
            )
    note = "difference of the averages on the same seeds, in points: mean ± standard deviation over the pairs"
    return (
        [Table(f"Paired differences against {reference}", ("pair", *columns), tuple(rows), (note,))]
        if rows
        else []
    )


def _difference(pairs: Sequence[tuple[Results, Results]], regime: str, name: str) -> Cell:
    values = [(one[regime][name], other[regime][name]) for one, other in pairs]
    return spread([None if None in pair else pair[0] - pair[1] for pair in values], signed=True)
