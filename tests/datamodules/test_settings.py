"""Settings that contradict each other are refused in one line that helps."""

from argparse import ArgumentError

import pytest
from jsonargparse import ArgumentParser

from datamodules import FederatedStream
from fedbnn.errors import ConfigError

PAPER = {
    "cifar100": ({"sources": "cifar100", "tasks": 4, "rounds_per_task": 25}, (25, 50, 75, 100)),
    "tiny": (
        {"sources": "tiny_imagenet", "tasks": 4, "rounds_per_task": 25, "size": 64},
        (25, 50, 75, 100),
    ),
    "objects": (
        {
            "incremental": "task",
            "sources": ["cifar10", "cifar100", "tiny_imagenet"],
            "rounds_per_task": 50,
            "size": 32,
        },
        (50, 100, 150),
    ),
    "large": (
        {
            "incremental": "task",
            "sources": ["stl10", "flowers102", "food101"],
            "rounds_per_task": 50,
            "size": 96,
        },
        (50, 100, 150),
    ),
    "gradual tiny": (
        {
            "sources": "tiny_imagenet",
            "schedule": "gradual",
            "durations": [(0, 30), (20, 55), (45, 80), (70, 100)],
        },
        (30, 55, 80, 100),
    ),
    "gradual objects": (
        {
            "incremental": "task",
            "sources": ["cifar10", "cifar100", "tiny_imagenet"],
            "schedule": "gradual",
            "durations": [(0, 60), (40, 110), (90, 150)],
            "size": 32,
            "samples_per_round": 5000,
        },
        (60, 110, 150),
    ),
}
WRONG = [
    ({"sources": "cifar-100"}, "did you mean 'cifar100'"),
    ({"sources": []}, "a stream needs a source"),
    ({"sources": ["digits", "digits"]}, "two sources share a name"),
    ({"sources": ["folder:a/x", "folder:b/x"]}, "two sources share a name"),
    ({"tasks": None}, "how many tasks is not said"),
    (
        {"incremental": "task", "sources": ["digits", "mnist"], "tasks": 5},
        "5 tasks, but there are 2",
    ),
    ({"rounds_per_task": None, "boundaries": [3, 6]}, "5 tasks, but 2 in the schedule"),
    ({"boundaries": [3, 6, 9, 12, 15]}, "said 2 times"),
    ({"rounds_per_task": None}, "said 0 times"),
    ({"rounds_per_task": None, "boundaries": [3, 3, 9, 12, 15]}, "tasks cannot last"),
    (
        {"durations": [(task, 5 + task) for task in range(5)]},
        "durations and schedule: gradual belong together",
    ),
    ({"schedule": "gradual"}, "durations and schedule: gradual belong together"),
    (
        {"schedule": "gradual", "durations": [(task, 5 + task) for task in range(5)]},
        "drop rounds_per_task",
    ),
    ({"schedule": "staggered"}, "stagger and schedule: staggered belong together"),
    ({"stagger": 2}, "stagger and schedule: staggered belong together"),
    ({"schedule": "staggered", "stagger": 4}, "tasks cannot last"),
    ({"domains": ["clean"]}, "domains belong to incremental: domain"),
    ({"incremental": "domain", "tasks": None}, "domains belong to incremental: domain"),
    ({"incremental": "domain", "tasks": None, "domains": ["rotate:3"]}, "did you mean 'rotation'"),
    ({"incremental": "domain", "tasks": None, "domains": ["rotation"]}, "write rotation:NUMBER"),
    ({"incremental": "domain", "tasks": None, "domains": ["blur:-1"]}, "at least 0"),
    ({"incremental": "domain", "tasks": None, "domains": ["noise:nan"]}, "at least 0"),
    ({"incremental": "domain", "tasks": None, "domains": ["clean", "clean"]}, "named twice"),
    (
        {
            "incremental": "domain",
            "tasks": None,
            "domains": ["clean"],
            "sources": ["digits", "mnist"],
        },
        "domains shift one source",
    ),
    (
        {"incremental": "task", "tasks": None, "shuffle_classes": True},
        "only class groups have an order",
    ),
    ({"clients": 5, "clients_per_round": 6}, "6 clients a round of 5"),
    ({"samples_per_round": 5}, "give each client one"),
]

OUT_OF_RANGE = [
    {"incremental": "clas"},
    {"schedule": "gradul"},
    {"partition": "shards"},
    {"tasks": 0},
    {"rounds_per_task": 0},
    {"stagger": 0},
    {"clients": 0},
    {"clients_per_round": -1},
    {"alpha": 0.0},
    {"alpha": float("nan")},
    {"alpha": float("inf")},
    {"samples_per_round": 0},
    {"size": 3},
    {"size": 4097},
    {"shift": -1},
]


@pytest.mark.parametrize("name", PAPER)
def test_the_schedules_of_the_paper_can_be_said(name: str) -> None:
    options, ends = PAPER[name]
    assert FederatedStream(**options).task_ends() == ends


@pytest.mark.parametrize(("changes", "help_"), WRONG, ids=[help_ for _, help_ in WRONG])
def test_what_cannot_be_meant_is_refused(changes: dict, help_: str) -> None:
    with pytest.raises(ConfigError, match=help_) as caught:
        FederatedStream(**{"sources": "digits", "tasks": 5, "rounds_per_task": 4, **changes})
    assert caught.value.where.startswith("stream.")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("values", OUT_OF_RANGE, ids=str)
def test_what_is_out_of_range_is_refused_by_its_type(values: dict) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(FederatedStream, "stream")
    with pytest.raises(ArgumentError, match=f"stream.{next(iter(values))}"):
        parser.parse_object({"stream": values})
