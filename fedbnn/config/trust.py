"""What a run directory may name without being trusted: to import is to execute.

Whoever trains says by that what is imported. A run directory that is only looked at may come from a
stranger: of the import paths in it nothing is imported, unless it is a constructor of a library,
or is in a module of the program that looks, which has imported it already. Installed packages are
no such modules, imported or not: torch alone has functions that make a network of source code.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from fedbnn.errors import RunDirectoryError

LIBRARIES = re.compile(r"fedbnn\.networks\.pretrained:\w+|torchvision\.models:[a-z]\w*")
"""Constructors that execute nothing they are given; those of timm read pickles."""
FOLDER = "folder:"
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
FIX = "if you trust it: --trust, or trust=True from Python, where importing it first does, too"


def refuse_code(values: Mapping[str, Any], where: Path) -> None:
    """Refuse values of a run directory that name something to import which nobody vouches for."""
    stream = values.get("stream")
    sources = stream.get("sources") if isinstance(stream, Mapping) else None
    for text in _texts([values.get("network"), values.get("method"), sources]):
        imports = ":" in text and not text.startswith(FOLDER)
        if (imports or _DOTTED.fullmatch(text)) and not _known(text):
            raise RunDirectoryError(f"the run asks to import {text!r}", str(where), FIX)


def _texts(value: Any) -> Iterator[str]:
    """Every text within that may be imported: not names of layers, nor of files in no package."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if key != "trained" and (key != "weights" or ":" in str(part)):
                yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)


def _known(path: str) -> bool:
    """Whether it is of a library, or of a module that is the program's own and imported."""
    if LIBRARIES.fullmatch(path):
        return True
    module, _, name = path.partition(":")
    if module not in sys.modules or not name.isidentifier():
        return False
    top = module.partition(".")[0]
    return top not in sys.stdlib_module_names and top not in packages_distributions()
