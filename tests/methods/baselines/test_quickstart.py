"""Every baseline on the quickstart stream, composed and run as the command does it."""

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedbnn.cli.compose import SCHEMA, compose
from fedbnn.config.parse import parse
from fedbnn.federation import experiment
from fedbnn.networks import MLP, Classifier
from fedbnn.protocol.stream import Stream
from fedbnn.report import page
from fedbnn.seeds import forked

CONFIG = Path(__file__).parents[3] / "conf" / "quickstart.yaml"
NAMES = ("fedavg", "fedprox", "scaffold", "ewc", "mas", "lwf", "fcil", "joint", "local")
FEW = (
    "--stream.boundaries",
    "[2,4,5,6,7]",
    "--stream.rounds_per_task",
    "null",
    "--client.epochs",
    "2",
    "--evaluate.every",
    "0",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., dict[str, Any]]]:
    """Runs a baseline; no pictures are drawn of it."""
    folder = tmp_path_factory.mktemp("quickstart")

    def start(name: str, *more: str) -> dict[str, Any]:
        argv = ["--config", str(CONFIG), "--method", name, *FEW, *more]
        directory = folder / "-".join((name, *more))
        return experiment.run(compose(parse(argv, SCHEMA), directory))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(page, "write", lambda *_, **__: SimpleNamespace(page=None, figures=[]))
        yield start


@pytest.fixture(scope="module")
def found(run) -> dict[str, dict[str, Any]]:
    """Results of all baselines."""
    return {name: run(name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_each_task(name: str, found) -> None:
    result = found[name]
    assert result["rounds_done"] == 7
    assert not result["failed"]
    assert not result["refused"]
    assert result["task_aware"]["avg_ts"] > 60


def test_joint_beats_fedavg(found) -> None:
    assert (
        found["joint"]["class_agnostic"]["avg_fin"]
        > found["fedavg"]["class_agnostic"]["avg_fin"] + 5
    )


def central(stream: Stream, epochs: int) -> float:
    """Per cent of all test images that the same network has right after plain Adam on the pool."""
    pool, classes = stream.train(stream.rounds, 0), stream.train(stream.rounds, 0).classes
    with forked(0):
        network = Classifier(MLP(stream.image_shape, (100, 100)), len(classes))
        optimizer = torch.optim.Adam(network.parameters(), 1e-3)
        for images, labels in chain(*(pool.loader(16, shuffle=True) for _ in range(epochs))):
            optimizer.zero_grad()
            cross_entropy(network(images), labels).backward()
            optimizer.step()
    right = []
    for task in range(len(stream.tasks)):
        images, labels = next(iter(stream.test(task).among(classes).loader(9999, shuffle=False)))
        right.append((network(images).argmax(1) == labels).float().mean())
    return float(torch.stack(right).mean()) * 100


@pytest.mark.slow
def test_joint_is_as_good_as_plain_central_training_to_convergence(run, tmp_path: Path) -> None:
    """Within two per cent of it, on the images that `joint` has; and local is far below both."""
    more = ("--client.epochs", "10", "--stream.boundaries", "[1,2,3,4,7]")
    found = {name: run(name, *more) for name in ("joint", "local")}
    argv = ["--config", str(CONFIG), "--method", "joint", *FEW, *more]
    best = central(compose(parse(argv, SCHEMA), tmp_path / "joint").stream, 40)
    assert best > 80
    assert found["joint"]["class_agnostic"]["avg_fin"] > best - 2
    assert found["local"]["class_agnostic"]["avg_fin"] < best - 20


def test_results_say_what_a_reader_must_know(found) -> None:
    assert found["fcil"]["replay_images"] > 0
    assert all(result["replay_images"] == 0 for name, result in found.items() if name != "fcil")
    assert {found[name]["notes"]["consolidation"] for name in ("ewc", "mas", "lwf")} == {
        "at task ends"
    }


def test_traffic_is_what_the_methods_send(found) -> None:
    up, down = (
        {name: found[name][which] / found["fedavg"][which] for name in NAMES}
        for which in ("bytes_up", "bytes_down")
    )
    assert up["scaffold"] == pytest.approx(2, rel=0.1)
    assert down["scaffold"] == pytest.approx(2, rel=0.1)
    assert up["fedprox"] == down["fedprox"] == 1
    assert up["lwf"] == pytest.approx(1, rel=0.01)
    assert 1 < down["lwf"] < 2 < down["ewc"] < 4
    assert up["local"] < 0.1


@pytest.mark.slow
def test_private_state_travels_to_another_process_and_back(found, run) -> None:
    elsewhere, here = run("fcil", "--engine", "processes", "--engine.workers", "1"), found["fcil"]
    for name in ("task_aware", "class_agnostic", "bytes_up", "bytes_down"):
        assert elsewhere[name] == here[name], name


@pytest.mark.parametrize(
    ("schedule", "said"), [("separate", "at task ends"), ("gradual", "every 10 rounds")]
)
def test_an_experiment_takes_the_boundaries_that_its_stream_has(
    schedule: str, said: str, tmp_path: Path
) -> None:
    times = {
        "separate": ("--stream.rounds_per_task", "2"),
        "gradual": ("--stream.durations", "[[0, 3], [2, 4]]"),
    }
    argv = ["--stream.tasks", "2", "--stream.schedule", schedule, *times[schedule]]
    parsed = parse([*argv, "--network", "mlp", "--method", "ewc"], SCHEMA)
    assert compose(parsed, tmp_path).method.facts()["consolidation"] == said
