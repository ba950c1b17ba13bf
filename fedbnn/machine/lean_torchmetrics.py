"""Let torchmetrics be imported without scipy.signal: half a second of every start.

It imports scipy.signal only to give it the old name of a window, `hamming`, if that is not there.
While torchmetrics is imported a placeholder that has the name stands for the module; whoever asks
it for anything else gets what the module has.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

SIGNAL = "scipy.signal"


class _Placeholder(ModuleType):
    """Stands for a module until anything but the one name is asked of it."""

    hamming = None

    def __getattr__(self, name: str) -> Any:
        """What the module has, which is imported now; who looks at all modules is not asking."""
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(SIGNAL) is self:
            del sys.modules[SIGNAL]
        return getattr(import_module(SIGNAL), name)


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Execute a module while the placeholder stands there, if nothing else does."""
    stands = sys.modules.setdefault(SIGNAL, placeholder := _Placeholder(SIGNAL))
    try:
        execute(module)
    finally:
        if stands is placeholder and sys.modules.get(SIGNAL) is placeholder:
            del sys.modules[SIGNAL]


class _BeforeTorchmetrics:
    """Finds torchmetrics as everybody does, and sees that it is executed beside a placeholder."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Step aside, find it, and wrap what executes it."""
        if name != "torchmetrics" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        found = find_spec(name)
        if found and found.loader:
            found.loader.exec_module = partial(_execute, found.loader.exec_module)  # type: ignore[method-assign]
        return found


if "torchmetrics" not in sys.modules:
    sys.meta_path.insert(0, _BeforeTorchmetrics())
