"""From the words of a command line to a checked configuration.

jsonargparse reads, types and checks every value. What is ours: the name that a named section
chooses, the word that was probably meant, and errors in one line.
"""

import argparse
import inspect
import json
import re
import sys
from argparse import SUPPRESS, ArgumentError
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_type_hints

from jsonargparse import ArgumentParser, Namespace, set_loader

from fedbnn.config import yaml
from fedbnn.config.own import imported
from fedbnn.config.schema import WORDS, Builder, Free, Named, Schema, Section, Value
from fedbnn.errors import ConfigError, called, did_you_mean

USAGE = "{} --config FILE [--section.key VALUE ...]"
ABOUT = "Train a federated model on data that drift. Every key of the YAML file is also a flag."
EXAMPLE = "example: {} --config quickstart --method fedavg --client.lr 0.01"
SWITCHES = {
    "config": "FILE, or the name of one in conf/; of several the later ones win",
    "resume": "DIR or last: go on with an interrupted run",
    "help": "show this text and stop",
    "print_config": "print the complete configuration and stop",
    "dry_run": "show the schedule of the stream and train nothing",
}
LONGEST = 300
Tree = Mapping[str, Any]
Finder = Callable[[str], Path]


@dataclass(frozen=True)
class Flags:
    """What the command line says beside the settings; `asked` names the sections it sets."""

    config: Sequence[str] = ()
    resume: str | None = None
    help: bool = False
    print_config: bool = False
    dry_run: bool = False
    asked: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Parsed:
    """A checked configuration: `values` is complete and plain, `flags` are the switches."""

    values: Tree
    flags: Flags
    builders: Mapping[str, Builder] = field(repr=False)
    arguments: Mapping[str, Tree] = field(repr=False)

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def build(self, section: str, **given: Any) -> Any:
        """Call what the section stands for with its arguments and those the program gives."""
        try:
            return self.builders[section](**self.arguments[section], **given)
        except ValueError as error:
            raise ConfigError(str(error), section) from error


def parse(argv: Sequence[str], schema: Schema, run_directory: Finder = Path) -> Parsed:
    """Read the YAML file and the flags, check every key and value; stop for --help, --print_config.

    `run_directory` finds the run that `--resume` names; its config.yaml is read without --config.
    """
    flags, names, words = _flags(argv, schema)
    files = [yaml.find(name) for name in flags.config]
    if flags.resume and not files:
        files = [run_directory(flags.resume) / "config.yaml"]
    tree: Tree = {}
    for layer in (*map(yaml.read, files), names):
        tree = _merged(tree, _longhand(layer, schema), schema)
    if flags.help:
        parser = _parser(schema, _names(tree, schema), set())
        switches = parser.add_argument_group("switches")
        for name, text in SWITCHES.items():
            switches.add_argument(f"--{name}", action="store_true", default=SUPPRESS, help=text)
        sys.stdout.write(parser.format_help())
        raise SystemExit(0)
    parsed = _checked(tree, words, schema, flags)
    if flags.print_config:
        sys.stdout.write(yaml.dump(parsed.values))
        raise SystemExit(0)
    return parsed


def restored(values: Tree, schema: Schema) -> Parsed:
    """The configuration with these values, all or some, as a program or a worker has them."""
    return _checked(_longhand(values, schema), (), schema, Flags())


def _flags(argv: Sequence[str], schema: Schema) -> tuple[Flags, dict[str, str], list[str]]:
    """The switches, the names that are chosen (`--method fedavg`), and the words of other keys."""
    front = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    front.add_argument("--config", action="append", default=[])
    front.add_argument("--resume")
    for names in (("--help", "-h"), ("--print_config",), ("--dry_run",)):
        front.add_argument(*names, action="store_true")
    for key, entry in schema.items():
        if isinstance(entry, Named):
            front.add_argument(f"--{key}", f"--{key}.name", dest=key, default=SUPPRESS)
    try:
        found, words = front.parse_known_args([*_spelled(argv)])
    except ArgumentError as error:
        raise _explained(str(error), set(), {}) from error
    chosen = vars(found)
    switches = {name: chosen.pop(name) for name in SWITCHES}
    asked = {re.split("[.=]", word[2:])[0] for word in words if word.startswith("--")}
    return Flags(**switches, asked=frozenset(asked | chosen.keys())), chosen, words


def _spelled(argv: Sequence[str]) -> Iterator[str]:
    """Flags in one spelling: `--set KEY=VALUE` is `--KEY=VALUE`, and `--dry-run` is `--dry_run`."""
    words = chain.from_iterable(re.split("(?<=^--set)=", word, maxsplit=1) for word in argv)
    for word in words:
        if word == "--set" and "=" not in (word := f"--{next(words, '')}"):
            raise ConfigError("--set needs KEY=VALUE")
        flag, equals, value = word.partition("=")
        is_flag = flag.startswith("--") and len(flag) > 2
        yield f"--{flag[2:].replace('-', '_')}{equals}{value}" if is_flag else word


