"""The composition root: a configuration becomes the parts of a run, each of them once.

The only place that knows streams, networks, methods, heads, clients and engines all together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pytorch_lightning import Trainer
from pytorch_lightning.loggers import Logger
from torch import nn

from datamodules.stream import FederatedStream
from fedbnn import devices, methods
from fedbnn.bayes.flatten import Layout, layout_of
from fedbnn.config import own
from fedbnn.config.parse import Parsed, restored
from fedbnn.config.schema import Free, Named, Schema, Section, Value
from fedbnn.defense.gate import Gate
from fedbnn.defense.privacy import Privacy
from fedbnn.evaluation.evaluate import Evaluation
from fedbnn.federation.engines import Engine, SerialEngine
from fedbnn.federation.engines.flower.simulation import FlowerSimulation
from fedbnn.federation.engines.process import ProcessEngine
from fedbnn.federation.experiment import Experiment
from fedbnn.federation.parts import Late
from fedbnn.heads import HEADS, Head, prototypes
from fedbnn.methods import METHODS, Method
from fedbnn.methods.base import without_boundaries
from fedbnn.networks import NETWORKS
from fedbnn.protocol.state import State
from fedbnn.protocol.stream import Stream
from fedbnn.seeds import address, forked
from fedbnn.storage.run_dir import Retention
from fedbnn.tracking.wandb import Track
from lightning_modules.client_runner import ClientRunner
from lightning_modules.client_trainer import LocalTraining

Engines: TypeAlias = Callable[[Parsed], Engine]
Parts: TypeAlias = tuple[Stream, nn.Module, Layout, Method, Head]
DIRECTORY = "directory of the run; null is the first free one of runs/NAME, runs/NAME-2, ..."
EPOCHS = "client.epochs says how often a client goes through its images"
MACHINES = "a client trains on one machine; give other machines clients of their own"


@dataclass(frozen=True)
class Tracked(Track):
    __doc__ = Track.__doc__

    logger: Logger | list[Logger] | None = None


SCHEMA: Schema = {
    "name": Value(str, "run", "name of the run, and of its directory under runs/"),
    "seed": Value(int, 0, "seed of everything random"),
    "run_dir": Value(str | None, None, DIRECTORY),
    "beside": Value(list[str], [], "methods to run beside it, each with its own flags"),
    "report": Value(bool, True, "draw report.html and figures/; fedbnn report does so later"),
    "stream": Section(FederatedStream, given=("seed",)),
    "network": Named(NETWORKS, "lenet", given=("image_shape",), own=own.network),
    "method": Named(
        {name: preset.method for name, preset in METHODS.items()},
        "fedbnn",
        presets={name: preset.defaults for name, preset in METHODS.items()},
        own=methods.own,
    ),
    "head": Named(HEADS, {name: preset.head for name, preset in METHODS.items()}, "method"),
    "client": Section(LocalTraining),
    "engine": Named(
        {"serial": SerialEngine, "processes": ProcessEngine, "flower": FlowerSimulation},
        "serial",
        given=("worker", "entry", "config", "deadline", "max_megabytes", "log", "visible"),
    ),
    "trainer": Free(
        Trainer,
        {**dict.fromkeys(("max_epochs", "min_epochs"), EPOCHS), "num_nodes": MACHINES},
        "any argument of Lightning's Trainer; objects by class_path and init_args",
    ),
    "evaluate": Section(Evaluation),
    "gate": Section(Gate),
    "privacy": Section(Privacy),
    "federation": Section(Late),
    "ledger": Section(Retention),
    "track": Section(Tracked),
}


def compose(
    parsed: Parsed, run_dir: Path, resumed: bool = False, engine: Engines | None = None
) -> Experiment:
    """Every part of a run that lives in this directory; nothing is written or started yet.

    `engine` makes the engine where the command does not: Flower calls it with a grid of its own.
    """
    stream, backbone, layout, method, head = parts = _parts(parsed)
    runner = _client_runner(parsed, parts)
    weights, buffers = layout.read(backbone)
    state = {"backbone": weights, "buffers": buffers}
    if method.shares_prototypes:
        state |= prototypes.empty(int(backbone.width))  # type: ignore[arg-type]
    return Experiment(
        config=parsed.values,
        run_dir=run_dir,
        resumed=resumed,
        stream=stream,
        method=method,
        head=head,
        backbone=backbone,
        layout=layout,
        initial=method.start(State(state), layout, parsed["stream"]["clients"]),
        engine=engine(parsed) if engine else _engine(parsed, runner, run_dir),
        gate=parsed.build("gate"),
        privacy=parsed.build("privacy"),
        late=parsed.build("federation"),
        evaluation=parsed.build("evaluate"),
        track=parsed.build("track"),
        retention=parsed.build("ledger"),
        device=runner.trainer.device,
        trains_on=runner.trainer.described,
    )


def client_runner(config: Mapping[str, Any]) -> ClientRunner:
    """The client's side of a run, as every worker process composes it from the values alone."""
    parsed = restored(config, SCHEMA)
    return _client_runner(parsed, _parts(parsed))


def _parts(parsed: Parsed) -> Parts:
    """What server and clients share in one process; the seed alone decides the first weights."""
    opened, head = parsed.build("stream", seed=parsed["seed"]), parsed.build("head")
    method = parsed.build("method")
    method = method if opened.separate else without_boundaries(method)
    with forked(address(parsed["seed"], "network")):
        backbone = parsed.build("network", image_shape=opened.image_shape)
    return method.stream(opened), backbone, layout_of(backbone), method, head


def _client_runner(parsed: Parsed, parts: Parts) -> ClientRunner:
    """The client's side, with these parts."""
    local, trainer = parsed.build("client"), parsed.build("trainer")
    return ClientRunner(*parts, local, trainer, parsed["seed"], parsed.build("privacy"))


def _engine(parsed: Parsed, runner: ClientRunner, run_dir: Path) -> Engine:
    """Where the clients run: here with the parts there are, or in workers that start later."""
    name, given = parsed["engine"]["name"], {"deadline": parsed["gate"]["deadline_seconds"]}
    if name == "serial":
        given |= {"worker": runner}
    else:
        own.refuse_program(parsed.values, f"workers of engine: {name}")
        given |= {"entry": f"{__name__}:{client_runner.__name__}", "config": parsed.values}
    if name == "processes":
        given |= {"max_megabytes": parsed["gate"]["max_megabytes"], "log": run_dir / "log.txt"}
        given |= {"visible": devices.gpus() if runner.trainer.pinnable else []}
    engine: Engine = parsed.build("engine", **given)
    return engine
