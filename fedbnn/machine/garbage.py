"""When Python looks for garbage: not in what is there for good.

The libraries are half a million objects. Python searches them for garbage while they are imported,
while clients train and figures are drawn, in every fork, and at the exit: of ten seconds that a
command takes to start and to end, nearly three.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def postponed() -> Iterator[None]:
    """Nobody looks for garbage in here; afterwards all is as it was."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def kept() -> Iterator[None]:
    """What there is at the end of this stays until the process ends, and is never searched."""
    with postponed():
        yield
        gc.freeze()