def _longhand(tree: Tree, schema: Schema) -> Tree:
    """The tree with every section a mapping: `method: fedavg` is {name: fedavg}, nothing is {}."""
    long = {key: {} if value is None else value for key, value in tree.items()}
    for key in tree.keys() & schema.keys():
        if isinstance(schema[key], Value):
            long[key] = tree[key]
        elif isinstance(schema[key], Named) and isinstance(tree[key], str):
            long[key] = {"name": tree[key]}
        elif not isinstance(long[key], Mapping):
            said = _short(repr(tree[key]))
            raise ConfigError(f"{key} is a section with keys of its own, not {said}")
    return long


def _names(tree: Tree, schema: Schema) -> dict[str, str]:
    """The name of each named section, its default where the tree has none."""
    names: dict[str, str] = {}
    for key, entry in schema.items():
        if isinstance(entry, Named):
            default = entry.default
            if not isinstance(default, str):
                default = default.get(names[entry.follows], next(iter(entry.choices)))
            names[key] = tree.get(key, {}).get("name", default)
            _built_by(entry, key, names[key])
    return names


def _merged(below: Tree, top: Tree, schema: Schema) -> Tree:
    """One tree on top of another; options of a name that is replaced stay behind."""
    both = {**below, **top}
    for key in below.keys() & top.keys():
        if isinstance(below[key], Mapping) and isinstance(top[key], Mapping):
            both[key] = {**below[key], **top[key]}
    before, after = _names(below, schema), _names(both, schema)
    for key, name in after.items():
        if name != before[key]:
            both[key] = top.get(key, {})
    return both


def _parser(schema: Schema, names: Mapping[str, str], asked: set[str]) -> ArgumentParser:
    """A parser that raises its errors, with a group of arguments for each section.

    Of a free section it has the arguments that are `asked` for: the others have no default.
    """
    set_loader("strict", lambda text: yaml.parse(text, "value"), exceptions=(ConfigError,))
    how: dict[str, Any] = {"exit_on_error": False, "add_help": False, "allow_abbrev": False}
    usage, example = (text.format(called()) for text in (USAGE, EXAMPLE))
    parser = ArgumentParser(parser_mode="strict", usage=usage, description=ABOUT, **how)
    parser.epilog = example
    for key, entry in schema.items():
        if isinstance(entry, Value):
            parser.add_argument(f"--{key}", type=entry.type, default=entry.default, help=entry.help)
        elif isinstance(entry, Free):
            group = parser.add_argument_group(key, entry.help)
            unset: Any = {"default": SUPPRESS, "help": SUPPRESS}
            for name, kind in _arguments(entry).items():
                if f"{key}.{name}" in asked:
                    group.add_argument(f"--{key}.{name}", type=kind, **unset)
        else:
            _add_section(parser, key, entry, names.get(key, ""))
    return parser


def _asked(tree: Tree, words: Sequence[str]) -> set[str]:
    """`section.argument` of all that the tree and the words of other keys set."""
    within = {key: value for key, value in tree.items() if isinstance(value, Mapping)}
    said = {f"{key}.{name}" for key, section in within.items() for name in section}
    return said | {".".join(re.split("[.=+]", word[2:])[:2]) for word in words}


def _arguments(entry: Free) -> dict[str, Any]:
    """The arguments of a free section with their types."""
    hints = get_type_hints(entry.of.__init__)
    return {name: hints[name] for name in hints if name not in {"return", *entry.refused}}


def _build(entry: Section | Named | Free, name: str) -> Builder:
    """What is called with the arguments of a section."""
    if isinstance(entry, Free):
        return dict
    return _built_by(entry, "", name) if isinstance(entry, Named) else entry.build


def _built_by(entry: Named, key: str, name: object) -> Builder:
    """What a name stands for in the section `key`."""
    if isinstance(name, str) and name in entry.choices:
        return entry.choices[name]
    if isinstance(name, str) and ":" in name and entry.own:
        return entry.own(imported(name))
    what, fix = f"unknown {key} {_short(repr(name))}", did_you_mean(str(name), entry.choices)
    raise ConfigError(what, fix=f"{fix}; your own is package.module:name" if entry.own else fix)


def _add_section(parser: ArgumentParser, key: str, entry: Section | Named, name: str) -> None:
    """The arguments of what the section builds, without those the program gives."""
    build, how = _build(entry, name), {"as_group": False, "skip": set(entry.given)}
    group: Any = parser.add_argument_group(key, (inspect.getdoc(build) or "").split("\n")[0])
    if inspect.isclass(build):
        group.add_class_arguments(build, key, instantiate=False, **how)
    else:
        group.add_function_arguments(build, key, **how)
    if isinstance(entry, Named):
        names, text = Literal[(*entry.choices, name)], f"or --{key} NAME"
        group.add_argument(f"--{key}.name", type=names, default=name, help=text)
        preset = entry.presets.get(name, {})
        parser.set_defaults({f"{key}.{option}": value for option, value in preset.items()})


