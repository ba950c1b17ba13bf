"""Flower's simulation as an engine: nodes on this machine, run by Ray, and the grid they are on."""

import importlib
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from math import ceil
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from fedbnn.config.schema import Count, NonNegative, Positive
from fedbnn.errors import ConfigError, FederationError
from fedbnn.federation.engines import Answer, Private

if TYPE_CHECKING:
    from flwr.serverapp import Grid

    from fedbnn.federation.engines.flower.engine import FlowerEngine

START_SECONDS, LOOK_SECONDS = 300.0, 0.2
INSTALL = 'install it: pip install -c constraints.txt ".[flower]"'


class FlowerSimulation:
    """Runs clients on Flower's simulation (Ray): the same bytes as `serial`.

    Flower runs a ServerApp in its own way; ours only hands the grid out, so that the rounds stay in
    the thread of the command, with its signals. Ray starts with the first round.

    Args:
        clients_at_once: how many clients are trained at the same time.
        cpus: how many cores each of them has, as Ray counts them.
        gpus: which share of a GPU each of them has.
    """

    def __init__(
        self,
        entry: str,
        config: Mapping[str, Any],
        clients_at_once: Count = 2,
        cpus: Positive = 1.0,
        gpus: NonNegative = 0.0,
        deadline: float | None = None,
    ) -> None:
        if find_spec("flwr") is None or find_spec("ray") is None:
            raise ConfigError("the engine flower needs Flower and Ray", "engine.name", INSTALL)
        for library in ("flwr.simulation", "ray"):  # their loggers are there before ours are set up
            importlib.import_module(library)
        self._entry, self._config, self._deadline = entry, config, deadline
        self._nodes, self._share = clients_at_once, {"num_cpus": cpus, "num_gpus": gpus}
        self._grids, self._done = SimpleQueue["Grid"](), threading.Event()
        self._thread, self._running = ThreadPoolExecutor(1), Future[None]()
        self._engine: FlowerEngine | None = None

    def gather(self, payload: bytes, clients: Sequence[int], private: Private) -> Iterator[Answer]:
        """One answer of each client, as they come."""
        if self._engine is None:
            self._engine = self._started()
        return self._engine.gather(payload, clients, private)

    def _started(self) -> "FlowerEngine":
        """Let Flower run in a thread of its own, and wait for its grid."""
        from fedbnn.federation.engines.flower.engine import FlowerEngine

        self._running = self._thread.submit(self._simulate)
        limits = self._deadline, START_SECONDS, self._check
        return FlowerEngine(self._grid(), self._config, *limits)

    def _grid(self) -> "Grid":
        """The grid, as soon as Flower has one."""
        while True:
            self._check()
            with suppress(Empty):
                return self._grids.get(timeout=LOOK_SECONDS)

    def _simulate(self) -> None:
        """Flower's simulation, from its start to its end."""
        from flwr.serverapp import ServerApp
        from flwr.simulation import run_simulation

        from fedbnn.federation.engines.flower.client import client_app

        server = ServerApp()

        @server.main()
        def hand_out(grid: "Grid", _context: Any) -> None:
            self._grids.put(grid)
            self._done.wait()

        cores = max(1, ceil(self._nodes * self._share["num_cpus"]))
        ray: Any = {"client_resources": self._share, "init_args": {"num_cpus": cores}}
        run_simulation(server, client_app(self._entry), self._nodes, backend_config=ray)

    def _check(self) -> None:
        """Raise what ended the simulation, if it has ended; Ray takes SIGTERM when it starts."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        if self._running.done():
            what = f"the simulation ended: {self._running.exception()}"
            raise FederationError(what, "engine: flower", "log.txt has what Flower said")

    def close(self) -> None:
        """End the simulation, and Ray with it."""
        self._done.set()
        self._thread.shutdown()
        if self._engine is not None:
            import ray

            ray.shutdown()
