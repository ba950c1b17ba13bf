"""Ranges of numbers as types: jsonargparse refuses what lies outside, before anything starts."""

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Positive = float
    NonNegative = float
    AtLeastOne = float
    Share = float
    UnitInterval = float
    Momentum = float
    Count = int
    NonNegativeCount = int
else:
    from jsonargparse.typing import ClosedUnitInterval as UnitInterval
    from jsonargparse.typing import NonNegativeInt as NonNegativeCount
    from jsonargparse.typing import PositiveInt as Count
    from jsonargparse.typing import restricted_number_type

    def _between(name: str, kind: type, *bounds: tuple[str, float]) -> type:
        return restricted_number_type(name, kind, [*bounds], docstring=name)

    Positive = _between("Positive", float, (">", 0), ("<", inf))
    NonNegative = _between("NonNegative", float, (">=", 0), ("<", inf))
    AtLeastOne = _between("AtLeastOne", float, (">=", 1), ("<", inf))
    Share = _between("Share", float, (">", 0), ("<=", 1))
    Momentum = _between("Momentum", float, (">=", 0), ("<", 1))
