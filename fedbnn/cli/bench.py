"""`fedbnn bench step|engines|overhead|scale|memory`: what things cost, as a table and as JSON."""

import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from jsonargparse.typing import PositiveInt
from rich.console import Console
from rich.table import Table

from fedbnn.cli.compose import compose
from fedbnn.cli.main import Arguments, flags, numbers
from fedbnn.cli.train import parse
from fedbnn.errors import FederationError
from fedbnn.federation import experiment
from fedbnn.federation.engines import one_thread
from fedbnn.federation.experiment import Experiment
from fedbnn.heads.gaussian import EXCHANGE
from fedbnn.messages import FitInstruction, FitResult
from fedbnn.storage import run_dir
from fedbnn.storage.ledger import rounds
from fedbnn.stream import Stream

Row = dict[str, Any]
Seconds = dict[str, list[float]]
PARTICIPANTS, REGISTERED = 10, 1000
SMALL = {
    "stream.sources": "digits",
    "stream.tasks": "2",
    "stream.rounds_per_task": "6",
    "network": "mlp",
    "client.epochs": "1",
    "evaluate.every": "0",
    "track.wandb": "off",
}
LARGE = {**SMALL, "stream.rounds_per_task": "2", "network.hidden": "[1000, 1000]"}
WARM, LOOK_SECONDS = 5, 0.02


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write `--out`."""
    options = _options(argv)
    rows = MEASURED[options.what](options)
    _publish(f"fedbnn bench {options.what}", rows, options.out)
    return 0


def _options(argv: Sequence[str]) -> Namespace:
    """What the command line says."""
    about = "Measure what things cost; ratios are taken side by side in one run."
    parser = Arguments("bench", about)
    add, config = parser.add_argument, "conf/cifar100_ci_fast.yaml"
    add("what", choices=list(MEASURED), nargs="?", default="step", help="default: step")
    add("--config", default=config, help="for engines, overhead and memory: the experiment")
    add("--method", default="fedbnn", help="for all but step: the method")
    add("--data_dir", default="data", help="where data sets are (default: data)")
    turns = "turns of engines; rounds of overhead and memory; step takes more"
    add("--repeats", type=PositiveInt, default=6, help=turns)
    add("--workers", type=PositiveInt, default=2, help="workers of the process engine")
    sizes, about = [100, 1_000, 10_000, 100_000], "for scale: numbers of registered clients"
    add("--clients", type=numbers, default=sizes, help=about)
    sizes, about = [5, 20, 80], "for scale: numbers of participants a round"
    add("--participants", type=numbers, default=sizes, help=about)
    add("--out", type=Path, help="JSON file to write")
    return parser.parse_args(argv)


def _words(options: Namespace, more: Mapping[str, str] | None = None) -> list[str]:
    """The configuration to measure, as words."""
    asked = {"config": options.config, "method": options.method}
    asked |= {"stream.data_dir": options.data_dir, "track.wandb": "off", "evaluate.every": "0"}
    return flags({**asked, **(more or {})})


def _short_tasks(options: Namespace) -> dict[str, str]:
    """Tasks of `--repeats` rounds, said the way the configuration says how long they are."""
    ends = parse(_words(options))["stream"]["boundaries"]
    if not ends:
        return {"stream.rounds_per_task": str(options.repeats)}
    return {"stream.boundaries": str([options.repeats * (place + 1) for place in range(len(ends))])}


def _step(options: Namespace) -> list[Row]:
    """One training step, Bayesian against standard."""
    from fedbnn.cli import bench_step

    return bench_step.measure(options.repeats / 6)


def _engines(options: Namespace) -> list[Row]:
    """Rounds 1, 2, ... by each engine in turn; the workers are started before the clock is."""
    processes = {"engine": "processes", "engine.workers": str(options.workers)}
    asked = {"serial": {"engine": "serial"}, "processes": processes}
    with TemporaryDirectory() as folder:
        words = {name: _words(options, more) for name, more in asked.items()}
        made = {name: _Turns(compose(parse(words[name]), Path(folder))) for name in words}
        try:
            work = {name: turns.play for name, turns in made.items()}
            rows = summary(interleaved(work, options.repeats, warm=1), "serial")
        finally:
            for turns in made.values():
                turns.experiment.engine.close()
    same = {name: turns.updates == made["serial"].updates for name, turns in made.items()}
    return [{**row, "same_bytes": same[row["name"]]} for row in rows]


class _Turns:
    """Plays one round after the other with one engine, and remembers what came back."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, self.number = experiment, 0
        self.updates: list[dict[int, bytes]] = []

    def play(self) -> None:
        """Train in the next round (after the last the first), from the state before round 1."""
        stream = self.experiment.stream
        self.number = self.number % stream.rounds + 1
        clients = stream.participants(self.number)
        answers = self.experiment.engine.gather(self._payload(clients), clients, lambda _: None)
        results = [answer for answer in answers if isinstance(answer, FitResult)]
        self.updates.append({result.client: result.update for result in results})

    def _payload(self, clients: Sequence[int]) -> bytes:
        """The instruction of the round, with the images by class of all its clients."""
        number, parts = self.number, self.experiment
        counts = [parts.stream.counts(number, client) for client in clients]
        classes = sorted({name for held in counts for name in held})
        totals = {name: sum(held.get(name, 0) for held in counts) for name in classes}
        state = parts.method.prepare(parts.initial, number, classes, parts.layout)
        told = FitInstruction("bench", number, "train", state, sum(totals.values()), totals)
        return told.to_bytes()


