"""Ranges of numbers as types: jsonargparse refuses what lies outside, before anything starts."""

from math import inf
from typing import TYPE_CHECKING

LONGEST_SIDE = 4096
"""Of an image, in pixels."""
WORDS = {
    "Positive": "a number above 0",
    "NonNegative": "a number of at least 0",
    "AtLeastOne": "a number of at least 1",
    "Share": "a number above 0, at most 1",
    "Momentum": "a number of at least 0, below 1",
    "ClosedUnitInterval": "a number from 0 to 1",
    "OpenUnitInterval": "a number between 0 and 1",
    "PositiveInt": "a whole number above 0",
    "NonNegativeInt": "a whole number of at least 0",
    "Side": f"a whole number from 4 to {LONGEST_SIDE}",
}
"""How each range is said to people."""

if TYPE_CHECKING:
    Positive = float
    NonNegative = float
    AtLeastOne = float
    Share = float
    UnitInterval = float
    OpenUnitInterval = float
    Momentum = float
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
    OpenUnitInterval = typing.OpenUnitInterval
    Count = typing.PositiveInt
    NonNegativeCount = typing.NonNegativeInt
    Side = typing.restricted_number_type("Side", int, [(">=", 4), ("<=", LONGEST_SIDE)])
