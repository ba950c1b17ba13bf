"""Every experiment in conf/ builds without its data; those of the paper have its schedules."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fedbnn.bayes.flatten import layout_of
from fedbnn.cli.compose import SCHEMA
from fedbnn.config.parse import Parsed, parse
from fedbnn.methods import METHODS

CONF = Path(__file__).parents[2] / "conf"
NATURAL = {
    "digits": (1, 8),
    "mnist": (1, 28),
    "cifar10": (3, 32),
    "cifar100": (3, 32),
    "tiny_imagenet": (3, 64),
}


@dataclass(frozen=True)
class Expected:
    """What a configuration must say: windows (start, end] and stuff of its tasks, size, clients."""

    windows: tuple[tuple[int, int], ...]
    made_of: str
    size: int
    at_once: int = 10
    clients: int = 100


def separate(rounds: int, tasks: int) -> tuple[tuple[int, int], ...]:
    """Tasks of equal length, one after the other."""
    return tuple((task * rounds, (task + 1) * rounds) for task in range(tasks))


EXPECTED = {
    "cifar100_ci": Expected(separate(25, 4), "class cifar100", 32),
    "tinyimagenet_ci": Expected(separate(25, 4), "class tiny_imagenet", 64),
    "small_ti": Expected(separate(50, 3), "task cifar10 cifar100 tiny_imagenet", 32),
    "large_ti": Expected(separate(50, 3), "task stl10 flowers102 food101", 96),
    "gradual_ci": Expected(((0, 30), (20, 55), (45, 80), (70, 100)), "class tiny_imagenet", 64),
    "gradual_ti": Expected(
        ((0, 60), (40, 110), (90, 150)), "task cifar10 cifar100 tiny_imagenet", 32
    ),
    "staggered_ci": Expected(((0, 35), (25, 60), (50, 85), (75, 100)), "class cifar100", 32),
    "participation": Expected(separate(25, 4), "class tiny_imagenet", 64, at_once=20),
    "split_mnist": Expected(separate(10, 5), "class mnist", 28),
    "mnist_fashion": Expected(separate(10, 2), "task mnist fashion_mnist", 28),
    "domain_digits": Expected(separate(8, 5), "domain digits", 8, at_once=5, clients=20),
    "quickstart": Expected(separate(4, 5), "class digits", 8, at_once=5, clients=20),
    "cifar100_ci_fast": Expected(separate(10, 4), "class cifar100", 32),
    "cifar100_fixed": Expected(separate(10, 4), "class cifar100", 32),
    "cifar100_sota": Expected(separate(1, 5), "class cifar100", 32, at_once=5, clients=5),
    "gradual_ci_fast": Expected(((0, 12), (8, 22), (18, 32), (28, 40)), "class cifar100", 32),
    "gradual_ti_fast": Expected(
        ((0, 16), (11, 29), (24, 40)), "task cifar10 cifar100 tiny_imagenet", 32
    ),
}
PAPER = (
    "cifar100_ci",
    "tinyimagenet_ci",
    "small_ti",
    "large_ti",
    "gradual_ci",
    "gradual_ti",
    "staggered_ci",
    "participation",
)


def read(name: str, *flags: str) -> Parsed:
    """The configuration of an experiment."""
    return parse(["--config", str(CONF / f"{name}.yaml"), *flags], SCHEMA)


def shape_of(stream: dict[str, Any]) -> tuple[int, int, int]:
    """The images a stream would have, as its `size` and its first source say."""
    sources = [stream["sources"]] if isinstance(stream["sources"], str) else stream["sources"]
    channels, natural = NATURAL.get(sources[0], (3, 96))
    size = stream["size"] or natural
    return channels, size, size


def test_no_experiment_is_left_out() -> None:
    assert sorted(
        path.relative_to(CONF).with_suffix("").as_posix() for path in CONF.rglob("*.y*ml")
    ) == sorted(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_experiment_has_its_schedule_clients_and_sources(name: str) -> None:
    expected, config = EXPECTED[name], read(name)
    stream = config.build("stream", seed=config["seed"])
    assert stream.schedule.windows == expected.windows
    assert stream.rounds == expected.windows[-1][1]
    assert (stream.num_clients, stream.clients_per_round) == (expected.clients, expected.at_once)
    assert " ".join((stream.incremental, *stream.sources)) == expected.made_of
    assert shape_of(config["stream"])[1] == expected.size
    assert config["name"] == name


@pytest.mark.parametrize("name", EXPECTED)
def test_an_experiment_builds_its_network_and_method(name: str) -> None:
    config = read(name)
    shape = shape_of(config["stream"])
    drawn = config["network"]["name"] == "random_conv"  # filters are drawn, so they are real
    with torch.device("cpu" if drawn else "meta"):
        backbone = config.build("network", image_shape=shape)
        features = backbone.eval()(torch.zeros(2, *shape))
    assert features.shape == (2, backbone.width)
    method = config.build("method")
    assert type(method) is METHODS[config["method"]["name"]].method
    assert layout_of(backbone).size == sum(weight.numel() for weight in backbone.parameters())


@pytest.mark.parametrize("name", EXPECTED)
def test_an_experiment_begins_with_a_comment_that_says_what_it_is(name: str) -> None:
    first, *_ = (CONF / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert first.startswith("# ")
    assert len(first) > 40


@pytest.mark.parametrize("name", PAPER)
def test_the_experiments_of_the_paper_share_its_network_partition_and_plain_fold(name: str) -> None:
    config = read(name)
    assert config["network"]["name"] == "paper_resnet"
    assert (config["stream"]["partition"], config["stream"]["alpha"]) == ("dirichlet", 1.0)
    assert config["stream"]["samples_per_round"] is None
    assert config["gate"]["influence_cap"] is None


@pytest.mark.parametrize("name", [name for name in EXPECTED if name.endswith("_fast")])
def test_a_fast_variant_has_the_sequence_of_the_long_one(name: str) -> None:
    fast, long = (read(one).build("stream", seed=0) for one in (name, name.removesuffix("_fast")))
    for same in ("incremental", "num_clients", "clients_per_round"):
        assert getattr(fast, same) == getattr(long, same)
    assert len(fast.schedule.windows) == len(long.schedule.windows)
    assert fast.rounds <= 40 < long.rounds


@pytest.mark.parametrize("at_once", [10, 20, 40, 60])
def test_the_participation_study_varies_the_clients_of_a_round(at_once: int) -> None:
    stream = read("participation", "--stream.clients_per_round", str(at_once)).build(
        "stream", seed=0
    )
    assert (stream.clients_per_round, stream.num_clients) == (at_once, 100)
