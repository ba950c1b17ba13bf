"""Seeds are addresses: a draw is named by (run seed, purpose, round, client), never by history.

So nothing random is saved to resume a run, and it does not matter which process a client runs in.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def address(seed: int, *path: int | str) -> int:
    """A 63-bit seed for the place `path` of the run with this `seed`; the same on every machine."""
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def forked(seed: int) -> Iterator[None]:
    """Draw from torch's generators seeded with `seed`, and leave them as they were found.

    Without an accelerator the CPU's alone is seeded: for each of the others torch would write down
    the whole call stack, a millisecond every time. Those of an accelerator are seeded and not put
    back: to read them would wake it, and nobody draws there without an address.
    """
    with torch.random.fork_rng(devices=[]):
        everywhere = torch.accelerator.is_available()
        (torch.manual_seed if everywhere else torch.default_generator.manual_seed)(seed)
        yield


@contextmanager
def settled() -> Iterator[None]:
    """Inside, code of the user's own draws the same at every start, also from NumPy and Python."""
    plain, array = random.getstate(), np.random.get_state()  # noqa: NPY002 (theirs may draw there)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    try:
        with forked(0):
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(array)  # noqa: NPY002


def generator(seed: int, *path: int | str) -> torch.Generator:
    """A CPU generator of its own, seeded with the address `path`."""
    return torch.Generator().manual_seed(address(seed, *path))
