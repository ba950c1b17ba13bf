"""What lies below torch: Python's garbage, the memory of the C library, what torchvision lacks.

Garbage. The libraries are half a million objects. Python searches them for garbage while they are
imported, while clients train and figures are drawn, in every fork, and at the exit: of ten seconds
that a command takes to start and to end, nearly three.

Memory. What was given back is kept, so that it need not be paged in again. Measured on
paper_resnet: a step takes 18 % more without `keep_memory`, which saves 20,000 page faults; to page
in again what `trim_memory` returned takes as long as two steps, and without it resident memory
grows from round to round, since what is free between blocks in use is never returned by itself.

torchvision. Its CUDA wheel can be imported beside a CPU-only torch: that wheel registers fake
kernels for operators which its compiled library would have declared; where the library cannot load,
the import dies with "operator torchvision::nms does not exist". Declaring the two schemas first is
all it needs. Nothing happens where torchvision is whole, nor before torchvision is imported, by
whomever. So `import fedbnn` imports this file, which imports neither.
"""

import atexit
import ctypes
import gc
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
KEEP_BYTES = 2**30
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("nms", "qnms")
HANDLES: list[Any] = []
"""What keeps the declarations alive."""


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
    """What there is at the end of this stays until the process ends, and is never searched.

    What comes later is not searched when the process ends, for then all of it goes.
    """
    with postponed():
        yield
        gc.freeze()
    atexit.register(gc.freeze)


def keep_memory() -> bool:
    """Ask glibc to serve all blocks from its heap and keep 1 GiB that is free; False without it."""
    adjust = _glibc("mallopt")
    return bool(adjust and adjust(_MMAP_MAX, 0) and adjust(_TRIM_THRESHOLD, KEEP_BYTES))


def trim_memory() -> None:
    """Return what is free, for the end of a round."""
    if give_back := _glibc("malloc_trim"):
        give_back(0)


def resident(process: int | str = "self") -> float:
    """Bytes of a process in memory; 0 where the system does not tell, or it has ended."""
    with suppress(OSError, IndexError):
        pages = Path(f"/proc/{process}/statm").read_text().split()[1]
        return float(pages) * os.sysconf("SC_PAGE_SIZE")
    return 0.0


def peak(process: int | str = "self") -> float:
    """The most bytes of a process that were in memory at once; 0 as above."""
    with suppress(OSError, IndexError):
        said = Path(f"/proc/{process}/status").read_text().split("VmHWM:")[1]
        return 1024 * float(said.split()[0])
    return 0.0


def _glibc(name: str) -> Any:
    """A function of glibc, or None where that is not the C library."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None


def _library_loads() -> bool:
    """Whether torchvision's own compiled library loads, which declares the operators itself."""
    import torch

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True
    for file in Path(spec.origin).parent.glob("_C.*so"):
        with suppress(OSError):
            torch.ops.load_library(file)
            return True
    return False


def declare_missing() -> list[Any]:
    """Declare torchvision's nms operators if they are missing; the handles keep them alive."""
    import torch

    missing = [name for name in _OPERATORS if not hasattr(torch.ops.torchvision, name)]
    if not missing or _library_loads():
        return []
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in missing:
        library.define(name + _SCHEMA)
    return [library]


class _BeforeTorchvision:
    """Finds nothing, but is asked first: when torchvision is, the operators are declared."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> None:
        """Step aside, then declare."""
        if name == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)
            HANDLES.extend(declare_missing())


if "torchvision" not in sys.modules:
    sys.meta_path.insert(0, _BeforeTorchvision())
