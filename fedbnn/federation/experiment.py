"""One run: what it is made of, and its way from opening a directory to leaving results there."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedbnn import export
from fedbnn.bayes.flatten import Layout
from fedbnn.config import yaml
from fedbnn.defense.budget import Budget
from fedbnn.defense.gate import Gate
from fedbnn.defense.privacy import Privacy
from fedbnn.errors import FedBNNError
from fedbnn.evaluation import results
from fedbnn.evaluation.evaluate import Evaluation, Evaluator, testable
from fedbnn.federation import parts, server
from fedbnn.federation.engines import Engine
from fedbnn.federation.parts import Federation, Late
from fedbnn.heads import GaussianHead, Head, LinearHead
from fedbnn.methods import Method
from fedbnn.protocol.state import State
from fedbnn.protocol.stream import Stream
from fedbnn.report import page
from fedbnn.storage import run_dir
from fedbnn.storage.files import Rejected
from fedbnn.storage.ledger import Ledger
from fedbnn.storage.run_dir import Retention
from fedbnn.tracking.console import Console, Watcher, logging_to
from fedbnn.tracking.wandb import Track, Tracker

Json = Mapping[str, Any]
OBSERVING = (
    *("logger", "callbacks", "profiler", "log_every_n_steps", "default_root_dir"),
    *("enable_checkpointing", "enable_model_summary", "enable_progress_bar"),
)
"""Arguments of Lightning's Trainer that watch a fit and do not change it."""
MAY_DIFFER = (
    *("engine", "track", "ledger", "run_dir", "name", "beside", "report"),
    *("stream.data_dir", "stream.cache_dir", "stream.download"),
    *(f"trainer.{name}" for name in OBSERVING),
    "gate.quorum",
)
"""Settings that do not change what a round comes to, so a run may go on with others."""
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Experiment:
    """Everything a run is made of, once. `config` is the complete configuration it came from.

    `stream` is the one of the method (joint training sees another than the clients do), `backbone`
    serves serial clients and evaluation alike, `initial` is the state before round 1; evaluation
    is on `device`, and `trains_on` says in words where clients are.
    """

    config: Json
    run_dir: Path
    resumed: bool
    stream: Stream
    method: Method
    head: Head
    backbone: nn.Module
    layout: Layout
    initial: State
    engine: Engine
    gate: Gate
    privacy: Privacy
    late: Late
    evaluation: Evaluation
    track: Track
    device: torch.device
    trains_on: str
    retention: Retention = field(default_factory=Retention)

    def __post_init__(self) -> None:
        rules = self.privacy, self.gate, self.late
        parts.check(*rules, self.method, self.head, self.layout, self.stream)

    @property
    def name(self) -> str:
        """What people call it."""
        return f"{self.config['method']['name']}-{self.config['seed']}"


def run(experiment: Experiment) -> dict[str, Any]:
    """Run an experiment, or go on with it; its results, which are also in results.json."""
    with ExitStack() as stack:
        ledger = stack.enter_context(Ledger(experiment.run_dir, experiment.retention.keep_rounds))
        stack.callback(experiment.engine.close)
        stack.enter_context(logging_to(experiment.run_dir))
        console = Console(experiment.stream.rounds, ledger.round)
        done, records = _open(experiment, ledger, console)
        if not done:
            run_dir.reopen(ledger)
            _play(experiment, ledger, records, console, stack)
            run_dir.finish(ledger)
        found = _results(experiment, ledger)
        console.finished(found, experiment.run_dir)
    return found


def _open(
    experiment: Experiment, ledger: Ledger, console: Console
) -> tuple[bool, list[run_dir.Record]]:
    """Start a new directory or check that this configuration may go on in it.

    Whether the run is complete, every file as it left it; and the records of its rounds.
    """
    done = False
    if experiment.resumed:
        run_dir.resume(ledger, experiment.config, MAY_DIFFER)
        done, others = run_dir.finished(ledger), run_dir.changed(experiment.run_dir)
        state = "is already complete" if done else f"goes on after round {ledger.round}"
        console.say(f"{experiment.run_dir} {state}")
        for name in others:
            ledger.warn(f"{name} is not as the run left it: made again")
        done = done and not others
    else:
        start(ledger, experiment.config)
    records = run_dir.reconcile(ledger)
    for warning in ledger.warnings:
        console.say(f"warning: {warning}")
    return done, records


def start(ledger: Ledger, config: Json) -> None:
    """Make a directory the run of this configuration, which stands there without its place."""
    anywhere = yaml.dump({**config, "run_dir": None}).encode()
    files = {"config.yaml": anywhere, "env.json": run_dir.pretty(run_dir.environment())}
    run_dir.start(ledger, config, files)


