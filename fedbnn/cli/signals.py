"""SIGINT and SIGTERM belong to us: both end the run by one exception that no library takes for its own.

Lightning turns a KeyboardInterrupt into `sys.exit(1)` and, left alone, a SIGTERM into a fit that ends as if it were
done. It keeps a SIGTERM handler that was there before it and calls it after its own, and it passes on whatever is
not a KeyboardInterrupt; so a handler that raises `Stopped` is enough, also in the middle of a fit.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from fedbnn.errors import Exit

CODES = {signal.SIGINT: Exit.INTERRUPTED, signal.SIGTERM: Exit.TERMINATED}


class Stopped(BaseException):
    """The user, or the system, asked the run to end."""

    def __init__(self, code: Exit) -> None:
        self.code = code
        super().__init__(code)

    def message(self, run_dir: Path | None, round: int) -> str:
        """What happened and how to go on, in one line."""
        name = {code: number.name for number, code in CODES.items()}[self.code]
        where = (
            f" after round {round} was committed"
            if round
            else " before the first round was committed"
        )
        return f"stopped by {name}{where}" + (
            f"; go on with: python train.py --resume {run_dir}" if run_dir else ""
        )


@dataclass
class Signals:
    """Which signal has arrived, if any: `check` raises it again where a library has lost the exception."""

    received: Exit | None = None

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """The first signal raises `Stopped`; a second one ends the process at once, which loses nothing committed."""
        code = CODES[signal.Signals(number)]
        if self.received is not None:
            os._exit(code)
        self.received = code
        raise Stopped(code)

    def check(self) -> None:
        """Raise `Stopped` if a signal has arrived."""
        if self.received is not None:
            raise Stopped(self.received)


@contextmanager
def owned() -> Iterator[Signals]:
    """Handle SIGINT and SIGTERM in here, and leave the handlers afterwards as they were found."""
    signals = Signals()
    before = {number: signal.signal(number, signals.handle) for number in CODES}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
