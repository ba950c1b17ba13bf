"""`python -m fedbnn.federation.engines.worker PARENT`: the client's side in a process of its own, for `processes`.

Frames come on stdin and leave on what was stdout; whatever prints goes to stderr. The process ends with its
parent, however that ends: the kernel kills it, and the end of stdin ends it at once, even in the middle of a fit.
"""

import ctypes
import importlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from fedbnn.federation.engines import Worker, frames
from fedbnn.federation.engines.answers import answer
from fedbnn.federation.engines.frames import Frame
from fedbnn.messages import Failure, FitResult

_PR_SET_PDEATHSIG = 1
_EASY_PREY = "500"


def main() -> None:
    """Compose the client's side once, then answer until stdin ends."""
    out = _claim_stdout()
    _end_with_parent(int(sys.argv[1]))
    sys.excepthook = _reporting(out)
    torch.set_num_threads(1)
    inbox: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, inbox), daemon=True).start()
    hello = inbox.get()
    worker = compose(hello.head["entry"], hello.head["config"])
    _send(out, Frame({"kind": "ready"}))
    _serve(worker, inbox, out)


def compose(entry: str, config: Mapping[str, Any]) -> Worker:
    """ExpectedUpdate `module:function` with the configuration."""
    module, _, function = entry.partition(":")
    worker: Worker = getattr(importlib.import_module(module), function)(config)
    return worker


def _serve(worker: Worker, inbox: "queue.SimpleQueue[Frame]", out: BinaryIO) -> None:
    """Each order comes once, then the clients that shall follow it."""
    order = b""
    while True:
        frame = inbox.get()
        if frame.head["kind"] == "order":
            order = frame.blob
        else:
            private = frame.blob if frame.head["private"] else None
            _send(out, _as_frame(answer(worker, order, frame.head["client"], private)))


def _as_frame(result: FitResult | Failure) -> Frame:
    if isinstance(result, Failure):
        return Frame({"kind": "failure", "reason": result.reason})
    head = {
        "kind": "reply",
        "seconds": result.seconds,
        "inner": result.inner,
        "update": len(result.update),
    }
    return Frame(
        {**head, "private": result.private is not None}, result.update + (result.private or b"")
    )


def _send(out: BinaryIO, frame: Frame) -> None:
    for part in frame.parts():
        out.write(part)
    out.flush()


def _listen(stream: BinaryIO, inbox: "queue.SimpleQueue[Frame]") -> None:
    """Pass frames on; when the parent is gone there is nobody left to work for."""
    while (frame := frames.read(stream)) is not None:
        inbox.put(frame)
    os._exit(0)


def _claim_stdout() -> BinaryIO:
    """The pipe to the parent for frames alone; prints of any library go to stderr."""
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return pipe


def _end_with_parent(parent: int) -> None:
    """Die with the parent, never by Ctrl-C meant for it, and before it when memory runs out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        Path("/proc/self/oom_score_adj").write_text(_EASY_PREY)
    if os.getppid() != parent:
        os._exit(0)


def _reporting(out: BinaryIO) -> Any:
    """An excepthook that tells the parent why this process cannot work, beside the usual traceback."""

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        _send(out, Frame({"kind": "broken", "reason": f"{kind.__name__}: {error}"[:400]}))
        sys.__excepthook__(kind, error, trace)

    return report


if __name__ == "__main__":
    main()
