"""What a configuration may hold, as values: a schema maps top-level keys to these.

Ranges of numbers are types: jsonargparse refuses what lies outside, before anything starts.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias

Builder: TypeAlias = Callable[..., Any]
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


@dataclass(frozen=True)
class Value:
    """One key with one value, such as `seed: 0`."""

    type: Any
    default: Any
    help: str = ""


@dataclass(frozen=True)
class Section:
    """Keys that are the arguments of `build`; those in `given` the program supplies itself."""

    build: Builder
    given: Collection[str] = ()


@dataclass(frozen=True)
class Named:
    """A section whose key `name` says what is built; `method: fedavg` is short for {name: fedavg}.

    `default` is the name where none is said: one word, or a word for each name of the section that
    it `follows`, which stands before it. `presets` are defaults that a name changes. A name may be
    an import path, `package.module:name`, if `own` says how what is found there is built.
    """

    choices: Mapping[str, Builder]
    default: str | Mapping[str, str]
    follows: str = ""
    given: Collection[str] = ()
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    own: Callable[[Any], Builder] | None = None


@dataclass(frozen=True)
class Free:
    """Arguments of a class that somebody else makes: only those that are set are kept.

    `refused` are arguments that are set elsewhere, each with a word on where.
    """

    of: type[Any]
    refused: Mapping[str, str] = field(default_factory=dict)
    help: str = ""


Schema: TypeAlias = Mapping[str, Value | Section | Named | Free]
