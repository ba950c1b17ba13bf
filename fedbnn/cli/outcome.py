"""How a command ends: an expected failure as one line and its exit code, an unexpected one in the log of the run."""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from fedbnn.errors import Exit, FedBNNError

UNEXPECTED = 1


def ended(action: Callable[[], int]) -> int:
    """Run a command and give its exit code; a failure with a name becomes one line on standard error."""
    try:
        return action()
    except FedBNNError as error:
        sys.stderr.write(f"error: {error}\n")
        return int(error.code)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return int(Exit.INTERRUPTED)


@contextmanager
def traceback_to(log: Path) -> Iterator[None]:
    """Errors nobody expected inside this block leave their traceback in `log`, and one line on the screen."""

    def record(
        kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Leave ends that are expected to others; write down the rest."""
        if error is None or isinstance(error, FedBNNError) or not isinstance(error, Exception):
            return
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exception(kind, error, where, file=file)
        sys.stderr.write(
            f"error: unexpected {type(error).__name__}; the traceback is in {log}; please report it\n"
        )
        raise SystemExit(UNEXPECTED)

    with ExitStack() as stack:
        stack.push(record)
        yield
