"""The command `fedbnn`: finds the subcommand and sees that it ends with a documented exit code.

Two subcommands are about all the others: `fedbnn explain`, and `fedbnn completion`, whose script is
plain text made of what `--help` says, so that the shell starts no Python at a press of tab:

    fedbnn completion bash > ~/.local/share/bash-completion/completions/fedbnn
    fedbnn completion zsh >> ~/.zshrc
"""

import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from io import StringIO
from types import ModuleType
from typing import Any, NoReturn

from fedbnn import __version__
from fedbnn.errors import ConfigError, Exit, FedBNNError, called, did_you_mean, explain, silence
from fedbnn.machine import kept

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
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
SCRIPT = """\
_fedbnn() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD - 1]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then words="{commands}"; else
        case "$before" in
{values}
            *) case "${{COMP_WORDS[1]}}" in
{flags}
            esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    [ ${{#COMPREPLY[@]}} -gt 0 ] || COMPREPLY=($(compgen -f -- "$current"))
}}
complete -o filenames -F _fedbnn fedbnn
"""


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
    if name in ABOUT_ALL:
        return ABOUT_ALL[name]
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


def _complete(argv: Sequence[str]) -> int:
    """Print the script for a shell."""
    parser = Arguments("completion", "Print a script that completes fedbnn in a shell.")
    parser.add_argument("shell", choices=("bash", "zsh"), help="which shell")
    shell = parser.parse_args(argv).shell
    print((ZSH if shell == "zsh" else "") + script(), end="")
    return 0


def script() -> str:
    """What bash reads; zsh does so, too."""
    from fedbnn.cli.compose import SCHEMA
    from fedbnn.config import yaml
    from fedbnn.config.schema import Named

    named = {f"--{key}": [*one.choices] for key, one in SCHEMA.items() if isinstance(one, Named)}
    values = {"--config": [*yaml.packaged()], **named}
    known = {command: flags_of(command) for command in COMMANDS}
    parts = {"values": _cases(values, 12), "flags": _cases(known, 16)}
    return SCRIPT.format(commands=" ".join(COMMANDS), **parts)


def flags_of(command: str) -> list[str]:
    """The flags that the help of a command names."""
    with redirect_stdout(StringIO()) as text, suppress(SystemExit):
        subcommand(command)(["--help"])
    return sorted(set(re.findall(r"--[a-z][\w.]*\w", text.getvalue())))


def _cases(named: Mapping[str, Sequence[str]], indent: int) -> str:
    """Branches of a `case`, one for each word before."""
    return "\n".join(f'{" " * indent}{one}) words="{" ".join(named[one])}" ;;' for one in named)


ABOUT_ALL = {"explain": _explain, "completion": _complete}
"""Commands about all commands."""


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
