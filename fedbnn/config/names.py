"""Named sections: which name is chosen, from the YAML file and the command line."""

from collections.abc import Mapping
from typing import Any

from fedbnn.config.schema import Named, Schema, Value
from fedbnn.config.tree import Tree, shortened
from fedbnn.errors import ConfigError
from fedbnn.suggest import did_you_mean


def longhand(tree: Mapping[str, Any], schema: Schema) -> Tree:
    """The tree with every section a mapping: `method: fedavg` becomes {name: fedavg}, an empty section {}."""
    long: Tree = dict(tree)
    for key, entry in schema.items():
        value = long.get(key)
        if isinstance(entry, Named) and isinstance(value, str):
            long[key] = {"name": value}
        elif key in long and value is None and not isinstance(entry, Value):
            long[key] = {}
    return long


def spelled_out(flags: Mapping[str, str], schema: Schema) -> dict[str, str]:
    """The flags with `--method fedavg` as `--method.name fedavg`."""
    return {
        f"{key}.name" if isinstance(schema.get(key), Named) else key: value
        for key, value in flags.items()
    }


def names_in(tree: Mapping[str, Any], schema: Schema) -> dict[str, str]:
    """The name of each named section, its default where the tree has none; an unknown one is an error."""
    return {
        key: _name(key, entry, tree.get(key))
        for key, entry in schema.items()
        if isinstance(entry, Named)
    }


def _name(key: str, entry: Named, section: object) -> str:
    """The name that this section chooses."""
    name = section.get("name", entry.default) if isinstance(section, Mapping) else entry.default
    if not isinstance(name, str) or name not in entry.choices:
        raise ConfigError(
            f"unknown {key} {shortened(name)}", fix=did_you_mean(str(name), entry.choices)
        )
    return name


def without_replaced(tree: Mapping[str, Any], flags: Mapping[str, str], schema: Schema) -> Tree:
    """The tree without the options of a name that the flags replace: they belong to that name alone."""
    kept: Tree = dict(tree)
    for key, entry in schema.items():
        asked = flags.get(f"{key}.name")
        if (
            isinstance(entry, Named)
            and asked is not None
            and asked != _name(key, entry, tree.get(key))
        ):
            kept.pop(key, None)
    return kept
