"""`fedbnn completion bash` (or zsh): a script by which the shell completes commands and settings.

    fedbnn completion bash > ~/.local/share/bash-completion/completions/fedbnn
    fedbnn completion zsh >> ~/.zshrc

The script is plain text, made of what `--help` says: the shell starts no Python at a press of tab.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO

from fedbnn.cli.compose import SCHEMA
from fedbnn.cli.main import COMMANDS, Arguments, subcommand
from fedbnn.config import yaml
from fedbnn.config.schema import Named

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


def main(argv: Sequence[str]) -> int:
    """Print the script for a shell."""
    parser = Arguments("completion", "Print a script that completes fedbnn in a shell.")
    parser.add_argument("shell", choices=("bash", "zsh"), help="which shell")
    shell = parser.parse_args(argv).shell
    print((ZSH if shell == "zsh" else "") + script(), end="")
    return 0


def script() -> str:
    """What bash reads; zsh does so, too."""
    named = {f"--{key}": [*one.choices] for key, one in SCHEMA.items() if isinstance(one, Named)}
    values = {"--config": [*yaml.packaged()], **named}
    flags = {command: flags_of(command) for command in COMMANDS}
    parts = {"values": _cases(values, 12), "flags": _cases(flags, 16)}
    return SCRIPT.format(commands=" ".join(COMMANDS), **parts)


def flags_of(command: str) -> list[str]:
    """The flags that the help of a command names."""
    with redirect_stdout(StringIO()) as text, suppress(SystemExit):
        subcommand(command)(["--help"])
    return sorted(set(re.findall(r"--[a-z][\w.]*\w", text.getvalue())))


def _cases(words: Mapping[str, Sequence[str]], indent: int) -> str:
    """Branches of a `case`, one for each word before."""
    return "\n".join(f'{" " * indent}{one}) words="{" ".join(words[one])}" ;;' for one in words)
