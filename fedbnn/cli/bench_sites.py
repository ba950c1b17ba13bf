"""`fedbnn bench engines --deployment | --slow_site`: what Flower's sites cost, on this machine.

Real processes on the loopback interface: a SuperLink, a SuperNode for every site, `flwr run`.
Images are those that ship with scikit-learn, so nothing is fetched.
"""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event, Thread
from time import sleep
from typing import Any

from fedbnn import machine
from fedbnn.cli.compose import client_runner
from fedbnn.cli.main import flags
from fedbnn.errors import ConfigError, FederationError
from fedbnn.federation.engines import Worker
from fedbnn.federation.engines.flower.loopback import CLIENT, SERVER, Loopback
from fedbnn.federation.engines.flower.simulation import INSTALL
from fedbnn.protocol.messages import FitResult
from fedbnn.storage import run_dir

Row = dict[str, Any]
SITES, FIVE, SLOW, LOOK_SECONDS, LONGEST = 3, 5, 4, 0.1, 7200.0
"""Sites of the deployment; of the other, of which the last is the slow one."""
LARGE = {"network": "paper_resnet", "stream.size": "32", "stream.samples_per_round": "192"}
LARGE |= {"client.epochs": "1", "client.batch_size": "64", "method.r_init": "0"}
SMALL = {"head": "linear", "stream.samples_per_round": "320", "method.r_init": "0"}
ROOM, TIMES, CYCLE = 1.5, 1.5, 5
"""The deadline in rounds in which nobody is slow, and what the slow site takes in deadlines."""
APP = """from fedbnn.federation.engines.flower.client import client_app

app = client_app("fedbnn.cli.bench_sites:delayed_client")
"""
"""The app of a site of this bench, in place of that of `flower_app`."""


@dataclass(frozen=True)
class Delayed:
    """The clients of a site that takes so many seconds more for every order."""

    worker: Worker
    seconds: float

    def perform(self, payload: bytes, client: int, private: bytes | None) -> FitResult:
        """The same answer, later."""
        sleep(self.seconds)
        return self.worker.perform(payload, client, private)


def delayed_client(config: Mapping[str, Any]) -> Delayed:
    """The client's side; a slow site has `bench.seconds` in its node configuration."""
    usual = {name: values for name, values in config.items() if name != "bench"}
    return Delayed(client_runner(usual), config.get("bench", {}).get("seconds", 0.0))


def deployment(options: Namespace) -> list[Row]:
    """Three sites and 6.8 M weights beside `serial`: seconds, bytes a round, peak memory.

    Seconds and bytes are medians over the rounds after the first, evaluation left out.
    """
    words = [*_words(options, LARGE, SITES), *_lasting(options.repeats)]
    with _federation(SITES) as sites:
        with _peaks(sites) as peaks:
            sites.run(" ".join([*words, "--run_dir", "sites"]), seconds=LONGEST)
        here = _serial(sites, words)
        names = {"serial": "serial", "sites": "three sites"}
        rows = [{"name": name, **_costs(sites.home / run)} for run, name in names.items()]
        same = _final(sites.home / "sites") == _final(sites.home / "serial")
    rows[0] |= {"server_peak_mib": here, "site_peak_mib": 0.0, "link_peak_mib": 0.0}
    rows[1] |= {f"{name}_peak_mib": bytes_ / 2**20 for name, bytes_ in peaks.items()}
    usual = rows[0]["round_s"]
    return [row | {"ratio": row["round_s"] / usual, "same_bytes": same} for row in rows]


def slow_site(options: Namespace) -> list[Row]:
    """Rounds per hour with one slow site in five, by what becomes of its answers.

    The deadline is `ROOM` times a round in which nobody is slow, and the slow site takes `TIMES`
    deadlines more than the others for every order. `wait` waits for it, `refuse` closes the round
    without it, `fold` does so and folds its factor into a later one: `CYCLE` times as many rounds,
    since none is like the other. `counted` is how many of its answers were.
    """
    words, rounds = _words(options, SMALL, FIVE), options.repeats
    with _federation(FIVE) as sites:
        rows = [_hourly(sites, "nobody is slow", words, rounds)]
    deadline = ROOM * 3600 / rows[0]["rounds_per_hour"]
    limit = ["--gate.deadline_seconds", f"{deadline:.1f}"]
    late = ["--federation.late", "fold", "--federation.max_staleness", "20"]
    ways = {"wait": ([], 1), "refuse": (limit, 1), "fold": ([*limit, *late], CYCLE)}
    with _federation(FIVE, TIMES * deadline) as sites:
        for name, (more, times) in ways.items():
            rows.append(_hourly(sites, name, [*words, *more], times * rounds))
    return [row | {"deadline_s": deadline, "slow_site_s": TIMES * deadline} for row in rows]


def _words(options: Namespace, more: Mapping[str, str], sites: int) -> list[str]:
    """The run to measure, as words of `python train.py`."""
    asked = {"config": str(Path(options.config or "conf/quickstart.yaml").resolve())}
    asked |= {"method": options.method, "track.wandb": "off", "gate.influence_cap": "null"}
    asked |= {"stream.clients": str(sites), "stream.clients_per_round": str(sites)}
    asked |= {"stream.tasks": "1", "stream.partition": "iid"}
    return flags({**asked, **more, **dict(options.set)})


