"""`fedbnn bench step|rounds|engines|overhead|memory`: what things cost, as a table and as JSON."""

import importlib.util
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from math import inf
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from timeit import timeit
from typing import Any

import torch
from jsonargparse.typing import PositiveInt
from torch import Tensor, nn

from fedbnn import machine
from fedbnn.bayes.flatten import layout_of
from fedbnn.bayes.inference import ClosedFormELBO
from fedbnn.bayes.model import BayesianModel, MeanFieldGuide
from fedbnn.cli.bench_sites import deployment, slow_site
from fedbnn.cli.compose import compose
from fedbnn.cli.main import Arguments, flags, pair
from fedbnn.cli.train import parse
from fedbnn.errors import FederationError
from fedbnn.federation import experiment
from fedbnn.federation.engines import one_thread
from fedbnn.federation.exchange import totals
from fedbnn.federation.experiment import Experiment
from fedbnn.heads.gaussian import EXCHANGE
from fedbnn.networks import NETWORKS, Classifier
from fedbnn.protocol.messages import FitInstruction, FitResult
from fedbnn.protocol.stream import Stream
from fedbnn.storage import run_dir
from fedbnn.storage.ledger import rounds
from fedbnn.tracking import console

Row = dict[str, Any]
Seconds = dict[str, list[float]]
Updates = list[dict[int, bytes]]
Loss = Callable[[Tensor, Tensor], Tensor]
CONFIG = "conf/cifar100_ci_fast.yaml"
IMAGE, CLASSES, LR = (3, 32, 32), 25, 1e-3
CASES = {"lenet": (128, 40), "paper_resnet": (64, 12)}
"""Networks of `step`, each with its batch size and the number of turns."""
LAYERS: Mapping[type[nn.Module], Sequence[str]] = {
    nn.Conv2d: ("in_channels", "out_channels", "kernel_size", "stride", "padding"),
    nn.Linear: ("in_features", "out_features"),
}
REFERENCE = "SNN, Adam"
WARM, LOOK_SECONDS = 5, 0.02


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write `--out`."""
    options = _options(argv)
    _publish(f"fedbnn bench {options.what}", MEASURED[options.what](options), options.out)
    return 0


def _options(argv: Sequence[str]) -> Namespace:
    """What the command line says."""
    about = "Measure what things cost; ratios are taken side by side in one run."
    parser = Arguments("bench", about)
    add = parser.add_argument
    add("what", choices=list(MEASURED), nargs="?", default="step", help="default: step")
    add("--config", help=f"for all but step: the experiment (default: {CONFIG}; sites: quickstart)")
    add("--method", default="fedbnn", help="for all but step: the method")
    add("--data_dir", default="data", help="where data sets are (default: data)")
    turns = "turns of engines; rounds of overhead and memory; step takes more"
    add("--repeats", type=PositiveInt, default=6, help=turns)
    add("--workers", type=PositiveInt, default=2, help="how many clients engines run at once")
    add("--flower", action="store_true", help="engines: measure Flower, too; this starts Ray")
    about = "engines: three sites of Flower on 127.0.0.1 and 6.8 M weights instead, beside serial"
    add("--deployment", action="store_true", help=about)
    about = "engines: five such sites instead, one of them slow: rounds per hour"
    add("--slow_site", action="store_true", help=about)
    add("--out", type=Path, help="JSON file to write")
    about = "for all but step: any setting (--KEY VALUE is the same)"
    add("--set", type=pair, action="append", default=[], metavar="KEY=VALUE", help=about)
    return parser.parse_settings(argv)


def _words(options: Namespace, more: Mapping[str, str] | None = None) -> list[str]:
    """The configuration to measure, as words."""
    asked = {"config": options.config or CONFIG, "method": options.method}
    asked |= {"stream.data_dir": options.data_dir, "track.wandb": "off", "evaluate.every": "0"}
    return flags({**asked, **(more or {}), **dict(options.set)})


def _short_tasks(options: Namespace) -> dict[str, str]:
    """Tasks of `--repeats` rounds."""
    return {"stream.rounds_per_task": str(options.repeats), "stream.boundaries": "null"}


def _step(options: Namespace) -> list[Row]:
    """One training step, Bayesian against standard: same network, batch, optimiser, one thread."""
    machine.keep_memory()
    with one_thread():
        return [row for network in CASES for row in _case(network, options.repeats / 6)]


def _case(network: str, repeats: float) -> list[Row]:
    batch, turns = CASES[network]
    images, labels = torch.randn(batch, *IMAGE), torch.randint(0, CLASSES, (batch,))

    def step(made: tuple[nn.Module, Loss], fused: bool = True) -> Callable[[], None]:
        module, loss = made
        trained = [weights for weights in module.parameters() if weights.requires_grad]
        optimizer = torch.optim.Adam(trained, LR, fused=fused)

        def forward_backward_update() -> None:
            optimizer.zero_grad()
            loss(images, labels).backward()
            optimizer.step()

        return forward_backward_update

    steps = {
        REFERENCE: step(_standard(network), fused=False),
        "SNN, fused Adam": step(_standard(network)),
        "FedBNN (Pyro)": step(_bayesian(network)),
        "FedBNN, curvature": step(_bayesian(network, learned=False)),
        "FedBNN, feature distillation": step(_bayesian(network, distillation=1.0)),
    }
    if importlib.util.find_spec("torchbnn"):
        steps["torchbnn"] = step(_torchbnn(network), fused=False)
    seconds = interleaved(steps, max(3, round(turns * repeats)))
    return [{"network": network, "batch": batch, **row} for row in summary(seconds, REFERENCE)]


def _standard(network: str) -> tuple[nn.Module, Loss]:
    """The network with point weights and cross-entropy."""
    module = Classifier(NETWORKS[network](IMAGE), CLASSES)
    return module, lambda images, labels: nn.functional.cross_entropy(module(images), labels)


def _bayesian(
    network: str, distillation: float = 0.0, learned: bool = True
) -> tuple[nn.Module, Loss]:
    """The same with a posterior, as a client trains it: one draw, closed-form KL."""
    backbone = NETWORKS[network](IMAGE)
    model = BayesianModel(backbone, layout_of(backbone), distillation)
    guide = MeanFieldGuide(model, learned)
    size = model.layout.size + CLASSES * (model.features + 1)
    start = 0.02 * torch.randn(size), torch.full((size,), 0.01)
    model.swap(*start)
    guide.swap(*start)
    prior = [] if model.distillation is None else [model.distillation]
    return nn.ModuleList([guide, *prior]), ClosedFormELBO(torch.full((size,), 1e-6))(model, guide)


def _torchbnn(network: str) -> tuple[nn.Module, Loss]:
    """The library the paper used: Bayesian layers, its KL loss beside cross-entropy."""
    import torchbnn

    module, cross_entropy = _standard(network)
    for name, layer in list(module.named_modules()):
        if isinstance(layer, nn.Conv2d | nn.Linear):
            kind = next(kind for kind in LAYERS if isinstance(layer, kind))
            how = {one: getattr(layer, one) for one in LAYERS[kind]}
            bayesian = getattr(torchbnn, f"Bayes{kind.__name__}")
            module.set_submodule(name, bayesian(0.0, 0.05, **how, bias=layer.bias is not None))
    divergence = torchbnn.BKLLoss(reduction="mean", last_layer_only=False)
    return module, lambda images, labels: cross_entropy(images, labels) + 0.1 * divergence(module)


def _engines(options: Namespace) -> list[Row]:
    """Rounds 1, 2, ... by each engine in turn; the clock starts after the first of each.

    `first_s` is how long that one took, with all that starts; `ideal` the ratio to serial that so
    many workers could reach if nothing came between.
    """
    if options.deployment or options.slow_site:
        return (deployment if options.deployment else slow_site)(options)
    asked = {"serial": {"engine": "serial"}, **_apart(options)}
    updates: dict[str, Updates] = {name: [] for name in asked}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        parsed = {name: parse(_words(options, more)) for name, more in asked.items()}
        made = {name: compose(one, Path(folder)) for name, one in parsed.items()}
        for one in made.values():
            stack.callback(one.engine.close)
        numbers = {name: cycle(range(1, one.stream.rounds + 1)) for name, one in made.items()}
        work = {name: partial(_turn, made[name], numbers[name], updates[name]) for name in made}
        first = interleaved(work, repeats=1, warm=0)
        rows = summary(interleaved(work, options.repeats, warm=0), "serial")
    for row in rows:
        name = row["name"]
        row |= {"ideal": 1 / (1 if name == "serial" else options.workers)}
        row |= {"first_s": first[name][0], "same_bytes": updates[name] == updates["serial"]}
    return rows


def _apart(options: Namespace) -> dict[str, dict[str, str]]:
    """The engines that run clients elsewhere; Flower's only where it is asked for."""
    workers = str(options.workers)
    found = {"processes": {"engine": "processes", "engine.workers": workers}}
    if options.flower:
        found["flower"] = {"engine": "flower", "engine.clients_at_once": workers}
    return found


