"""Configurations as nested plain dicts: layer them, flatten them, check them."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from fedbnn.errors import ConfigError
from fedbnn.suggest import did_you_mean

Tree = dict[str, Any]


def layered(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tree:
    """Both mappings in one; where they meet, `above` wins."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = (
            layered(old, value)
            if isinstance(old, Mapping) and isinstance(value, Mapping)
            else value
        )
    return merged


def nested(flat: Mapping[str, Any]) -> Tree:
    """{"a.b": 1} -> {"a": {"b": 1}}."""
    tree: Tree = {}
    for key, value in flat.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        tree = layered(tree, value)
    return tree


def expect_known(
    tree: Mapping[str, Any], known: Collection[str], branches: Collection[str], path: str = ""
) -> None:
    """Raise for the first key, at any depth, that is not known, and for a branch that holds no keys."""
    for key, value in tree.items():
        full = f"{path}{key}"
        if full in branches:
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{full} is a section with keys of its own, not {shortened(value)}",
                    fix=_members(full, known),
                )
            expect_known(value, known, branches, f"{full}.")
        elif full not in known:
            raise ConfigError(f"unknown key {full!r}", fix=nearest(full, known))


def nearest(key: str, known: Collection[str]) -> str:
    """The known key that was probably meant: one of the same name elsewhere, or a sibling with a similar name."""
    parent, _, leaf = key.rpartition(".")
    same = sorted(name for name in known if name.rpartition(".")[2] == leaf)
    prefix = f"{parent}." if parent else ""
    siblings = {
        prefix + name.removeprefix(prefix).partition(".")[0]
        for name in known
        if name.startswith(prefix)
    }
    return did_you_mean(same[0] if same else key, same or siblings or known)


def _members(section: str, known: Collection[str]) -> str:
    """The keys of a section, as a hint."""
    members = sorted(name for name in known if name.startswith(f"{section}."))
    return f"for example {members[0]}" if members else "it has none here"


def shortened(value: object, most: int = 60) -> str:
    """A value as text that fits into a line."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def nulls_as_text(tree: Mapping[str, Any]) -> Tree:
    """The tree with the word null for each null: jsonargparse checks a word against the type, but lets a null pass."""
    words = {
        key: nulls_as_text(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
    }
    return {key: "null" if value is None else value for key, value in words.items()}


def expect_nulls(asked: Mapping[str, Any], got: Mapping[str, Any], path: str = "") -> None:
    """Raise where null was asked for and a text came out: the key takes text, and nothing is not a text."""
    for key, value in asked.items():
        if value is None and got.get(key) is not None:
            raise ConfigError(f"{path}{key}: expected text, got null")
        if isinstance(value, Mapping) and isinstance(got.get(key), Mapping):
            expect_nulls(value, got[key], f"{path}{key}.")


def plain(value: Any) -> Any:
    """The value as YAML can hold it: tuples become lists, paths and enums words,
    dataclasses mappings, restricted numbers plain ones."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(plain(item) for item in value)
    if isinstance(value, Enum):
        return value.name
    for number in (int, float):
        if isinstance(value, number) and not isinstance(value, bool):
            return number(value)
    return str(value) if isinstance(value, Path) else value


def refuse_nan(tree: object, path: str = "") -> None:
    """Raise if there is a NaN anywhere: it would pass every comparison by failing it."""
    if isinstance(tree, float) and math.isnan(tree):
        raise ConfigError(f"{path}: nan is not a setting")
    for key, value in _items(tree):
        refuse_nan(value, f"{path}.{key}" if path else key)


def _items(tree: object) -> Iterator[tuple[str, object]]:
    """The members of a mapping or a list, by name or position."""
    if isinstance(tree, Mapping):
        yield from ((str(key), value) for key, value in tree.items())
    elif isinstance(tree, list):
        yield from ((str(position), value) for position, value in enumerate(tree))
