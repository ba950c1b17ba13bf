"""One writer per run directory: an advisory lock that the operating system lets go when its process dies."""

import fcntl
import os
from pathlib import Path

from fedbnn.errors import RunDirectoryError


class Lock:
    """Held from construction to `release`; the file says which process holds it. Child processes do not inherit it."""

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            holder = path.read_text().strip() or "unknown"
            fix = "wait until it ends, or choose another run_dir"
            raise RunDirectoryError(
                f"the run directory is in use by pid {holder}", str(path.parent.parent), fix
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Let go; a second time does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
