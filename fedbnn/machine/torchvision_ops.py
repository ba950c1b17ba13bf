"""Let torchvision's CUDA wheel be imported beside a CPU-only torch.

That wheel registers fake kernels for operators which its compiled library would have declared;
where the library cannot load, the import dies with "operator torchvision::nms does not exist".
Declaring the two schemas first is all it needs. Nothing happens where torchvision is whole, nor
before torchvision is imported, by whomever.
"""

import importlib.util
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("nms", "qnms")
HANDLES: list[Any] = []
"""What keeps the declarations alive."""


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
