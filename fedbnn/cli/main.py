"""The command `fedbnn`: finds the subcommand and sees that it ends with a documented exit code."""

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from fedbnn import __version__
from fedbnn.errors import ConfigError, Exit, FedBNNError, called, did_you_mean, explain, silence
from fedbnn.machine.garbage import kept

COMMANDS = {
    "train": "train a model; the same as python train.py",
    "compare": "methods x seeds on one stream: tables with deviations, figures, a report",
    "report": "write the page of a run again, or of several runs together",
    "audit": "show who sent what, what was refused, and how far each client moved the model",
    "expel": "play a run again as if a client had not been asked since a round",
    "data": "list the data sets and where they belong, fetch and prepare them",
    "predict": "say what a trained model sees in pictures, and how sure it is",
    "bench": "measure what things cost: a step, engines, overhead, memory",
    "completion": "print a script by which bash or zsh completes all this",
    "explain": "say what an exit code means and what helps",
}
WELCOME = """\
FedBNN trains one model over many clients whose data drift. Three commands to begin with:

  {0} --config quickstart            train four methods on small digits; no download
  {0} --config quickstart --dry_run  show which client meets which classes when
  {0} --config quickstart --help     list every setting; each is a key in YAML and a flag
"""
"""What `fedbnn train` says without words, before anything large is imported."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fedbnn ARGV`; `fedbnn explain` says what its exit codes mean."""
    words = sys.argv[1:] if argv is None else list(argv)
    return ended(lambda: _run(words))


def ended(action: Callable[[], int]) -> int:
    """Run a command and give its exit code; a failure with a name is one line on standard error."""
    try:
        return action()
    except FedBNNError as error:
        sys.stderr.write(f"error: {error}\n")
        return int(error.code)
    except BrokenPipeError:
        silence(sys.stdout)
        return int(Exit.DONE)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return int(Exit.INTERRUPTED)


def _run(words: Sequence[str]) -> int:
    """Answer what concerns the command as a whole, and hand the rest to the subcommand."""
    if not words or words[0] in ("-h", "--help"):
        lines = [f"  fedbnn {name:<10} {summary}" for name, summary in COMMANDS.items()]
        print("\n".join(["usage: fedbnn COMMAND ...", "", *lines, ""]))
        print("fedbnn COMMAND --help says more.")
        return 0
    if words[0] == "--version":
        print(f"fedbnn {__version__}")
        return 0
    if list(words) == ["train"]:
        sys.stdout.write(WELCOME.format(called()))
        return 0
    return subcommand(words[0])(words[1:])


def subcommand(name: str) -> Callable[[Sequence[str]], int]:
    """What runs a subcommand; only its own file is imported."""
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {name!r}", "fedbnn", did_you_mean(name, COMMANDS))
    if name == "explain":
        return _explain
    command: Callable[[Sequence[str]], int] = _imported(f"fedbnn.cli.{name}").main
    return command


def _imported(file: str) -> ModuleType:
    """A file with all that it imports; what a program imported before is not ours to keep."""
    if file in sys.modules:
        return sys.modules[file]
    with kept():
        return import_module(file)


def _explain(argv: Sequence[str]) -> int:
    """Print the help text of one exit code, or of all."""
    parser = Arguments("explain", "Say what an exit code means and what helps.")
    parser.add_argument("code", type=int, nargs="?", help="the exit code; without it all of them")
    code = parser.parse_args(argv).code
    print("\n\n".join(explain(one) for one in Exit) if code is None else explain(code))
    return 0


class Arguments(ArgumentParser):
    """An ArgumentParser whose errors are ours, so they end in one line and exit code 2."""

    def __init__(self, command: str, about: str) -> None:
        super().__init__(prog=f"fedbnn {command}", description=about, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """A flag may be spelt with - or _."""
        return super().parse_known_args([*spelled(args)], namespace)

    def parse_settings(self, argv: Sequence[str]) -> Namespace:
        """With flags it does not know as settings, `--KEY VALUE` like `--set KEY=VALUE`."""
        known: Namespace
        known, rest = self.parse_known_args(argv)
        words = iter(rest)
        for word in words:
            if not word.startswith("--"):
                self.error(f"unrecognized arguments: {word}")
            if "=" not in word and (value := next(words, None)) is None:
                self.error(f"{word} is no switch of this command, and a setting needs a value")
            known.set.append(pair(word[2:] if "=" in word else f"{word[2:]}={value}"))
        return known

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise ConfigError(message, self.prog, f"see {self.prog} --help")


def flags(settings: Mapping[str, str]) -> list[str]:
    """Settings as the words of a command line."""
    return [word for key, value in settings.items() for word in (f"--{key}", value)]


def spelled(argv: Sequence[str]) -> Iterator[str]:
    """Flags in one spelling: `--dry-run` is `--dry_run`."""
    for word in argv:
        flag, equals, value = word.partition("=")
        is_flag = flag.startswith("--") and len(flag) > 2
        yield f"--{flag[2:].replace('-', '_')}{equals}{value}" if is_flag else word


def pair(text: str) -> tuple[str, str]:
    """Key and value of KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return key, value


def words(text: str) -> list[str]:
    """Words with commas between them, each once."""
    found = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not found:
        raise ArgumentTypeError("expected at least one word, or several with commas between them")
    return found


def numbers(text: str) -> list[int]:
    """Whole numbers with commas between them, each once."""
    return [int(word) for word in words(text)]
