"""What a configuration may hold, as values: a schema maps top-level keys to these."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Builder: TypeAlias = Callable[..., Any]


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
