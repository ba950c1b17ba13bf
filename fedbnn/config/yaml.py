"""YAML as people expect it: 1e-3 is a number, off a word, a key stands once, nothing blows up.

The scalars are those of YAML 1.2 (null, true, false, integers, floats); everything else is text.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from fedbnn.errors import ConfigError, did_you_mean

MAX_BYTES = 2**20
_PLACES = (Path(__file__).parents[1] / "conf", Path(__file__).parents[2] / "conf")
CONF = next(filter(Path.is_dir, _PLACES), _PLACES[0])
"""The configurations that come with the project: below the package, or beside it in a clone."""
_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_SCALARS = (
    ("tag:yaml.org,2002:null", re.compile(r"^(~|null|Null|NULL|)$")),
    ("tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$")),
    ("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$|^0x[0-9a-fA-F]+$")),
    ("tag:yaml.org,2002:float", re.compile(f"^({_FLOAT})$")),
)


class _Loader(yaml.SafeLoader):
    """A safe loader with the scalars of YAML 1.2, without aliases and without repeated keys."""

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        """Refuse aliases: a few of them nested are a file of gigabytes."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            problem = "aliases (*name) are not supported"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that stands twice, and a key that is not a word."""
        seen: set[str] = set()
        for key, _ in node.value:
            name = self.construct_object(key)
            if not isinstance(name, str) or name in seen:
                wrong = "stands twice" if isinstance(name, str) else "is not a word"
                problem = f"the key {name!r} {wrong}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes plain values so that `parse` reads the same ones back, without aliases."""

    def ignore_aliases(self, data: object) -> bool:
        """Write a value that occurs twice, twice."""
        return True


def _text_node(dumper: _Dumper, text: str) -> ScalarNode:
    """Text with control characters or odd line ends goes in double quotes, which escape them."""
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _list_node(dumper: _Dumper, values: list[Any]) -> SequenceNode:
    """A list of scalars stands on one line."""
    nested = any(isinstance(value, dict | list) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=not nested)


_Loader.yaml_implicit_resolvers = {None: list(_SCALARS)}
_Dumper.add_representer(str, _text_node)
_Dumper.add_representer(list, _list_node)
_Dumper.add_multi_representer(float, _Dumper.represent_float)  # the ranges of fedbnn.config.schema
_Dumper.add_multi_representer(int, _Dumper.represent_int)
for _tag, _pattern in _SCALARS:
    _Dumper.add_implicit_resolver(_tag, _pattern, None)


def parse(text: str, where: str) -> Any:
    """The value of a YAML text; `where` names it in the error."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        what = f"not valid YAML: {error.problem or error.context}"
        raise ConfigError(what, where + line) from error
    except RecursionError as error:
        raise ConfigError("not valid YAML: nested too deeply", where) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"not valid YAML: {error}", where) from error


def packaged() -> dict[str, Path]:
    """The files of conf/ by their bare names."""
    return {path.stem: path for path in sorted(CONF.rglob("*.yaml"))}


def find(name: str) -> Path:
    """A file, or the one in conf/ that a bare name such as `quickstart` stands for."""
    known = packaged()
    if Path(name).is_file() or Path(name).suffix or len(Path(name).parts) != 1:
        return Path(name)
    if name not in known:
        raise ConfigError(f"there is no configuration {name!r}", fix=did_you_mean(name, known))
    return known[name]


def read(path: Path) -> dict[str, Any]:
    """The mapping in a configuration file of reasonable size."""
    where = str(path)
    if not path.is_file():
        fix = did_you_mean(where, map(str, path.parent.glob("*.yaml")))
        raise ConfigError(f"there is no configuration file {path}", fix=fix)
    if path.stat().st_size > MAX_BYTES:
        what = f"the configuration is larger than {MAX_BYTES} bytes"
        raise ConfigError(what, where, "is this the right file?")
    try:
        content = parse(path.read_text(encoding="utf-8"), where)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration cannot be read: {error}", where) from error
    if isinstance(content, dict):
        return content
    kind = "empty" if content is None else f"a {type(content).__name__}, not a mapping of keys"
    fix = "the examples in conf/ show what belongs there"
    raise ConfigError(f"the configuration is {kind}", where, fix)


def dump(values: Mapping[str, Any]) -> str:
    """The text that `parse` reads back as the same values, keys in the order given."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
