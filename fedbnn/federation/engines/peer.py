"""One worker process, seen from its parent: pipes that never block, a deadline, a memory limit, a certain end."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any

from fedbnn.federation.engines.frames import BadFrame, Decoder, Frame

START_SECONDS = 300.0
PIPE_BYTES = 2**20
PAGE = os.sysconf("SC_PAGE_SIZE")


class Gone(Exception):
    """The process has ended, or must; the text says how."""


class Peer:
    """A worker that was told how to compose itself. `client` is whom it serves now, `due` when it must have answered."""

    def __init__(self, entry: str, config: Mapping[str, Any], log: Path | None) -> None:
        command = [sys.executable, "-m", "fedbnn.federation.engines.worker", str(os.getpid())]
        stderr = (
            None if log is None else os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        )
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        self._process = subprocess.Popen(
            command, **pipes, stderr=stderr, env=environment(), start_new_session=True
        )  # type: ignore[call-overload]
        if stderr is not None:
            os.close(stderr)
        self.inlet, self.outlet = self._process.stdin.fileno(), self._process.stdout.fileno()
        for pipe in (self.inlet, self.outlet):
            os.set_blocking(pipe, False)
            _widen(pipe)
        self._outgoing: deque[memoryview] = deque()
        self._decoder = Decoder()
        self.ready, self.client, self.due, self.order = (
            False,
            -1,
            time.monotonic() + START_SECONDS,
            -1,
        )
        self.send(Frame({"kind": "hello", "entry": entry, "config": config}))

    @property
    def busy(self) -> bool:
        """Whether a client is being served."""
        return self.client >= 0

    @property
    def has_mail(self) -> bool:
        """Whether something still waits to be written."""
        return bool(self._outgoing)

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def send(self, frame: Frame) -> None:
        """Queue a frame; `write` sends it as the pipe takes it."""
        self._outgoing.extend(memoryview(part) for part in frame.parts() if part)

    def serve(self, client: int, private: bytes | None, deadline: float | None) -> None:
        """Hand over one client; its time runs from now, or from when the process is ready."""
        self.client = client
        self.send(
            Frame(
                {"kind": "client", "client": client, "private": private is not None}, private or b""
            )
        )
        if self.ready:
            self.start_clock(deadline)

    def start_clock(self, deadline: float | None) -> None:
        """From now on the client has `deadline` seconds."""
        self.due = inf if deadline is None else time.monotonic() + deadline

    def write(self) -> None:
        """Send what the pipe takes without waiting."""
        while self._outgoing:
            try:
                sent = os.write(self.inlet, self._outgoing[0])
            except BlockingIOError:
                return
            except BrokenPipeError as error:
                raise Gone(self._end()) from error
            rest = self._outgoing.popleft()[sent:]
            if rest:
                self._outgoing.appendleft(rest)

    def read(self) -> Iterator[Frame]:
        """The frames that have arrived; raises `Gone` at the end of the pipe."""
        while True:
            try:
                data = os.read(self.outlet, PIPE_BYTES)
            except BlockingIOError:
                return
            if not data:
                raise Gone(self._end())
            try:
                yield from self._decoder.feed(data)
            except BadFrame as error:
                raise Gone(f"its worker sent {error}") from error

    def megabytes(self) -> float:
        """Resident memory now; 0 where the system does not tell."""
        try:
            return (
                int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * PAGE / 2**20
            )
        except (OSError, IndexError):
            return 0.0

    def _end(self) -> str:
        """How the process ended, in words."""
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "its worker hung up"
        return f"its worker died: {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"

    def kill(self) -> None:
        """End the process and all it started, and wait for it."""
        if self.alive:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()


def environment() -> dict[str, str]:
    """The parent's, with one thread each and the same import path, without any API key."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return {
        **kept,
        **threads,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }


def _widen(pipe: int) -> None:
    """A larger pipe means fewer turns per message, where the system has that."""
    if sys.platform == "linux":
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
