"""The composition root: a configuration becomes a stream, a network, a method, clients and an engine, and runs."""

import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fedbnn  # noqa: F401  (first: it makes torchvision importable beside a CPU-only torch)

from pytorch_lightning import Trainer  # isort: skip

from datamodules.stream import FederatedStream
from fedbnn import library, runs
from fedbnn.config import Choice, Free, Named, Parsed, Section, Value, parse
from fedbnn.deploy import Card
from fedbnn.engines.serial import SerialEngine
from fedbnn.evaluation import Evaluation
from fedbnn.gate import Gate
from fedbnn.layout import layout_of
from fedbnn.local import LocalTraining
from fedbnn.methods import METHODS
from fedbnn.networks import NETWORKS
from fedbnn.runner import Plan, conduct
from fedbnn.seeds import address, forked
from fedbnn.state import State
from fedbnn.tracking import Track
from lightning_modules.work import ClientWork

SCHEMA = {
    "name": Value(str, "run", "name of the run, and of its directory under runs/"),
    "seed": Value(int, 0, "seed of everything random"),
    "run_dir": Value(str | None, None, "directory of the run; null is runs/NAME"),
    "stream": Section(FederatedStream, given=("seed",)),
    "network": Named({name: Choice(build) for name, build in NETWORKS.items()}, "lenet", given=("image_shape",)),
    "method": Named({name: Choice(preset.method, preset.defaults) for name, preset in METHODS.items()}, "fedbnn"),
    "client": Section(LocalTraining),
    "engine": Named({"serial": Choice(SerialEngine)}, "serial", given=("worker", "deadline")),
    "trainer": Free(tuple(inspect.signature(Trainer.__init__).parameters)[1:], "any argument of Lightning's Trainer"),
    "evaluate": Section(Evaluation),
    "gate": Section(Gate),
    "track": Section(Track),
}


def plan_of(parsed: Parsed) -> Plan:
    """Build every part of a run."""
    stream, method, seed = parsed.build("stream", seed=parsed["seed"]), parsed.build("method"), parsed["seed"]
    with forked(address(seed, "network")):
        trunk = parsed.build("network", image_shape=stream.image_shape)
    layout = layout_of(trunk, getattr(method, "bayes_norm", True))
    weights, buffers = layout.read(trunk)
    rows = library.empty(trunk.width) if method.share == "global" else {}
    gate = parsed.build("gate")
    work = ClientWork(method.audience(stream), trunk, layout, method, parsed.build("client"), parsed["trainer"], seed)
    return Plan(
        config=parsed.values, yaml=parsed.yaml(), run_dir=Path(parsed["run_dir"] or f"runs/{parsed['name']}"), resumed=bool(parsed.flags.resume),
        stream=stream, method=method, layout=layout,
        card=Card(parsed["network"], stream.image_shape, (), stream.look, getattr(method, "bayes_norm", True)),
        initial=method.start(State({"trunk": weights, "buffers": buffers, **rows}), layout, stream.num_clients),
        engine=lambda: parsed.build("engine", worker=work, deadline=gate.deadline_seconds),
        gate=gate, evaluation=parsed.build("evaluate"), track=parsed.build("track"),
    )  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parsed = parse(argv, SCHEMA, lambda which: runs.find(which, Path("runs")))
    conduct(plan_of(parsed))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
