"""The composition root: a configuration becomes a stream, a network, a method, clients and an engine, and runs."""

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fedbnn

from pytorch_lightning import Trainer  # isort: skip

from datamodules.schedule_view import draw_schedule, schedule_rows
from datamodules.stream import FederatedStream
from fedbnn.bayes.flatten import layout_of
from fedbnn.cli.program import Program
from fedbnn.config import Choice, Free, Named, Parsed, Schema, Section, Value, restored
from fedbnn.defense.gate import Gate
from fedbnn.evaluation.evaluation import Evaluation
from fedbnn.export import Card
from fedbnn.federation.engines.process import ProcessEngine
from fedbnn.federation.engines.serial import SerialEngine
from fedbnn.federation.local import LocalTraining
from fedbnn.federation.runner import Plan
from fedbnn.heads import library
from fedbnn.methods import METHODS
from fedbnn.methods.boundary import without_boundaries
from fedbnn.networks import NETWORKS
from fedbnn.seeds import address, forked
from fedbnn.state import State
from fedbnn.tracking.tracking import Track
from lightning_modules.client_runner import ClientRunner

SCHEMA: Schema = {
    "name": Value(str, "run", "name of the run, and of its directory under runs/"),
    "seed": Value(int, 0, "seed of everything random"),
    "run_dir": Value(
        str | None,
        None,
        "directory of the run; null is the first free one of runs/NAME, runs/NAME-2, ...",
    ),
    "beside": Value(
        list[str], [], "methods to run after the first one on the same stream, to compare with"
    ),
    "keep_rounds": Value(int, 3, "how many of the newest rounds stay on disk"),
    "stream": Section(FederatedStream, given=("seed",)),
    "network": Named(
        {name: Choice(build) for name, build in NETWORKS.items()}, "lenet", given=("image_shape",)
    ),
    "method": Named(
        {name: Choice(preset.method, preset.defaults) for name, preset in METHODS.items()}, "fedbnn"
    ),
    "client": Section(LocalTraining),
    "engine": Named(
        {"serial": Choice(SerialEngine), "processes": Choice(ProcessEngine)},
        "serial",
        given=("worker", "entry", "config", "deadline", "max_megabytes", "log"),
    ),
    "trainer": Free(
        tuple(inspect.signature(Trainer.__init__).parameters)[1:],
        "any argument of Lightning's Trainer",
    ),
    "evaluate": Section(Evaluation),
    "gate": Section(Gate),
    "track": Section(Track),
}


def client_runner(config: Mapping[str, Any]) -> ClientRunner:
    """The client's side of a run, as every worker process composes it."""
    parsed = restored(config, SCHEMA)
    stream, method = parsed.build("stream", seed=parsed["seed"]), parsed.build("method")
    backbone = parsed.build("network", image_shape=stream.image_shape)
    layout = layout_of(backbone, method.latent_norm)
    return ClientRunner(
        method.stream(stream),
        backbone,
        layout,
        method,
        parsed.build("client"),
        parsed["trainer"],
        parsed["seed"],
    )


def engine(parsed: Parsed, run_dir: Path, gate: Gate) -> SerialEngine | ProcessEngine:
    """Where the clients run."""
    deadline = gate.deadline_seconds
    if parsed["engine"]["name"] == "serial":
        return parsed.build("engine", worker=client_runner(parsed.values), deadline=deadline)
    composed = {"entry": "train:client_runner", "config": parsed.values}
    limits = {"deadline": deadline, "max_megabytes": gate.max_megabytes}
    return parsed.build("engine", **composed, **limits, log=run_dir / "log.txt")


def plan(parsed: Parsed, run_dir: Path) -> Plan:
    """Every part of a run."""
    stream, method, gate = (
        parsed.build("stream", seed=parsed["seed"]),
        parsed.build("method"),
        parsed.build("gate"),
    )
    method = method if stream.separate else without_boundaries(method)
    with forked(address(parsed["seed"], "network")):
        backbone = parsed.build("network", image_shape=stream.image_shape)
    layout = layout_of(backbone, method.latent_norm)
    weights, buffers = layout.read(backbone)
    rows = library.empty(backbone.width) if method.share == "global" else {}
    anywhere = replace(parsed, values={**parsed.values, "run_dir": None})
    return Plan(
        config=parsed.values,
        yaml=anywhere.yaml(),
        run_dir=run_dir,
        resumed=bool(parsed.flags.resume),
        stream=stream,
        method=method,
        layout=layout,
        gate=gate,
        keep_rounds=parsed["keep_rounds"],
        card=Card(
            parsed["network"],
            stream.image_shape,
            (),
            stream.preprocess,
            method.latent_norm,
            method.head_temperature,
            method.head_rows,
            method.head_prior,
        ),
        initial=method.start(
            State({"backbone": weights, "buffers": buffers, **rows}), layout, stream.num_clients
        ),
        engine=lambda: engine(parsed, run_dir, gate),
        evaluation=parsed.build("evaluate"),
        track=parsed.build("track"),
    )


def preview(parsed: Parsed, picture: Path) -> Sequence[Mapping[str, object]]:
    """The schedule of a stream as rows, and as a picture."""
    stream = parsed.build("stream", seed=parsed["seed"])
    draw_schedule(stream, picture)
    return [vars(row) for row in schedule_rows(stream)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python train.py ARGV`."""
    return Program(SCHEMA, plan, preview).main(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
