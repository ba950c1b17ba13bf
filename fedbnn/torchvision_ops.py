"""Let torchvision's CUDA wheel be imported beside a CPU-only torch.

That wheel registers fake kernels for operators which its compiled library would have declared;
where the library cannot load, the import dies with "operator torchvision::nms does not exist".
Declaring the two schemas first is all it needs. Nothing happens where torchvision is whole.
"""

import importlib.util
from contextlib import suppress
from pathlib import Path

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("nms", "qnms")


def _library_loads() -> bool:
    """Whether torchvision's own compiled library loads, which declares the operators itself."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True
    for file in Path(spec.origin).parent.glob("_C.*so"):
        with suppress(OSError):
            torch.ops.load_library(file)
            return True
    return False


def declare_missing() -> list[torch.library.Library]:
    """Declare torchvision's nms operators if they are missing; the handles keep them alive."""
    missing = [name for name in _OPERATORS if not hasattr(torch.ops.torchvision, name)]
    if not missing or _library_loads():
        return []
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in missing:
        library.define(name + _SCHEMA)
    return [library]


HANDLES = declare_missing()
