"""From the words of a command line to a checked configuration."""

import sys
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from fedbnn.config import strict_yaml
from fedbnn.config.flags import SWITCHES, VALUES, Flags, read
from fedbnn.config.names import longhand, names_in, spelled_out, without_replaced
from fedbnn.config.schema import Builder, Entry, Free, Named, Schema, Section, Value
from fedbnn.config.tree import Tree, expect_known, layered, nearest, nested, plain, refuse_nan
from fedbnn.config.typed import checked, chosen, help_text, keys_of, parser_of
from fedbnn.errors import ConfigError, FedBNNError


@dataclass(frozen=True)
class Parsed:
    """A checked configuration: `values` is complete and plain, `flags` are the switches of the command line."""

    values: Mapping[str, Any]
    flags: Flags
    builders: Mapping[str, Builder] = field(repr=False)
    arguments: Mapping[str, Mapping[str, Any]] = field(repr=False)

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def build(self, section: str, **given: Any) -> Any:
        """ExpectedUpdate what the section stands for with its arguments and those the program gives itself."""
        try:
            return self.builders[section](**self.arguments[section], **given)
        except FedBNNError:
            raise
        except ValueError as error:
            raise ConfigError(str(error), section) from error

    def yaml(self) -> str:
        """The whole configuration as a file; running it again gives the same run."""
        return strict_yaml.dump(self.values)


def parse(
    argv: Sequence[str], schema: Schema, run_directory: Callable[[str], Path] = Path
) -> Parsed:
    """Read the YAML file and the flags, check every key and value, and stop here for --help and --print_config.

    `run_directory` finds the run that `--resume` names; its config.yaml is read when no --config is given.
    """
    flags = read(argv)
    asked = spelled_out(flags.keys, schema)
    file = without_replaced(longhand(_from_file(flags, run_directory), schema), asked, schema)
    names = names_in(
        layered(file, nested({key: asked[key] for key in asked if key.endswith(".name")})), schema
    )
    if flags.help:
        _stop_after(help_text(schema, names))
    parsed = _checked(file, asked, schema, names, flags)
    _expect_constructible(parsed, schema)
    if flags.print_config:
        _stop_after(parsed.yaml())
    return parsed


def restored(values: Mapping[str, Any], schema: Schema) -> Parsed:
    """The configuration whose complete `values` are given, as a worker process receives them."""
    tree = longhand(dict(values), schema)
    return _checked(tree, {}, schema, names_in(tree, schema), Flags())


def _from_file(flags: Flags, run_directory: Callable[[str], Path]) -> Tree:
    """What the YAML file says; nothing when there is none."""
    if flags.config is not None:
        return strict_yaml.read(Path(flags.config))
    return (
        strict_yaml.read(run_directory(flags.resume) / "config.yaml")
        if flags.resume is not None
        else {}
    )


def _checked(
    file: Tree, asked: Mapping[str, str], schema: Schema, names: Mapping[str, str], flags: Flags
) -> Parsed:
    """The configuration with all layers in place, each key known and each value of its type."""
    parser = parser_of(schema, names)
    free = {key: entry for key, entry in schema.items() if isinstance(entry, Free)}
    known = keys_of(parser) | {
        f"{key}.{name}" for key, entry in free.items() for name in entry.keys
    }
    branches = _branches(known, schema)
    _expect_flags(asked, known, branches)
    tree = layered(file, nested({key: _loaded(key, text, free) for key, text in asked.items()}))
    expect_known(tree, known, branches)
    values, arguments = checked(
        parser, {key: value for key, value in tree.items() if key not in free}
    )
    complete = plain({key: values.get(key, tree.get(key, {})) for key in schema})
    refuse_nan(complete)
    sections = {key: entry for key, entry in schema.items() if isinstance(entry, Section | Named)}
    builders = {key: chosen(entry, names.get(key, "")).build for key, entry in sections.items()}
    return Parsed(
        complete,
        flags,
        builders,
        {key: _arguments(arguments.get(key, {}), schema[key]) for key in builders},
    )


def _branches(known: AbstractSet[str], schema: Schema) -> set[str]:
    """Every key that has keys below it: the sections, and what is nested in them."""
    parts = [key.split(".") for key in known]
    inner = {".".join(part[:end]) for part in parts for end in range(1, len(part))}
    return inner | {key for key, entry in schema.items() if not isinstance(entry, Value)}


def _expect_flags(
    asked: Mapping[str, str], known: AbstractSet[str], branches: AbstractSet[str]
) -> None:
    """Raise for a flag that sets no known key; what lies below a known key is that key's affair."""
    for key in asked:
        parts = key.split(".")
        above = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
        if known.isdisjoint(above) and key not in branches:
            raise ConfigError(
                f"unknown flag --{key}", fix=nearest(key, {*known, *SWITCHES, *VALUES})
            )


def _loaded(key: str, text: str, free: Mapping[str, Free]) -> Any:
    """The value of a flag: text for typed keys (their type reads it), a YAML value for free ones."""
    return strict_yaml.parse(text, f"--{key}") if key.partition(".")[0] in free else text


def _arguments(section: Mapping[str, Any], entry: Entry) -> dict[str, Any]:
    """What to call the builder with: the section without the name that chose the builder."""
    return {
        key: value
        for key, value in section.items()
        if key != "name" or not isinstance(entry, Named)
    }


def _expect_constructible(parsed: Parsed, schema: Schema) -> None:
    """Build every settings dataclass once, so that a value out of range is reported before anything starts."""
    for key, build in parsed.builders.items():
        entry = schema[key]
        if is_dataclass(build) and isinstance(entry, Section | Named) and not entry.given:
            parsed.build(key)


def _stop_after(text: str) -> None:
    """Print and leave with success, as every --help does."""
    sys.stdout.write(text)
    raise SystemExit(0)
