"""A Flower federation of real processes on the loopback interface: SuperLink, SuperNodes, runs."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.cli.command import ROOT, descendants, environment

APP = ROOT / "flower_app"
BIN = Path(sys.executable).parent
PATIENCE = 420.0
SMALL = """
name: small
stream: {sources: digits, tasks: 2, rounds_per_task: 1, clients: 3, clients_per_round: 3}
network: {name: mlp, hidden: [16]}
method: scaffold
client: {epochs: 1, batch_size: 32}
track: {wandb: "off"}
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def until(what: str, happened: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """What `happened` gives as soon as it gives anything."""
    end = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.2)
    return found


class Machines:
    """The processes of one federation, each with a log; `close` ends all of them."""

    def __init__(self, home: Path, secure: Sequence[str] = (), link: Sequence[str] = ()) -> None:
        self.home, self.port, self.link_words = home, free_port(), [*link]
        self.secure, self.running = [*secure], dict[str, subprocess.Popen[bytes]]()
        (home / "small.yaml").write_text(SMALL, encoding="utf-8")
        (home / "flwr").mkdir()
        how = f'root-certificates = "{secure[1]}"' if secure else "insecure = true"
        address = f'[superlink.here]\naddress = "127.0.0.1:{self.port}"\n{how}\n'
        (home / "flwr" / "config.toml").write_text(address, encoding="utf-8")

    def environment(self) -> dict[str, str]:
        quiet = ("TELEMETRY_ENABLED=0", "DISABLE_UPDATE_CHECK=1")
        apart = ("DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1", f"HOME={self.home / 'flwr'}")
        found = dict(f"FLWR_{one}".split("=") for one in (*quiet, *apart))
        return {**environment(), **found, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}

    def start(self, name: str, *words: str) -> "subprocess.Popen[bytes]":
        """A process in a session of its own."""
        with (self.home / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [str(BIN / words[0]), *words[1:]],
                cwd=self.home,
                env=self.environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self.running[name]

    def superlink(self) -> None:
        """Start the SuperLink and wait until it listens."""
        words = self.link_words or ["--insecure"]
        self.start("link", "flower-superlink", *words, "--host", "127.0.0.1", *self._at(self.port))
        until("the SuperLink", lambda: self._listens(self.port))

    @staticmethod
    def _at(port: int) -> list[str]:
        return ["--port", str(port)]

    @staticmethod
    def _listens(port: int) -> bool:
        with socket.socket() as one, suppress(OSError):
            one.connect(("127.0.0.1", port))
            return True
        return False

    def site(self, name: str, clients: str, *words: str, folder: str = "") -> None:
        """Start the SuperNode of a site with these clients, and folders of its own."""
        place = self.home / (folder or name)
        place.mkdir(exist_ok=True)
        says = f'clients="{clients}" state-dir="{place}" stream.data_dir="{place}"'
        here = ["--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1"]
        how = words or tuple(self.secure) or ("--insecure",)
        node = [*here, *self._at(free_port()), "--node-config", says]
        self.start(name, "flower-supernode", *how, *node)

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

    def run(self, words: str, wait: bool = True) -> str:
        """`flwr run` with these words of `python train.py`; to its end, or only started."""
        run = ["run", str(APP), "here", "--run-config", f'fedbnn="{words}"']
        return self.flwr(*run, *(["--stream"] if wait else []), timeout=2 * PATIENCE)

    def committed(self, run: str, number: int) -> None:
        """Wait until a round is on disk."""
        where = self.home / run / "state" / f"round-{number:06d}"
        until(f"round {number}", where.is_dir)

    def finished(self, run: str) -> None:
        """Wait until a run is complete."""
        until("the end of the run", (self.home / run / "results.json").exists)

    def log(self, run: str) -> str:
        return (self.home / run / "log.txt").read_text(encoding="utf-8")

    def kill(self, name: str) -> None:
        """`kill -9` to a machine and all that runs on it."""
        process = self.running.pop(name)
        for pid in [*descendants(process.pid), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def freeze(self, name: str) -> None:
        """Stop a machine and all that runs on it, without an end."""
        top = self.running[name].pid
        for pid in [top, *descendants(top)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def pids(self, name: str, program: str) -> list[int]:
        """The processes of a program that runs on a machine."""
        found = []
        for pid in descendants(self.running[name].pid):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                found += [pid] if program.encode() in words else []
        return found

    def next_order(self, name: str) -> int:
        """Wait for an order that is not at a site yet; the process that follows it."""
        before = self.pids(name, "flwr-clientapp")

        def fresh() -> list[int]:
            return [pid for pid in self.pids(name, "flwr-clientapp") if pid not in before]

        return int(until(f"an order at {name}", fresh)[0])

    def close(self) -> None:
        for name in [*self.running]:
            self.kill(name)
