"""What a user can cause ends in one line: what happened, where, and what to do; with a documented exit code."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every command; `fedbnn explain CODE` prints the help text of each."""

    DONE = 0
    CONFIGURATION = 2
    DATA = 3
    RUN_DIRECTORY = 4
    FEDERATION = 5
    NUMERICAL = 6
    INTERRUPTED = 130
    TERMINATED = 143


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
        return " ".join(f"{self.what}{where}{fix}".split())


class ConfigError(FedBNNError):
    """The configuration cannot be what the user meant."""

    code = Exit.CONFIGURATION


class DataError(FedBNNError):
    """A data set is missing, damaged or not what the configuration says."""

    code = Exit.DATA


class RunDirectoryError(FedBNNError):
    """The run directory cannot be read, written, locked or resumed."""

    code = Exit.RUN_DIRECTORY


class FederationError(FedBNNError):
    """Too few clients answered with an update that can be folded."""

    code = Exit.FEDERATION


class NumericalError(FedBNNError):
    """A fold or a local fit left the numbers a computer can hold."""

    code = Exit.NUMERICAL