def _turn(made: Experiment, numbers: Iterator[int], updates: Updates) -> None:
    """Train in the next round from the state before round 1, and keep the updates that come."""
    number = next(numbers)
    clients = made.stream.participants(number)
    images = totals({client: made.stream.counts(number, client) for client in clients})
    state = made.method.prepare(made.initial, number, list(images[1]), made.layout)
    told = FitInstruction("bench", number, "train", state, *images)
    answers = made.engine.gather(told.to_bytes(), clients, lambda _: None)
    updates.append({one.client: one.update for one in answers if isinstance(one, FitResult)})


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
        with one_thread():
            data = [_batches(made.stream, parsed["client"], line["round"]) for line in lines]
    seconds = [line["seconds"] for line in lines]
    whole = [one["round"] - one["evaluate"] for one in seconds]
    outside = 1 - _share([one["inner"] for one in seconds], whole)
    batches = _share(data, whole)
    row = {"method": options.method, "rounds": len(lines), "outside_compute": outside}
    row |= {"making_batches": batches, "overhead": outside - batches}
    exchanged = [one.get(EXCHANGE, 0.0) for one in seconds]
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


def _rounds(options: Namespace) -> list[Row]:
    """Whole rounds from the first one on, a row a task: seconds, and what its end reaches.

    Seconds are medians over the rounds of the task, on one core, evaluation left out.
    """
    with TemporaryDirectory() as folder:
        made = compose(parse(_words(options, _short_tasks(options))), Path(folder) / "run")
        found = experiment.run(made)
        lines = run_dir.records(made.run_dir)
    rows, first = [], 0
    for task, last in enumerate(found["task_ends"]):
        row: Row = {"method": options.method, "task": task + 1, "rounds": last - first}
        played, first = lines[first:last], last
        row["images"] = median(line["samples"] for line in played)
        spent = [line["seconds"] for line in played]
        row["round_s"] = median(one["round"] - one["evaluate"] for one in spent)
        row |= {f"{name}_ts": found[name]["ts"][task] for name in ("task_aware", "class_agnostic")}
        rows.append(row | {"machine_load": median(line["load"]["machine"] for line in played)})
    return rows