def _play(
    experiment: Experiment,
    ledger: Ledger,
    records: Sequence[run_dir.Record],
    console: Console,
    stack: ExitStack,
) -> None:
    """The rounds, followed by everything that is made of them."""
    tracker = Tracker(experiment.track, experiment.run_dir, console.say)
    stack.callback(tracker.close)
    console.card(_card(experiment))
    config, name = experiment.config, experiment.name
    tracker.start(config, str(config["name"]), name, records)
    LOG.info("%s begins after round %d of %d", name, ledger.round, experiment.stream.rounds)
    account = budget(experiment, ledger, records)
    federation = _federation(experiment, ledger, account, tracker, console)
    try:
        with console:
            state = server.run(federation, experiment.initial)
    except FedBNNError as error:
        LOG.error("%s", error)
        raise
    _leave(experiment, state, tracker, ledger)
    LOG.info("%s is complete", name)


def _federation(
    made: Experiment, ledger: Ledger, account: Budget | None, *watchers: Watcher
) -> Federation:
    """The parts that the rounds need."""
    config, seed = made.config, int(made.config["seed"])
    learns = made.stream, made.method, made.head, made.backbone, made.layout, made.engine
    rejected = Rejected(made.run_dir / "rejected", made.gate.keep_rejected)
    judged = made.stream, made.backbone, made.layout, made.head, made.evaluation
    judge = Evaluator(*judged, seed, made.device)
    beside = made.gate, ledger, rejected, judge, watchers, made.late
    named = f"{config['name']}-{seed}"
    return Federation(named, *learns, *beside, privacy=made.privacy, budget=account)


def budget(
    made: Experiment, ledger: Ledger, records: Sequence[run_dir.Record] = ()
) -> Budget | None:
    """The account of a run whose clients are private: what a round asks each of them."""
    head, statistics = made.head, not isinstance(made.head, LinearHead)
    wanted = head.clients_per_round if isinstance(head, GaussianHead) else None

    def asked(round: int) -> dict[int, int]:
        more = made.stream.more_participants(round, wanted) if wanted else ()
        everything = dict.fromkeys(made.stream.participants(round), made.method.trains + statistics)
        return {**dict.fromkeys(more, 1), **everything}

    counts = asked, records, ledger.begun, ledger.begin
    return Budget(made.privacy, ledger.root, *counts) if made.privacy.on else None


def _leave(experiment: Experiment, state: State, tracker: Tracker, ledger: Ledger) -> None:
    """results.json, diagnostics, model, figures, report, and the end of the mirror."""
    found, directory = _results(experiment, ledger), experiment.run_dir
    diagnostics = results.diagnostics(run_dir.records(directory))
    run_dir.write_json(directory / "results.json", found)
    run_dir.write_json(directory / "diagnostics.json", diagnostics)
    if experiment.method.shares_prototypes:
        network, shown = experiment.config["network"], experiment.stream
        look = shown.image_shape, state.classes, shown.preprocess
        card = export.Card(network, *look, experiment.head)
        export.save_model(directory, card, state, experiment.backbone)
    drawn = page.write([directory], directory).figures if experiment.config["report"] else []
    tracker.finish(found, drawn)


def _results(experiment: Experiment, ledger: Ledger) -> dict[str, Any]:
    """What the rounds so far add up to."""
    stream, config, method = experiment.stream, experiment.config, experiment.method
    said = str(config["method"]["name"]), str(config["name"]), int(config["seed"]), stream.rounds
    tasks = tuple(task.name for task in stream.tasks), stream.task_ends()
    facts = results.Facts(*said, *tasks, _stored(method, ledger), method.facts())
    return results.results(run_dir.records(experiment.run_dir), facts)


def _stored(method: Method, ledger: Ledger) -> int:
    """Images of the past that all clients store together, for a method that replays them."""
    if method.replay is None:
        return 0
    private = filter(None, map(ledger.private, ledger.clients()))
    return sum(method.replay.stored(State.from_bytes(payload)) for payload in private)


def _card(experiment: Experiment) -> dict[str, str]:
    """What will happen, for the start-up card."""
    config, stream, section = experiment.config, experiment.stream, experiment.config["stream"]
    sources = section["sources"]
    data = sources if isinstance(sources, str) else " -> ".join(sources)
    drift = f"{len(stream.tasks)} tasks, {section['schedule']}"
    took = f"{section['clients_per_round']} a round, {stream.rounds} rounds, {section['partition']}"
    shape, weights = "x".join(map(str, stream.image_shape)), experiment.layout.size
    return {
        "scenario": f"{config['name']}: {section['incremental']}-incremental {data}, {drift}",
        "clients": f"{section['clients']} registered, {took}",
        "method": f"{config['method']['name']}: {experiment.method.formula}",
        "head": str(config["head"]["name"]),
        "network": f"{config['network']['name']}, {weights:,} weights, images {shape}",
        "seed": str(config["seed"]),
        "engine": str(config["engine"]["name"]),
        "device": experiment.trains_on,
        "run directory": str(experiment.run_dir),
        **({} if testable(stream) else {"tested on": "no images: nothing is evaluated"}),
    }
