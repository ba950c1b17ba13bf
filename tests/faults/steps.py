"""Calls that change the disk, counted, so that a process can end right after any one of them."""

import os
from collections.abc import Callable
from typing import Any

CALLS = ("open", "fsync", "replace", "rename", "mkdir", "unlink", "rmdir")


def ending_after(count: int, end: Callable[[], None]) -> dict[str, Callable[..., Any]]:
    """Replacements by name for functions of `os`: the `count`-th call is followed by `end`."""
    calls = iter(range(1, 10**9))

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            result = call(*args, **options)
            if next(calls) == count:
                end()
            return result

        return wrapped

    return {name: counted(getattr(os, name)) for name in CALLS}
