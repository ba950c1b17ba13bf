"""What each exit code means and what helps; `fedbnn explain 4` prints it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from fedbnn.cli.arguments import Arguments
from fedbnn.errors import ConfigError, Exit

HELP: Mapping[Exit, str] = MappingProxyType(
    {
        Exit.DONE: "The command did what was asked.",
        Exit.CONFIGURATION: """The configuration cannot be what you meant: an unknown key or name, a value of the wrong type
or out of range, values that contradict each other, or a YAML file that cannot be read. Nothing was started and no run
directory was made. `python train.py --help` lists every key; `--print_config` shows what your file and flags add up to.""",
        Exit.DATA: """A data set is missing, damaged, or not what the configuration says. The message names the file or
folder. `fedbnn data` lists the data sets and where each belongs; `fedbnn data NAME --download` fetches one;
`--stream.data_dir DIR` points to another folder.""",
        Exit.RUN_DIRECTORY: """The run directory cannot be read, written, locked or resumed: another process uses it, the
disk is full, its rounds are damaged, or it was started with another configuration. Rounds that were committed are still
there. Choose another `--run_dir`, free the disk, or resume with the configuration the run was started with.""",
        Exit.FEDERATION: """Too few clients sent an update that could be folded. The model is the one of the last committed
round. log.txt names each client with its reason, and rejected/ keeps the updates that were refused. When the clients are
back, `--resume DIR` goes on from that round.""",
        Exit.NUMERICAL: """A local fit or a fold left the numbers a computer can hold. The model is the one of the last
committed round. A smaller `--client.lr` is the usual cure.""",
        Exit.INTERRUPTED: """You pressed Ctrl-C (SIGINT). Every committed round is kept; `python train.py --resume DIR` goes
on with the next one and ends in the same bytes as a run that was never stopped.""",
        Exit.TERMINATED: """The process was asked to stop (SIGTERM), by a scheduler or a shutdown. Every committed round is
kept; `python train.py --resume DIR` goes on with the next one.""",
    }
)


def explain(code: int) -> str:
    """The help text of one exit code."""
    if code not in set(Exit):
        raise ConfigError(
            f"there is no exit code {code}",
            fix="known: " + ", ".join(str(int(known)) for known in Exit),
        )
    known = Exit(code)
    return f"{int(known)} ({known.name.lower().replace('_', ' ')}): {' '.join(HELP[known].split())}"


def explain_all() -> str:
    """The help texts of all exit codes, one a paragraph."""
    return "\n\n".join(explain(code) for code in Exit)


def main(argv: Sequence[str]) -> int:
    """Print the help text of one exit code, or of all."""
    parser = Arguments("explain", "Say what an exit code means and what helps.")
    parser.add_argument(
        "code", type=int, nargs="?", help="the exit code; all of them when left out"
    )
    code = parser.parse_args(argv).code
    print(explain_all() if code is None else explain(code))
    return 0
