"""Which settings differ between configurations."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

OWN = ("seed", "run_dir", "method.name", "track.group", "track.name")
"""What every run has of its own, and nobody needs to be told."""


@dataclass(frozen=True)
class Differences:
    """Names of configurations, and for each setting that differs its values in their order."""

    names: tuple[str, ...]
    lines: dict[str, tuple[str, ...]]


def between(configs: Mapping[str, Mapping[str, Any]]) -> Differences:
    """What differs between the configurations with these names; a dash where one has no such setting."""
    tables = [dict(flat(config)) for config in configs.values()]
    keys = [
        key for key in dict.fromkeys(key for table in tables for key in table) if key not in OWN
    ]
    lines = {
        key: tuple(_text(table[key]) if key in table else "–" for table in tables) for key in keys
    }
    return Differences(
        tuple(configs), {key: texts for key, texts in lines.items() if len(set(texts)) > 1}
    )


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`{"a": {"b": 1}}` -> `a.b: 1`; an empty section has nothing to show."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
