"""A Flower federation of real processes on the loopback interface: SuperLink, SuperNodes, runs.

What `docs/federation.md` starts by hand, for benches and tests: every process has a session and a
log of its own, `close` ends all of them. Nothing of Flower is imported here.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from fedbnn.errors import FederationError

HOST, PATIENCE, LOOK_SECONDS = "127.0.0.1", 900.0, 0.2
BIN = Path(sys.executable).parent
SERVER, CLIENT = "flwr-serverapp", "flwr-clientapp"
"""The programs that Flower starts for a run, and for an order."""
FLOWER = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


def free_port() -> int:
    """A port of the loopback interface that nobody uses."""
    with socket.socket() as one:
        one.bind((HOST, 0))
        return int(one.getsockname()[1])


def until(what: str, happened: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """What `happened` gives as soon as it gives anything."""
    end = time.monotonic() + seconds
    while not (found := happened()):
        if time.monotonic() > end:
            raise FederationError(f"waited {seconds:g} s for {what}", "127.0.0.1", "see the logs")
        time.sleep(LOOK_SECONDS)
    return found


def descendants(pid: int) -> list[int]:
    """The processes below one, as they are now."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, children.read_text().split()):
                found += [child, *descendants(child)]
    return found


class Loopback:
    """The processes of one federation below a folder; `app` is what `flwr run` starts.

    `link` are words of the SuperLink, `secure` those with which sites reach it by TLS, the first
    two of them `--root-certificates FILE`.
    """

    def __init__(
        self, home: Path, app: Path, secure: Sequence[str] = (), link: Sequence[str] = ()
    ) -> None:
        self.home, self.app, self.port = home, app, free_port()
        self.secure, self.link = [*secure], [*link] or ["--insecure"]
        self.running = dict[str, subprocess.Popen[bytes]]()
        (home / "flwr").mkdir()
        how = f'root-certificates = "{secure[1]}"' if secure else "insecure = true"
        address = f'[superlink.here]\naddress = "{HOST}:{self.port}"\n{how}\n'
        (home / "flwr" / "config.toml").write_text(address, encoding="utf-8")

    def __enter__(self) -> "Loopback":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, what: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def environment(self) -> dict[str, str]:
        """That of this process, with Flower's own folder, quiet, and one thread a process."""
        path = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"
        ours = {"FLWR_HOME": str(self.home / "flwr"), "PATH": path, "OMP_NUM_THREADS": "1"}
        return {**os.environ, **FLOWER, **ours}

    def start(
        self, name: str, *words: str, variables: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """A process in a session of its own."""
        with (self.home / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [str(BIN / words[0]), *words[1:]],
                cwd=self.home,
                env={**self.environment(), **(variables or {})},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self.running[name]

    def superlink(self) -> None:
        """Start the SuperLink and wait until it listens."""
        where = ["--host", HOST, "--port", str(self.port)]
        self.start("link", "flower-superlink", *self.link, *where)
        until("the SuperLink", self._listens)

    def _listens(self) -> bool:
        with socket.socket() as one, suppress(OSError):
            one.connect((HOST, self.port))
            return True
        return False

    def site(
        self,
        name: str,
        clients: str,
        *words: str,
        says: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start the SuperNode of a site with these clients, and folders of its own.

        `words` are in place of those of a secure or insecure connection, `says` in place of what a
        site says of its data.
        """
        place = self.home / name
        place.mkdir(exist_ok=True)
        data = says or f'stream.data_dir="{place}"'
        node = ["--node-config", f'clients="{clients}" state-dir="{place}" {data}']
        here = ["--superlink", f"{HOST}:{self.port}", "--host", HOST, "--port", str(free_port())]
        how = words or tuple(self.secure) or ("--insecure",)
        self.start(name, "flower-supernode", *how, *here, *node, variables=variables)

    def flwr(self, *words: str, timeout: float = PATIENCE) -> str:
        """What a `flwr` command says."""
        done = subprocess.run(
            [str(BIN / "flwr"), *words],
            cwd=self.home,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return done.stdout + done.stderr

    def run(self, words: str, wait: bool = True, seconds: float = 2 * PATIENCE) -> str:
        """`flwr run` with these words of `python train.py`; to its end, or only started."""
        run = ["run", str(self.app), "here", "--run-config", f'fedbnn="{words}"']
        return self.flwr(*run, *(["--stream"] if wait else []), timeout=seconds)

    def pids(self, name: str, program: str) -> list[int]:
        """The processes of a program that runs on a machine."""
        found = []
        for pid in descendants(self.running[name].pid):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                found += [pid] if program.encode() in words else []
        return found

    def kill(self, name: str) -> None:
        """`kill -9` to a machine and all that runs on it."""
        process = self.running.pop(name)
        for pid in [*descendants(process.pid), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        """End every process."""
        for name in [*self.running]:
            self.kill(name)