def _memory(options: Namespace) -> list[Row]:
    """Resident memory of a run at rest after each round: after the first it should not grow."""
    words = _words(options, {**_short_tasks(options), "evaluate.every": "1"})
    with TemporaryDirectory() as folder:
        resident, peak = _watched(words, Path(folder) / "run")
    warm, last = min(WARM, len(resident)), resident[-1]
    row = {"method": options.method, "rounds": len(resident)}
    row |= {f"after_{warm}_mib": resident[warm - 1], "last_mib": last}
    return [{**row, "ratio": last / resident[warm - 1], "peak_mib": peak, "by_round_mib": resident}]


def _watched(words: Sequence[str], run: Path) -> tuple[list[float], float]:
    """MiB that a run in its own process holds after each round, at the least, and its peak."""
    command = [sys.executable, "-m", "fedbnn", "train", "--run_dir", str(run), *words]
    alone, resident = {**os.environ, "OMP_NUM_THREADS": "1"}, dict[int, float]()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=alone) as process:
        while process.poll() is None:
            done, now = max(rounds(run), default=0), machine.resident(process.pid) / 2**20
            resident[done] = min(resident.get(done, inf), now or inf)
            sleep(LOOK_SECONDS)
    if process.returncode:
        what = f"the run to be measured ended with exit code {process.returncode}"
        raise FederationError(what, fix="its error stands above")
    resident.pop(0, None)
    return [*resident.values()], getrusage(RUSAGE_CHILDREN).ru_maxrss / 1024


def interleaved(work: Mapping[str, Callable[[], object]], repeats: int, warm: int = 2) -> Seconds:
    """Seconds of each piece of work, in turn, so that a slow moment of the machine hits all alike.

    The first `warm` turns do not count.
    """
    seconds: Seconds = {name: [] for name in work}
    for _ in range(warm + repeats):
        for name, action in work.items():
            seconds[name].append(timeit(action, number=1))
    return {name: values[warm:] for name, values in seconds.items()}


def summary(seconds: Seconds, reference: str) -> list[Row]:
    """Median and quartiles in milliseconds, and the median ratio to the reference of the turn."""
    rows = []
    for name, values in seconds.items():
        low, middle, high = (1000 * value for value in quantiles(values * 2, n=4))
        row = {"name": name, "median_ms": middle, "quartiles_ms": [low, high]}
        rows.append({**row, "ratio": _share(values, seconds[reference])})
    return rows


def _publish(title: str, found: Sequence[Row], out: Path | None) -> None:
    """Print rows as a table; write them as JSON with the machine they were measured on."""
    short = [{key: row[key] for key in row if not key.startswith("by_")} for row in found]
    console.rows(title, short)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        made_with = run_dir.environment()
        run_dir.write_json(out, {"title": title, "rows": list(found), "environment": made_with})
        print(f"written  {out}")


MEASURED = {
    "step": _step,
    "rounds": _rounds,
    "engines": _engines,
    "overhead": _overhead,
    "memory": _memory,
}
