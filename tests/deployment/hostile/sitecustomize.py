"""What makes a site hostile: with this folder on its path, its clients fail in the way of `FAULT`.

Python imports this file by its name when it starts; only the process of an order is touched.
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

FAULT = os.environ.get("FAULT", "")
MEMORY = Path(os.environ.get("FAULT_MEMORY", ""))
LONG = 600.0


def first(order: Any) -> bool:
    from fedbnn.protocol.messages import FitInstruction

    return FitInstruction.from_bytes(order.payload).round == 1


def cut(honest: Any, order: Any) -> Any:
    """In the first round the end of the update is missing."""
    answer = honest()
    return replace(answer, update=answer.update[:-7]) if first(order) else answer


def echo(honest: Any, order: Any) -> Any:
    """Always the update of the first round."""
    if not first(order):
        return replace(honest(), update=MEMORY.read_bytes())
    MEMORY.write_bytes((answer := honest()).update)
    return answer


def deaf(honest: Any, order: Any) -> Any:
    """The app never answers, and keeps no deadline."""
    time.sleep(LONG)


class Hanging:
    """A client that never ends its training."""

    def perform(self, *_: Any) -> None:
        time.sleep(LONG)


def disturb() -> None:
    """Put the fault in place."""
    from flwr.supernode.runtime import run_clientapp

    from fedbnn.federation.engines.flower import client

    answered, push = client.answered, run_clientapp.push_message

    def faulty(entry: str, order: Any, node: Any) -> Any:
        return globals()[FAULT](lambda: answered(entry, order, node), order)

    def twice(runtime: Any, message: Any, context: Any) -> None:
        push(runtime, message, context)
        message.metadata.__dict__["_created_at"] += 0.001
        push(runtime, message, context)

    if FAULT == "twice":
        run_clientapp.push_message = twice
    elif FAULT == "hang":
        client._worker = lambda *_: Hanging()
    else:
        client.answered = faulty


class Watch:
    """Waits for the app: what is imported before it delays the first sign of life for Flower."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        if name == "fedbnn_app.client":
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            disturb()


if FAULT and any("flwr-clientapp" in word for word in sys.orig_argv):
    sys.meta_path.insert(0, Watch())  # type: ignore[arg-type]
