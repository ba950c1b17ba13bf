"""One run from its directory's point of view: open or resume it, play the rounds, leave results behind."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedbnn import export
from fedbnn.bayes.flatten import Layout
from fedbnn.defense.gate import Gate
from fedbnn.errors import FedBNNError
from fedbnn.evaluation import results
from fedbnn.evaluation.evaluate import (
    Evaluation,
    evaluate_clients,
    evaluate_round,
    with_prototypes,
)
from fedbnn.evaluation.metrics import scale_quantiles
from fedbnn.evaluation.results import Facts
from fedbnn.export import Card
from fedbnn.federation import server
from fedbnn.federation.engines import Engine
from fedbnn.heads.places import without_places
from fedbnn.heads.predictor import Predictor
from fedbnn.methods import Method
from fedbnn.report import page as report
from fedbnn.state import State
from fedbnn.storage import environment, records, runs
from fedbnn.storage.ledger import Ledger
from fedbnn.storage.rejected import Rejected
from fedbnn.tracking import Watcher
from fedbnn.tracking.console import Console, logging_to
from fedbnn.tracking.wandb import Track, Tracker

MAY_DIFFER = (
    "engine",
    "track",
    "run_dir",
    "name",
    "beside",
    "trainer",
    "stream.data_dir",
    "stream.cache_dir",
    "stream.download",
)
Json = Mapping[str, Any]
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """All the parts of one run, made by the composition root. `backbone` builds a network for evaluation."""

    config: Json
    yaml: str
    run_dir: Path
    resumed: bool
    stream: Any
    method: Method
    layout: Layout
    card: Card
    initial: State
    engine: Callable[[], Engine]
    gate: Gate
    evaluation: Evaluation
    track: Track
    keep_rounds: int = 3
    facts: Json = field(default_factory=dict)


def conduct(plan: Plan) -> dict[str, Any]:
    """Run (or go on with) a plan; its results, which are also in results.json."""
    with ExitStack() as stack:
        ledger = stack.enter_context(Ledger(plan.run_dir, plan.keep_rounds))
        stack.enter_context(logging_to(plan.run_dir))
        console = Console(plan.stream.rounds, ledger.round)
        _open(plan, ledger, console)
        if not runs.finished(ledger):
            _play(plan, ledger, console, stack)
            runs.finish(ledger)
        found = results.results(records.read(plan.run_dir), _facts(plan, ledger))
        console.finished(found, plan.run_dir)
    return found


def _open(plan: Plan, ledger: Ledger, console: Console) -> None:
    """Start a new directory or check that this configuration may go on in it."""
    if plan.resumed:
        runs.resume(ledger, plan.config, MAY_DIFFER)
        state = (
            "is already complete"
            if runs.finished(ledger)
            else f"goes on after round {ledger.round}"
        )
        console.say(f"{plan.run_dir} {state}")
    else:
        files = {
            "config.yaml": plan.yaml.encode(),
            "env.json": records.pretty(environment.environment()),
        }
        runs.start(ledger, plan.config, files)
    for warning in ledger.warnings:
        console.say(f"warning: {warning}")


def _play(plan: Plan, ledger: Ledger, console: Console, stack: ExitStack) -> None:
    """The rounds, followed by everything that is made of them."""
    tracker = Tracker(plan.track, plan.run_dir, console.say)
    stack.callback(tracker.close)
    committed = ledger.latest()
    console.card(_card(plan))
    name = f"{plan.config['method']['name']}-{plan.config['seed']}"
    tracker.start(
        plan.config,
        str(plan.config["name"]),
        name,
        ledger.round,
        committed.record if committed else None,
    )
    LOG.info("%s begins after round %d of %d", name, ledger.round, plan.stream.rounds)
    with console, _failure_logged():
        engine = plan.engine()
        stack.callback(engine.close)
        state = server.run(_federation(plan, ledger, engine, (tracker, console)), plan.initial)
    _leave(plan, state, tracker, ledger)
    LOG.info("%s is complete", name)


@contextmanager
def _failure_logged() -> Iterator[None]:
    """The one line in which a run fails stands in its log, too."""
    try:
        yield
    except FedBNNError as error:
        LOG.error("%s", error)
        raise


def _federation(
    plan: Plan, ledger: Ledger, engine: Engine, watchers: Sequence[Watcher]
) -> server.Federation:
    """The parts the server loop needs."""
    return server.Federation(
        run=f"{plan.config['name']}-{plan.config['seed']}",
        stream=plan.method.stream(plan.stream),
        method=plan.method,
        layout=plan.layout,
        engine=engine,
        gate=plan.gate,
        ledger=ledger,
        rejected=Rejected(plan.run_dir / "rejected", plan.gate.keep_rejected),
        evaluate=lambda state, number, privates: _evaluate(plan, state, number, privates),
        watchers=watchers,
    )


def _evaluate(
    plan: Plan, state: State, number: int, privates: Mapping[int, bytes]
) -> dict[str, Any]:
    """The evaluated part of a record; client by client when the rows stay with the clients."""
    if plan.method.share == "global":
        found = _evaluated(plan, state, number)
        if plan.evaluation.both_heads and plan.method.head == "gaussian":
            found["linear"] = _evaluated(plan, without_places(state), number)
    else:
        own = {client: State.from_bytes(payload) for client, payload in privates.items()}
        models = [_predictor(plan, with_prototypes(state, one)) for one in own.values()]
        found = evaluate_clients(models, plan.stream, number, plan.evaluation)
    return {**found, "posterior": scale_quantiles(state)}


def _evaluated(plan: Plan, state: State, number: int) -> dict[str, Any]:
    return evaluate_round(_predictor(plan, state), plan.stream, number, plan.evaluation)


def _predictor(plan: Plan, state: State) -> Predictor:
    samples, seed = plan.evaluation.samples, int(plan.config["seed"])
    return Predictor(
        export.build_backbone(plan.card), plan.layout, state, samples, seed, plan.card.reading
    )


def _leave(plan: Plan, state: State, tracker: Tracker, ledger: Ledger) -> None:
    """results.json, diagnostics, model, figures, report, and the end of the mirror."""
    lines = records.read(plan.run_dir)
    found = results.results(lines, _facts(plan, ledger))
    records.write_json(plan.run_dir / "results.json", found)
    records.write_json(plan.run_dir / "diagnostics.json", results.diagnostics(lines))
    if plan.method.share == "global":
        export.save_model(
            plan.run_dir, replace(plan.card, classes=state.classes), state, plan.layout
        )
    tracker.finish(found, report.write([plan.run_dir], plan.run_dir).figures)


def _facts(plan: Plan, ledger: Ledger) -> Facts:
    """What results.json says beside the measurements."""
    return Facts(
        method=str(plan.config["method"]["name"]),
        scenario=str(plan.config["name"]),
        seed=int(plan.config["seed"]),
        rounds=plan.stream.rounds,
        task_names=tuple(task.name for task in plan.stream.tasks),
        task_ends=plan.stream.task_ends(),
        replay_images=_stored(plan.method, ledger),
        notes=plan.method.facts(),
    )


def _stored(method: Method, ledger: Ledger) -> int:
    """Images of the past that all clients store together, for a method that replays them."""
    if not method.replay:
        return 0
    private = (ledger.private(client) for client in ledger.clients())
    return sum(method.stored(State.from_bytes(payload)) for payload in private if payload)


def _card(plan: Plan) -> dict[str, str]:
    """What will happen, for the start-up card."""
    stream, config = plan.stream, plan.config
    section = config["stream"]
    sources = (
        section["sources"]
        if isinstance(section["sources"], str)
        else " -> ".join(section["sources"])
    )
    shape = "x".join(map(str, plan.card.image_shape))
    kind = f"{section['incremental']}-incremental {sources}, {len(stream.tasks)} tasks, {section['schedule']}"
    took = f"{section['clients_per_round']} a round, {stream.rounds} rounds, {section['partition']}"
    return {
        "scenario": f"{config['name']}: {kind}",
        "clients": f"{section['clients']} registered, {took}",
        "method": f"{config['method']['name']}: {plan.method.formula}",
        "network": f"{config['network']['name']}, {plan.layout.size:,} weights, images {shape}",
        "seed": str(config["seed"]),
        "engine": str(config["engine"]["name"]),
        "run directory": str(plan.run_dir),
    }
