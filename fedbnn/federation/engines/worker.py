"""The client's side in a process of its own, for `processes`: `python worker.py PARENT`.

Its stdin is the connection to the parent; whatever prints goes to the log. It is run as a file, so
that it is bound to its parent before anything large is imported. It ends with the parent, however
that ends: the kernel kills it, and the end of the connection ends it in the middle of a fit.
"""

import ctypes
import importlib
import json
import os
import queue
import signal
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedbnn.federation.engines import Answer, Worker

_PR_SET_PDEATHSIG = 1
_EASY_PREY = "500"
Inbox = queue.SimpleQueue[bytes]


def main() -> None:
    """Compose the client's side once, then answer until the connection ends."""
    _end_with_parent(int(sys.argv[1]))
    connection, inbox = Connection(os.dup(0)), Inbox()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    Thread(target=_listen, args=(connection, inbox), daemon=True).start()
    try:
        worker = composed(**json.loads(inbox.get()))
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"[:400]
        connection.send_bytes(json.dumps({"broken": reason}).encode())
        raise
    connection.send_bytes(json.dumps({"ready": True}).encode())
    _serve(worker, connection, inbox)


def _end_with_parent(parent: int) -> None:
    """Die with the parent, never by Ctrl-C meant for it, and before it when memory runs out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        Path("/proc/self/oom_score_adj").write_text(_EASY_PREY)
    if os.getppid() != parent:
        os._exit(0)


def _listen(connection: Connection, inbox: Inbox) -> None:
    """Pass messages on; when the parent is gone there is nobody left to work for."""
    try:
        while True:
            inbox.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def composed(entry: str, config: Mapping[str, Any]) -> "Worker":
    """The client's side: what `module:function` makes of the configuration."""
    import torch

    torch.set_num_threads(1)
    module, _, function = entry.partition(":")
    worker: Worker = getattr(importlib.import_module(module), function)(config)
    return worker


def _serve(worker: "Worker", connection: Connection, inbox: Inbox) -> None:
    """Each instruction comes once, then the clients that shall follow it."""
    from fedbnn import machine
    from fedbnn.federation.engines import answer

    instruction = b""
    while True:
        head = json.loads(inbox.get())
        if head["instruction"]:
            instruction = inbox.get()
            machine.trim_memory()
        private = inbox.get() if head["private"] else None
        for part in _parts(answer(worker, instruction, head["client"], private)):
            connection.send_bytes(part)


def _parts(answer: "Answer") -> list[bytes]:
    """An answer as it is sent: a head, then the bytes it announces."""
    from fedbnn.protocol.messages import Failure

    if isinstance(answer, Failure):
        return [json.dumps(["failure", answer.client, answer.reason[:400]]).encode()]
    blobs = [blob for blob in (answer.update, answer.private) if blob is not None]
    sizes = len(answer.update), None if answer.private is None else len(answer.private)
    said = {"seconds": answer.seconds, "inner": answer.inner, **answer.train}
    head = ["result", answer.client, said, *sizes]
    return [json.dumps(head).encode(), *blobs]


if __name__ == "__main__":
    main()
