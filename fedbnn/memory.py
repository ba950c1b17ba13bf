"""Let the C library keep memory it has: a vector of all weights is then not paged in anew by every operation."""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
KEEP_BYTES, LARGEST_ON_HEAP = 2**30, 32 * 2**20


def keep() -> bool:
    """Ask glibc to serve up to 32 MiB from its heap and to return memory late; False where there is no glibc."""
    if not sys.platform.startswith("linux"):
        return False
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is None:
        return False
    return bool(adjust(_MMAP_THRESHOLD, LARGEST_ON_HEAP)) and bool(
        adjust(_TRIM_THRESHOLD, KEEP_BYTES)
    )


def trim() -> bool:
    """Give memory that is not in use back to the system; False where there is no glibc."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return bool(give_back(0)) if give_back is not None else False
