"""What a configuration may hold, as values: a schema is a mapping from top-level keys to these."""

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
class Choice:
    """What one name stands for: something to build, and the defaults that this name changes."""

    build: Builder
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Named:
    """A section whose key `name` chooses what is built; `method: fedavg` is short for `method: {name: fedavg}`."""

    choices: Mapping[str, Choice]
    default: str
    given: Collection[str] = ()


@dataclass(frozen=True)
class Free:
    """A section handed on as it is; only the names of its keys are checked."""

    keys: Collection[str]
    help: str = ""


Entry: TypeAlias = Value | Section | Named | Free
Schema: TypeAlias = Mapping[str, Entry]
