"""The words after a command: a few switches, and `--section.key value` for any key of the configuration."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from fedbnn.errors import ConfigError

SWITCHES: Mapping[str, str] = MappingProxyType(
    {
        "help": "show this text and stop",
        "print_config": "print the complete configuration and stop",
        "dry_run": "show the schedule of the stream and train nothing",
    }
)
VALUES: Mapping[str, str] = MappingProxyType(
    {
        "config": "FILE: the YAML file to start from",
        "resume": "DIR or last: go on with an interrupted run",
    }
)


@dataclass(frozen=True)
class Flags:
    """What the command line says: the switches, and the keys it sets, as text, in the order given."""

    config: str | None = None
    resume: str | None = None
    help: bool = False
    print_config: bool = False
    dry_run: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)


def read(argv: Sequence[str]) -> Flags:
    """Split the command line into switches and keys; which keys exist is not known here."""
    switches: dict[str, bool] = {}
    values: dict[str, str] = {}
    keys: dict[str, str] = {}
    for name, value in _pairs(argv):
        if value is None:
            switches[name] = True
        elif name in VALUES:
            values[name] = value
        else:
            keys[name] = value
    return Flags(**values, **switches, keys=keys)  # type: ignore[arg-type]


def _pairs(argv: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """(name, value) of each flag; a switch has no value."""
    words = iter("--help" if word == "-h" else word for word in argv)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            raise ConfigError(
                f"did not expect {word!r}", "command line", f"did you mean '--config {word}'?"
            )
        if name in SWITCHES:
            if equals:
                raise ConfigError(f"--{name} takes no value", "command line")
            yield name, None
        else:
            yield name, value if equals else _value(name, next(words, None))


def _value(name: str, word: str | None) -> str:
    """The word after a flag, which must not be a flag itself."""
    if word is None or word.startswith("--"):
        raise ConfigError(f"--{name} needs a value", "command line", _switch_meant(name))
    return word


def _switch_meant(name: str) -> str:
    """A hint for `--dry-run`: the switch is spelled `--dry_run`."""
    switch = name.replace("-", "_")
    return f"did you mean '--{switch}'?" if switch in SWITCHES else ""