def _lasting(rounds: int) -> list[str]:
    """So many rounds, after a first one that does not count."""
    return ["--stream.rounds_per_task", str(rounds + 1)]


@contextmanager
def _federation(count: int, slow_seconds: float = 0.0) -> Iterator[Loopback]:
    """A SuperLink and so many sites of one client each; the last is so much slower."""
    if find_spec("flwr") is None:
        raise ConfigError("a deployment needs Flower", "fedbnn bench engines", INSTALL)
    with TemporaryDirectory() as folder:
        home = Path(folder)
        link = ["--insecure", "--database", str(home / "link.db")]
        with Loopback(home, _app(home), link=link) as made:
            made.superlink()
            for client in range(count):
                last = client == count - 1
                slow = f"bench.seconds={slow_seconds:.1f}" if last and slow_seconds else None
                made.site(f"site{client}", str(client), says=slow)
            yield made


def _app(home: Path) -> Path:
    """The app of the repository, with sites that can be slow."""
    ours = Path("flower_app")
    if not ours.is_dir():
        what, fix = "the app of the sites is not here", "start it in the folder of the repository"
        raise ConfigError(what, str(ours), fix)
    app = copytree(ours, home / "app")
    (app / "fedbnn_app" / "client.py").write_text(APP, encoding="utf-8")
    return app


def _serial(sites: Loopback, words: Sequence[str]) -> float:
    """The same run on one box, in a process of its own; MiB at its peak."""
    command = [sys.executable, "-m", "fedbnn", "train", *words, "--run_dir", "serial"]
    peak, where = 0.0, {"cwd": sites.home, "env": sites.environment()}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, **where) as process:  # type: ignore[call-overload]
        while process.poll() is None:
            peak = max(peak, machine.peak(process.pid))
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_SECONDS)
    return peak / 2**20


def _lines(run: Path) -> list[run_dir.Record]:
    """The records of a run that is complete."""
    if not (run / "results.json").exists():
        log = run / "log.txt"
        said = log.read_text(encoding="utf-8") if log.exists() else "it did not begin"
        what = f"the run to be measured did not end well: {said[-300:].strip()}"
        raise FederationError(" ".join(what.split()), run.name, "try it again")
    return run_dir.records(run)


def _costs(run: Path) -> Row:
    """What a round costs: medians after the first."""
    first, *lines = _lines(run)
    row: Row = {"rounds": len(lines), "first_s": _seconds(first)}
    row["round_s"] = median(map(_seconds, lines))
    row["machine_load"] = _load(lines)
    for way in ("down", "up"):
        sent = [sum(line[f"bytes_{way}"].values()) / 1e6 for line in lines]
        row[f"megabytes_{way}"] = median(sent)
    return row


def _seconds(line: run_dir.Record) -> float:
    """How long a round took, evaluation left out."""
    return float(line["seconds"]["round"] - line["seconds"]["evaluate"])


def _load(lines: Sequence[run_dir.Record]) -> float:
    """How many processes wanted to run on the whole machine: seconds mean little where many did."""
    return float(median(line["load"]["machine"] for line in lines))


def _final(run: Path) -> bytes:
    """The bytes of the last committed state."""
    [*_, newest] = sorted((run / "state").glob("round-*/state.safetensors"))
    return newest.read_bytes()


@contextmanager
def _peaks(sites: Loopback) -> Iterator[dict[str, float]]:
    """Peak bytes of the server's app, of a site's, and of the SuperLink itself."""
    found, done = {"server": 0.0, "site": 0.0, "link": 0.0}, Event()

    def look() -> None:
        while not done.wait(LOOK_SECONDS):
            seen = {"server": sites.pids("link", SERVER), "link": [sites.running["link"].pid]}
            names = [name for name in sites.running if name != "link"]
            seen["site"] = [pid for name in names for pid in sites.pids(name, CLIENT)]
            for name, pids in seen.items():
                found[name] = max([found[name], *map(machine.peak, pids)])

    with _beside(look, done):
        yield found


def _hourly(sites: Loopback, name: str, words: Sequence[str], rounds: int) -> Row:
    """How many rounds an hour has, by the rounds after the first; and whose answers counted."""
    run = name.split()[0]
    sites.run(" ".join([*words, *_lasting(rounds), "--run_dir", run]), seconds=LONGEST)
    lines, slow = _lines(sites.home / run)[1:], str(SLOW)
    seconds = [_seconds(line) for line in lines]
    missed = sum(slow in line["failed"] or slow in line["refused"] for line in lines)
    late = sum(slow in line["late"] for line in lines)
    row = {"name": name, "rounds": rounds, "rounds_per_hour": 3600 * len(lines) / sum(seconds)}
    row |= {"counted": rounds - missed, "of_these_late": late, "machine_load": _load(lines)}
    return {**row, "by_round_s": seconds}


@contextmanager
def _beside(work: Any, done: Event) -> Iterator[None]:
    """Let this work go on in a thread while the block lasts; it ends when `done` is set."""
    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