def _checked(tree: Tree, words: Sequence[str], schema: Schema, flags: Flags) -> Parsed:
    """The configuration with all layers in place; what contradicts itself is reported here, too."""
    names = _names(tree, schema)
    parser = _parser(schema, names, _asked(tree, words))
    try:
        asked = parser.parse_object(dict(tree), defaults=False, _skip_required=True)
        values = parser.parse_args(list(words), namespace=asked)
        parser.validate(values, skip_unset=False)
        built = parser.instantiate(values)
        plain = _plain(values)
    except (ArgumentError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise _explained(str(error), set(parser.get_defaults().keys()), schema) from error
    sections = {key: entry for key, entry in schema.items() if not isinstance(entry, Value)}
    arguments = {key: vars(built[key]) if key in built else {} for key in sections}
    names = {key: arguments[key].pop("name") for key in names}
    builders = {key: _build(entry, names.get(key, "")) for key, entry in sections.items()}
    parsed = Parsed({key: plain.get(key, {}) for key in schema}, flags, builders, arguments)
    for key, build in builders.items():
        if is_dataclass(build) and not getattr(schema[key], "given", ()):
            parsed.build(key)
    return parsed


def _plain(values: Namespace) -> Any:
    """The values as JSON holds them; NaN is none: it would pass all comparisons by failing."""
    text = json.dumps(values.as_dict(), default=lambda item: getattr(item, "value", str(item)))
    return json.loads(text, parse_constant=_constant)


def _constant(word: str) -> float:
    if word == "NaN":
        raise ValueError("nan is not a setting")
    return float(word)


_UNKNOWN = r"(?:Option '(.*)' is not accepted|unrecognized arguments: --(\w.*))"
_UNMADE = r"^(Parser key \".+?\": )?.*?given class_path '(.+?)': (.*?)(?: - (?:Expected|Not) |$)"
_SAID = (
    (r"the following arguments are required: (.*)", r"\1 is required"),
    (r"argument (--[\w.]*).*: expected one argument", r"\1 needs a value"),
    (r"argument (--[\w.]*).*: ignored explicit argument.*", r"\1 takes no value"),
    (r"unrecognized arguments: (\S*).*", r"did not expect '\1'; did you mean '--config \1'?"),
    (r'Parser key "(.+?)":', r"\1:"),
    (r"<class '(?:\w+\.)*(\w+)'>", r"\1"),
    (r"Not of type (\w+): (?:.*: ')?(.*?)(?:'| does not .*)$", r"Subtypes: [\1] value: \2"),
    (r"Expected an? (.*?)\. Got value: (.*)", r"Subtypes: [\1] value: \2"),
)
"""What jsonargparse says, and how we say it, one after the other."""


def _explained(message: str, known: set[str], schema: Schema) -> ConfigError:
    """What jsonargparse says in many lines and of classes, in one line and in words."""
    if found := re.fullmatch(_UNKNOWN, message, re.DOTALL):
        return _unknown(re.split("[ =]", found[1] or found[2])[0], known, schema)
    line = " ".join(message.split())
    if found := re.search(_UNMADE, line):
        line = f"{found[1] or ''}{found[2]}: {found[3]}"
    for pattern, said in _SAID:
        line = re.sub(pattern, said, line)
    if found := re.fullmatch(r"(\S+): .*?Subtypes: \[(.*?)\] (?:Errors: .*)?value: (.*)", line):
        return _mistyped(*found.groups())
    return ConfigError(_short(line, LONGEST))


def _mistyped(key: str, types: str, got: str) -> ConfigError:
    """`float, NoneType` is a float or null; a word may have been meant."""
    words, kinds = re.findall("'([^']*)'", types), {**WORDS, "NoneType": "null"}
    text = re.sub(r"\w+", lambda name: kinds.get(name[0], name[0]), types)
    text = re.sub(r"(?:typing\.)?Literal\[(.*?)\]", r"\1", text)
    text = re.sub(r", (?![^\[]*\])", " or ", text)
    said = "null" if got == "None" else _short(repr(got))
    fix = did_you_mean(got, words) if words else ""
    return ConfigError(f"{key}: expected {_short(text, LONGEST)}, got {said}", fix=fix)


def _unknown(key: str, known: set[str], schema: Schema) -> ConfigError:
    """A key that is set elsewhere, is a section, stands in another section, or has another name."""
    parent, _, leaf = key.rpartition(".")
    for section, entry in schema.items():
        if isinstance(entry, Free):
            known = known | {f"{section}.{name}" for name in _arguments(entry)}
            if section == parent and leaf in entry.refused:
                return ConfigError(f"{key} cannot be set", fix=entry.refused[leaf])
    if members := sorted(name for name in known if name.startswith(f"{key}.")):
        return ConfigError(f"{key} is a section with keys of its own", fix=f"such as {members[0]}")
    same = sorted(name for name in known if name.rpartition(".")[2] == leaf)
    beside = {name for name in known if name.rpartition(".")[0] == parent} or known
    sections = () if parent else (*SWITCHES, *schema)
    near = did_you_mean(same[0] if same else key, same or {*beside, *sections})
    return ConfigError(f"unknown key {key!r}", fix=near)


def _short(text: str, most: int = 60) -> str:
    """A text that fits into a line."""
    return text if len(text) <= most else f"{text[:most]}..."
