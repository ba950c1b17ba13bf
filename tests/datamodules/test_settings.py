"""Settings that contradict each other are refused in one line that helps."""

import pytest

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
    ({"incremental": "clas"}, "did you mean 'class'"),
    ({"schedule": "gradul"}, "did you mean 'gradual'"),
    ({"partition": "dirichlett"}, "did you mean 'dirichlet'"),
    ({"sources": "cifar-100"}, "did you mean 'cifar100'"),
    ({"sources": []}, "a stream needs a source"),
    ({"sources": ["digits", "digits"]}, "two sources share a name"),
    ({"sources": ["folder:a/x", "folder:b/x"]}, "two sources share a name"),
    ({"tasks": None}, "how many tasks is not said"),
    ({"tasks": 0}, "use at least 1"),
    (
        {"incremental": "task", "sources": ["digits", "mnist"], "tasks": 5},
        "5 tasks, but there are 2",
    ),
    ({"rounds_per_task": None, "boundaries": [3, 6]}, "5 tasks, but 2 in the schedule"),
    ({"boundaries": [3, 6, 9, 12, 15]}, "said 2 times"),
    ({"rounds_per_task": None}, "said 0 times"),
    ({"rounds_per_task": 0}, "use at least 1"),
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
    ({"incremental": "task", "tasks": None, "class_order": 3}, "only class groups have an order"),
    ({"clients": 0}, "use at least 1"),
    ({"clients": 5, "clients_per_round": 6}, "6 clients a round of 5"),
    ({"alpha": 0.0}, "use a positive number"),
    ({"alpha": float("nan")}, "use a positive number"),
    ({"validation_share": 1.0}, "between 0 and 1"),
    ({"samples_per_round": 5}, "use at least 10"),
    ({"samples_per_round": 50, "samples_per_client": 5}, "keep one"),
    ({"replacement": True}, "replacement needs a bounded draw"),
    ({"show_once": True, "samples_per_client": 5}, "drop the bound"),
    ({"size": 1}, "use at least 4"),
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
