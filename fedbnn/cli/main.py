"""The command `fedbnn`: finds the subcommand and sees that it ends with a documented exit code."""

import sys
from collections.abc import Sequence
from importlib import import_module

from fedbnn import __version__
from fedbnn.cli import COMMANDS
from fedbnn.cli.outcome import ended
from fedbnn.errors import ConfigError
from fedbnn.suggest import did_you_mean


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fedbnn ARGV`; the exit code is documented in fedbnn.cli.explain."""
    words = sys.argv[1:] if argv is None else list(argv)
    return ended(lambda: _run(words))


def _run(words: Sequence[str]) -> int:
    """Answer what concerns the command as a whole, and hand the rest to the subcommand."""
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if words[0] == "--version":
        print(f"fedbnn {__version__}")
        return 0
    return _subcommand(words[0], words[1:])


def _subcommand(name: str, words: Sequence[str]) -> int:
    """Import the subcommand's file, and only that, and run it."""
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {name!r}", "fedbnn", did_you_mean(name, COMMANDS))
    return int(import_module(f"fedbnn.cli.{name}").main(words))


def _usage() -> str:
    """The list of subcommands."""
    lines = [f"  fedbnn {name:<9} {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        ["usage: fedbnn COMMAND ...", "", *lines, "", "fedbnn COMMAND --help says more."]
    )
