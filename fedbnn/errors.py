"""What a user can cause ends in one line (what, where, what to do) and a documented exit code."""

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from enum import IntEnum
from pathlib import Path
from typing import TextIO

SHOWN = 12


class Exit(IntEnum):
    """Exit codes of every command; `fedbnn explain CODE` prints the help text of each."""

    DONE = 0
    CONFIGURATION = 2
    DATA = 3
    RUN_DIRECTORY = 4
    FEDERATION = 5
    NUMERICAL = 6
    PRIVACY = 7
    INTERRUPTED = 130
    TERMINATED = 143


HELP: Mapping[Exit, str] = {
    Exit.DONE: "The command did what was asked.",
    Exit.CONFIGURATION: """The configuration cannot be what you meant: an unknown key or name, a
value of the wrong type or out of range, values that contradict each other, or a YAML file that
cannot be read. Nothing was started and no run directory was made. `fedbnn train --help` lists every
key; `--print_config` shows what your file and flags add up to.""",
    Exit.DATA: """A data set is missing, damaged, or not what the configuration says. The
message names the file or folder. `fedbnn data` lists the data sets and where each belongs; `fedbnn
data NAME --download` fetches one; `--stream.data_dir DIR` points to another folder.""",
    Exit.RUN_DIRECTORY: """The run directory cannot be read, written, locked or resumed: another
process uses it, the disk is full, its rounds are damaged, or it was started with another
configuration. Rounds that were committed are still there. Choose another `--run_dir`, free the
disk, or resume with the configuration the run was started with.""",
    Exit.FEDERATION: """Too few clients sent an update that counts. The model is the
one of the last committed round. log.txt names each client with its reason, and rejected/ keeps the
updates that were refused. When the clients are back, `--resume DIR` goes on from that round.""",
    Exit.NUMERICAL: """A local fit or a fold left the numbers a computer can hold. The model is
the one of the last committed round. A smaller `--client.lr` is the usual cure.""",
    Exit.PRIVACY: """The next round would spend more than `privacy.epsilon` allows. The model is
the one of the last committed round, and what it spent stands in metrics.jsonl. Going on needs
another budget, which is another run: more `privacy.noise`, fewer rounds, or more clients.""",
    Exit.INTERRUPTED: """You pressed Ctrl-C (SIGINT). Every committed round is kept; `fedbnn
train --resume DIR` goes on with the next one and ends in the same bytes as a run that was never
stopped.""",
    Exit.TERMINATED: """The process was asked to stop (SIGTERM), by a scheduler or a shutdown.
Every committed round is kept; `fedbnn train --resume DIR` goes on with the next one.""",
}


class FedBNNError(Exception):
    """A failure with a name: `what` happened, `where`, and what helps (`fix`)."""

    code: Exit = Exit.CONFIGURATION

    def __init__(self, what: str, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__(what, where, fix)

    def __str__(self) -> str:
        """One line, in the order a reader needs it."""
        where = f" ({self.where})" if self.where else ""
        fix = f"; {self.fix}" if self.fix else ""
        return escaped(" ".join(f"{self.what}{where}{fix}".split()))


class ConfigError(FedBNNError):
    """The configuration cannot be what the user meant."""


class DataError(FedBNNError):
    """A data set is missing, damaged or not what the configuration says."""

    code = Exit.DATA


class RunDirectoryError(FedBNNError):
    """The run directory cannot be read, written, locked or resumed."""

    code = Exit.RUN_DIRECTORY


class FederationError(FedBNNError):
    """Too few clients answered with an update that counts."""

    code = Exit.FEDERATION


class NumericalError(FedBNNError):
    """A fold or a local fit left the numbers a computer can hold."""

    code = Exit.NUMERICAL


class PrivacyError(FedBNNError):
    """The privacy budget does not allow another round."""

    code = Exit.PRIVACY


def escaped(text: str) -> str:
    """The text with every character that a terminal might obey written out, as in `\\x1b`."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def called() -> str:
    """How training is called here: by the script of a clone, or by the command."""
    return "python train.py" if Path(sys.argv[0]).name == "train.py" else "fedbnn train"


def silence(file: TextIO) -> None:
    """Let what is buffered for a reader who has gone, and all that follows, go nowhere."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error: the nearest known word, or the known words, or nothing."""
    names = sorted(known)
    folded = {name.lower(): name for name in names}
    near = get_close_matches(word.lower(), folded, n=1, cutoff=0.6)
    if near:
        return f"did you mean {folded[near[0]]!r}?"
    shown = [*names[:SHOWN], "..."] if len(names) > SHOWN else names
    return f"known: {', '.join(shown)}" if shown else ""


def explain(code: int) -> str:
    """The help text of one exit code."""
    if code not in set(Exit):
        known = ", ".join(str(int(one)) for one in Exit)
        raise ConfigError(f"there is no exit code {code}", fix=f"known: {known}")
    name = Exit(code).name.lower().replace("_", " ")
    return f"{code:d} ({name}): {' '.join(HELP[Exit(code)].split())}"
