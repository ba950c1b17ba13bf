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
    Fraction = float
    Count = int
    NonNegativeCount = int
    Side = int
else:
    from jsonargparse import typing

    def _number(name: str, *bounds: tuple[str, float]) -> type:
        return typing.restricted_number_type(name, float, [*bounds])

    Positive = _number("Positive", (">", 0), ("<", inf))
    NonNegative = _number("NonNegative", (">=", 0), ("<", inf))
    AtLeastOne = _number("AtLeastOne", (">=", 1), ("<", inf))
    Share = _number("Share", (">", 0), ("<=", 1))
    Momentum = _number("Momentum", (">=", 0), ("<", 1))
    UnitInterval = typing.ClosedUnitInterval
    Fraction = typing.OpenUnitInterval
    Count = typing.PositiveInt
    NonNegativeCount = typing.NonNegativeInt
    Side = typing.restricted_number_type("Side", int, (">=", 4))
