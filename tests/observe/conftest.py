"""A tiny stream and a model whose answers are known, for tests of everything that watches a run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from fedbnn.evaluation.evaluate import UNCERTAINTIES
from fedbnn.evaluation.results import Facts, diagnostics, results
from fedbnn.images import ImageSet
from fedbnn.report import page as report
from fedbnn.storage import run_dir as records
from fedbnn.storage.run_dir import environment


@dataclass(frozen=True)
class Task:
    name: str
    classes: tuple[str, ...]


@dataclass
class TinyStream:
    """Three tasks of two classes, two rounds each; `gradual`: the second has some of the next."""

    rounds: int = 6
    tasks: tuple[Task, ...] = tuple(
        Task(f"t{n}", (f"toy/{2 * n}", f"toy/{2 * n + 1}")) for n in range(3)
    )
    gradual: bool = False
    images_per_class: int = 20

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(name for task in self.tasks for name in task.classes)

    def shares(self, round: int) -> tuple[float, ...]:
        current = (round - 1) // 2
        shares = [float(task == current) for task in range(3)]
        if self.gradual and round % 2 == 0 and current < 2:
            shares[current], shares[current + 1] = 0.75, 0.25
        return tuple(shares)

    def task_ends(self) -> tuple[int, ...]:
        return (2, 4, 6)

    def _images(self, labels: Tensor) -> ImageSet:
        return ImageSet(labels.to(torch.uint8).view(-1, 1, 1, 1), labels, self.classes)

    def test(self, task: int) -> ImageSet:
        names = self.tasks[task].classes
        labels = torch.tensor([self.classes.index(name) for name in names])
        return self._images(labels.repeat(self.images_per_class))

    def test_now(self, round: int, images: int | None) -> ImageSet:
        per_task = [int(share * 2 * self.images_per_class) for share in self.shares(round)]
        labels = torch.cat([self.test(task).labels[:count] for task, count in enumerate(per_task)])
        return self._images(labels[:images])


@dataclass
class KnownPredictor:
    """Scores by `answer(true class, column class)`; a pixel is its label. Counts images seen."""

    classes: tuple[str, ...]
    answer: Callable[[str, str], float] = lambda truth, column: 5.0 * (truth == column)
    samples: int = 3
    calls: list[int] = field(default_factory=list)

    def read(self, images: ImageSet) -> tuple[Tensor, None]:
        return self.scores(images), None

    def scores(self, images: ImageSet) -> Tensor:
        self.calls.append(len(images))
        truths = [images.classes[int(pixel)] for pixel in images.pixels.flatten()]
        table = torch.tensor(
            [[self.answer(truth, column) for column in self.classes] for truth in truths]
        )
        return table.view(len(truths), len(self.classes)).expand(self.samples, -1, -1)


@pytest.fixture
def stream() -> TinyStream:
    return TinyStream()


@pytest.fixture
def gradual_stream() -> TinyStream:
    return TinyStream(gradual=True)


@pytest.fixture
def predictor() -> type[KnownPredictor]:
    return KnownPredictor


POOLED = {"accuracy": 70.0, "nll": 0.55, "brier": 0.28, "ece": 0.05}


def made_up_lines(seed: int = 0, rounds: int = 12, bayesian: bool = True) -> list[dict[str, Any]]:
    """Lines of a believable run: three tasks of four rounds each, older tasks fade."""
    random = Random(seed)
    return [_made_up_line(number, rounds, random, bayesian) for number in range(1, rounds + 1)]


def _made_up_line(number: int, rounds: int, random: Random, bayesian: bool) -> dict[str, Any]:
    current, at_end = (number - 1) * 3 // rounds, number % (rounds // 3) == 0
    now = 40 + 10 * ((number - 1) % 4) + random.random()
    return {
        "round": number,
        "clients": [1, 4, 7],
        "failed": {"4": "diverged: the loss is not finite"} if number == 5 else {},
        "refused": {"7": "influence 1e6 times the median"} if number == 7 else {},
        "trust": {"1": 0.25, "4": 0.5} if number == 9 else {},
        "shares": [float(task == current) for task in range(3)],
        "samples": 300,
        "bytes_up": {"train": 90_000, "statistics": 30_000},
        "bytes_down": {"train": 80_000, "statistics": 20_000},
        "train": {"loss": 2.0 / number} | ({"kl": 0.01 * number} if bayesian else {}),
        "load": {"machine": 1.1, "own": 0.95},
        "seconds": {"round": 1.5, "train": 1.0, "inner": 0.9, "fold": 0.1, "evaluate": 0.3},
        "fon": {"task_aware": now + 20, "class_agnostic": now} if number != 3 else None,
        "tasks": [
            _made_up_task(task, current, random) if at_end and task <= current else None
            for task in range(3)
        ],
        "pooled": dict.fromkeys(("task_aware", "class_agnostic"), POOLED) if at_end else None,
        "novelty": {
            "entropy": 0.7 + random.random() / 10,
            "mutual_information": 0.6 if bayesian else None,
            "unknown_class": 0.8 if bayesian else None,
        }
        if at_end and current < 2
        else None,
        "surprise": None if number == rounds else 0.8 if at_end else 0.1,
        "seen_classes": 2 * (current + 1),
        "diagnostics": _made_up_diagnostics() if at_end else None,
        "posterior": {
            "scale": {"backbone": [0.01, 0.02 / number, 0.05], "prototypes": [0.02, 0.03, 0.09]}
        }
        if bayesian
        else None,
        "notes": {},
    }


def _made_up_task(task: int, current: int, random: Random) -> dict[str, Any]:
    aware, agnostic = (
        90 - 6 * (current - task) + random.random(),
        80 - 25 * (current - task) + random.random(),
    )
    rest = {"nll": 0.6, "brier": 0.3, "ece": 0.08}
    chance = {"task_aware": 50.0, "class_agnostic": 100 / (2 * (current + 1))}
    return {
        "images": 40,
        "task_aware": {"accuracy": aware, **rest},
        "class_agnostic": {"accuracy": agnostic, **rest},
        "chance": chance,
    }


def _made_up_diagnostics() -> dict[str, Any]:
    confidence = [(place + 0.5) / 15 for place in range(15)]
    bins = {
        "images": [place * 3 for place in range(15)],
        "confidence": confidence,
        "accuracy": [0.9 * value for value in confidence],
    }
    counts = {
        "seen": [float(30 - place) for place in range(30)],
        "unseen": [float(place) for place in range(30)],
    }
    histogram = {"edges": [place / 15 for place in range(31)], **counts}
    return {
        "reliability": {"task_aware": bins, "class_agnostic": bins},
        "uncertainty": dict.fromkeys(UNCERTAINTIES, histogram),
    }


@pytest.fixture
def lines() -> list[dict[str, Any]]:
    return made_up_lines()


@pytest.fixture
def facts() -> Facts:
    return made_up_facts("fedbnn", 0)


def made_up_facts(method: str, seed: int, replay: int = 0) -> Facts:
    return Facts(method, "toy, three tasks", seed, 12, ("one", "two", "three"), (4, 8, 12), replay)


@pytest.fixture
def run(lines: list[dict[str, Any]], facts: Facts) -> dict[str, Any]:
    return results(lines, facts)


@pytest.fixture
def grid() -> list[dict[str, Any]]:
    return [run for run, _ in _grid()]


def _grid() -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Three methods by three seeds, results and lines; `fcil` stores images."""
    found = []
    for place, (name, stored) in enumerate({"fedbnn": 0, "fedavg": 0, "fcil": 200}.items()):
        for seed in range(3):
            lines = made_up_lines(10 * place + seed, bayesian=name == "fedbnn")
            found.append((results(lines, made_up_facts(name, seed, stored)), lines))
    return found


def _written(directory: Path, run: dict[str, Any], lines: list[dict[str, Any]]) -> Path:
    """A run directory with the files a report reads."""
    directory.mkdir(parents=True)
    records.write_json(directory / "results.json", run)
    records.write_json(directory / "diagnostics.json", diagnostics(lines))
    records.write_json(directory / "env.json", environment())
    (directory / "config.yaml").write_text("name: toy\nnote: <script>alert('config')</script>\n")
    return directory


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of one run."""
    lines = made_up_lines()
    run = results(lines, made_up_facts("fedbnn", 0))
    run_dir = _written(tmp_path_factory.mktemp("report") / "run", run, lines)
    return report.write([run_dir], run_dir).page


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of three methods by three seeds."""
    root = tmp_path_factory.mktemp("comparison")
    dirs = [_written(root / f"{run['method']}-{run['seed']}", run, lines) for run, lines in _grid()]
    return report.write(dirs, root / "made", "Three <toy> tasks").page
