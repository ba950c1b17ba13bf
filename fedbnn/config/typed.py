"""jsonargparse's side: a parser whose arguments are the constructors' own, and its values checked and built."""

import inspect
from argparse import SUPPRESS, ArgumentError
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace, set_loader

from fedbnn.config import strict_yaml
from fedbnn.config.flags import SWITCHES, VALUES
from fedbnn.config.oneline import oneline
from fedbnn.config.schema import Builder, Choice, Free, Named, Schema, Section, Value
from fedbnn.config.tree import expect_nulls, nulls_as_text
from fedbnn.errors import ConfigError

STRICT = "strict"
USAGE = "python train.py --config FILE [--section.key VALUE ...]"
ABOUT = "Train a federated model on data that drift. Every key of the YAML file is also a flag."
EXAMPLE = "example: python train.py --config conf/quickstart.yaml --method fedavg --client.lr 0.01 --stream.clients 50"


def parser_of(schema: Schema, names: Mapping[str, str]) -> ArgumentParser:
    """The parser of this schema when its named sections have these names."""
    return _filled(_empty(), schema, names)


def help_text(schema: Schema, names: Mapping[str, str]) -> str:
    """What `--help` shows: the switches, then each section with the options of the names chosen."""
    parser = _empty()
    switches = parser.add_argument_group("switches")
    for name, text in {**VALUES, **SWITCHES}.items():
        switches.add_argument(f"--{name}", action="store_true", default=SUPPRESS, help=text)
    return str(_filled(parser, schema, names).format_help())


def _empty() -> ArgumentParser:
    """A parser that raises its errors, reads text by our own YAML rules, and knows no argument yet."""
    set_loader(STRICT, lambda text: strict_yaml.parse(text, "value"), exceptions=(ConfigError,))
    parser = ArgumentParser(exit_on_error=False, add_help=False, parser_mode=STRICT, usage=USAGE)
    parser.description, parser.epilog = ABOUT, EXAMPLE
    return parser


def _filled(parser: ArgumentParser, schema: Schema, names: Mapping[str, str]) -> ArgumentParser:
    """The parser with an argument group for each section, named sections as the names say."""
    for key, entry in schema.items():
        if isinstance(entry, Value):
            parser.add_argument(f"--{key}", type=entry.type, default=entry.default, help=entry.help)
            continue
        group = parser.add_argument_group(key, _about(entry, names.get(key, "")))
        if isinstance(entry, Named):
            group.add_argument(
                f"--{key}.name",
                type=Literal[tuple(entry.choices)],
                default=names[key],
                help=f"or --{key} NAME",
            )
        if not isinstance(entry, Free):
            choice = chosen(entry, names.get(key, ""))
            _add_arguments(group, choice.build, key, set(entry.given))
            parser.set_defaults({f"{key}.{name}": value for name, value in choice.defaults.items()})
    return parser


def _add_arguments(group: Any, build: Builder, key: str, given: set[str]) -> None:
    """The arguments of a class or a function, without those the program gives."""
    if inspect.isclass(build):
        group.add_class_arguments(build, key, as_group=False, instantiate=False, skip=given)
    else:
        group.add_function_arguments(build, key, as_group=False, skip=given)


def _about(entry: Section | Named | Free, name: str) -> str:
    """One line on what a section is for."""
    if isinstance(entry, Free):
        return entry.help
    return (inspect.getdoc(chosen(entry, name).build) or "").partition("\n")[0]


def chosen(entry: Section | Named, name: str) -> Choice:
    """What the section builds under this name."""
    return entry.choices[name] if isinstance(entry, Named) else Choice(entry.build)


def keys_of(parser: ArgumentParser) -> set[str]:
    """All keys that hold a value, with their full names."""
    return set(_leaves(parser.get_defaults(), ""))


def _leaves(tree: Namespace, path: str) -> Iterator[str]:
    """Full names of the leaves; the default of an optional dataclass (it has a class_path) is one leaf."""
    for key, value in vars(tree).items():
        if isinstance(value, Namespace) and "class_path" not in value:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}"


def checked(
    parser: ArgumentParser, tree: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The complete values, and the same with nested dataclasses built; each value has its argument's type."""
    try:
        values = parser.parse_object(nulls_as_text(tree))
        built = parser.instantiate(values)
    except (ArgumentError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise ConfigError(oneline(str(error))) from error
    expect_nulls(tree, values.as_dict())
    return values.as_dict(), {
        key: vars(value) if isinstance(value, Namespace) else value
        for key, value in vars(built).items()
    }