def _overhead(options: Namespace) -> list[Row]:
    """Median shares of a round's time, evaluation left out, over a short run.

    `outside_compute` is all that is not forward, backward or optimiser; `making_batches` is timed
    by making them again; `overhead` is the rest: Lightning, assembling, folding, writing.
    """
    with TemporaryDirectory() as folder:
        parsed = parse(_words(options, _short_tasks(options)))
        made = compose(parsed, Path(folder) / "run")
        experiment.run(made)
        lines = run_dir.records(made.run_dir)[1:]
        whole = [line["seconds"]["round"] - line["seconds"]["evaluate"] for line in lines]
        with one_thread():
            data = [_batches(made.stream, parsed["client"], line["round"]) for line in lines]
    inner = [line["seconds"]["inner"] for line in lines]
    exchanged = [line["seconds"].get(EXCHANGE, 0.0) for line in lines]
    outside, batches = 1 - _share(inner, whole), _share(data, whole)
    row = {"method": options.method, "rounds": len(lines), "outside_compute": outside}
    row |= {"making_batches": batches, "overhead": outside - batches}
    return [{**row, "statistics_exchange": _share(exchanged, whole)}]


def _share(part: Sequence[float], whole: Sequence[float]) -> float:
    return median(one / time for one, time in zip(part, whole, strict=True))


def _batches(stream: Stream, client: Mapping[str, Any], number: int) -> float:
    """Seconds to make all batches of a round once more."""
    start = perf_counter()
    for participant in stream.participants(number):
        images = stream.train(number, participant)
        for _ in range(client["epochs"]):
            list(images.loader(client["batch_size"], shuffle=True))
    return perf_counter() - start


def _scale(options: Namespace) -> list[Row]:
    """Short runs over the number of registered clients, then over the participants.

    A round must cost what its participants cost, however many are registered; and its memory must
    not grow with the participants either, since their updates are folded one by one.
    """
    cases = [(registered, PARTICIPANTS, SMALL) for registered in options.clients]
    cases += [(REGISTERED, participants, LARGE) for participants in options.participants]
    rows = []
    for registered, participants, settings in cases:
        asked = {**settings, "method": options.method, "stream.clients": str(registered)}
        asked["stream.clients_per_round"] = str(participants)
        asked["stream.samples_per_round"] = str(8 * participants)
        measured = _measured(flags(asked))
        rows.append({"registered": registered, "participants": participants, **measured})
    return rows


def _memory(options: Namespace) -> list[Row]:
    """Resident memory of a run after each round: after the first ones it should not grow."""
    found = _measured(_words(options, {**_short_tasks(options), "evaluate.every": "1"}))
    resident = found["by_round_mib"]
    warm = min(WARM, len(resident))
    row = {
        "method": options.method,
        "rounds": len(resident),
        f"after_{warm}_mib": resident[warm - 1],
    }
    return [{**row, "last_mib": resident[-1], "ratio": resident[-1] / resident[warm - 1], **found}]


def _measured(words: Sequence[str]) -> Row:
    """Seconds of a round (not the first), processor time, memory of a run in its own process."""
    with TemporaryDirectory() as folder:
        run, resident = Path(folder) / "run", [0.0]
        command = [sys.executable, "-m", "fedbnn", "train", "--run_dir", str(run), *words]
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=one_thread)
        while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
            done = max(rounds(run), default=0)
            resident += [_resident_mib(process.pid)] * (done - len(resident) + 1)
            time.sleep(LOOK_SECONDS)
        process.returncode = os.waitstatus_to_exitcode(ended[1])
        if process.returncode:
            what = f"the run to be measured ended with exit code {process.returncode}"
            raise FederationError(what, fix="its error stands above")
        lines = run_dir.records(run)[1:]
    seconds = [line["seconds"]["round"] - line["seconds"]["evaluate"] for line in lines]
    spent = {"round_seconds": median(seconds), "cpu_seconds": ended[2].ru_utime}
    return {**spent, "peak_mib": ended[2].ru_maxrss / 1024, "by_round_mib": resident[1:]}


def _resident_mib(pid: int) -> float:
    """VmRSS of a process."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    kib = [float(line.split()[1]) for line in status if line.startswith("VmRSS:")]
    return kib[0] / 1024 if kib else 0.0


def interleaved(work: Mapping[str, Callable[[], object]], repeats: int, warm: int = 2) -> Seconds:
    """Seconds of each piece of work, in turn, so that a slow moment of the machine hits all alike.

    The first `warm` turns do not count.
    """
    seconds: Seconds = {name: [] for name in work}
    for turn in range(warm + repeats):
        for name, action in work.items():
            start = perf_counter()
            action()
            if turn >= warm:
                seconds[name].append(perf_counter() - start)
    return seconds


def summary(seconds: Seconds, reference: str) -> list[Row]:
    """Median and quartiles in milliseconds, and the median ratio to the reference of the turn."""
    rows = []
    for name, values in seconds.items():
        low, middle, high = (1000 * value for value in quantiles(values * 2, n=4))
        ratio = _share(values, seconds[reference])
        rows.append(
            {"name": name, "median_ms": middle, "quartiles_ms": [low, high], "ratio": ratio}
        )
    return rows


def _publish(title: str, rows: Sequence[Row], out: Path | None) -> None:
    """Print rows as a table; write them as JSON with the machine they were measured on."""
    shown = [name for name in rows[0] if not name.startswith("by_")]
    table = Table(*shown, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(_short(row[name]) for name in shown))
    Console(highlight=False).print(table)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        made_with = run_dir.environment()
        run_dir.write_json(out, {"title": title, "rows": list(rows), "environment": made_with})
        print(f"written  {out}")


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return " - ".join(map(_short, value)) if isinstance(value, list) else str(value)


MEASURED: Mapping[str, Callable[[Namespace], list[Row]]] = {
    "step": _step,
    "engines": _engines,
    "overhead": _overhead,
    "scale": _scale,
    "memory": _memory,
}
