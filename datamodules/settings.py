"""The `stream:` section made sense of: contradictions are refused with what would help."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datamodules import domains as domain_shifts
from datamodules.registry import check_source, short_name
from datamodules.scenarios import Schedule, gradual, separate, staggered
from fedbnn.errors import ConfigError

INCREMENTS = ("class", "task", "domain")
SCHEDULES = ("separate", "staggered", "gradual")
PARTITIONS = ("dirichlet", "iid", "shards")


def choose(key: str, value: str, options: Sequence[str]) -> str:
    """The value, if it is one of the options."""
    if value in options:
        return value
    close = difflib.get_close_matches(str(value), options, n=1)
    guess = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(options)}"
    raise ConfigError(f"unknown {key} {value!r}", f"stream.{key}", guess)


def require(condition: bool, key: str, what: str, fix: str) -> None:
    """Refuse a setting that cannot be meant."""
    if not condition:
        raise ConfigError(what, f"stream.{key}", fix)


def at_least(key: str, value: float | None, least: float) -> None:
    """Refuse a number below `least`; None is not a number and passes."""
    require(value is None or value >= least, key, f"{key} is {value}", f"use at least {least}")


def check_numbers(arguments: Mapping[str, Any]) -> None:
    """Refuse numbers that no stream can have."""
    for key, least in (
        ("clients", 1),
        ("clients_per_round", 1),
        ("shards_per_client", 1),
        ("size", 4),
        ("shift", 0),
    ):
        at_least(key, arguments[key], least)
    clients, at_once, alpha, share = (
        arguments[key] for key in ("clients", "clients_per_round", "alpha", "validation_share")
    )
    require(
        at_once <= clients,
        "clients_per_round",
        f"{at_once} clients a round of {clients}",
        "use no more than clients",
    )
    shuffles = arguments["class_order"] is not None
    require(
        not shuffles or arguments["incremental"] == "class",
        "class_order",
        "only class groups have an order",
        "drop it",
    )
    require(
        0 < alpha < float("inf"),
        "alpha",
        f"alpha is {alpha}",
        "use a positive number, for example alpha: 1.0",
    )
    require(
        0 < share < 1,
        "validation_share",
        f"validation_share is {share}",
        "use a share between 0 and 1",
    )


def source_names(sources: Sequence[str] | str) -> tuple[str, ...]:
    """One name or several; every one known, no two the same."""
    names = (sources,) if isinstance(sources, str) else tuple(sources)
    require(bool(names), "sources", "a stream needs a source", "for example sources: [digits]")
    for name in names:
        check_source(name)
    short = [short_name(name) for name in names]
    require(
        len(set(short)) == len(short),
        "sources",
        f"two sources share a name in {', '.join(names)}",
        "name each source once",
    )
    return names


def domain_names(
    incremental: str, domains: Sequence[str] | None, sources: Sequence[str]
) -> tuple[str, ...]:
    """The domains, each a known shift of the one source."""
    names = tuple(domains or ())
    require(
        bool(names) == (incremental == "domain"),
        "domains",
        "domains belong to incremental: domain",
        "give both or neither",
    )
    require(
        not names or len(sources) == 1, "sources", "domains shift one source", "keep one source"
    )
    require(
        len(set(names)) == len(names), "domains", "a domain is named twice", "name each domain once"
    )
    for name in names:
        domain_shifts.parse(name)
    return names


def task_count(incremental: str, tasks: int | None, listed: int, entries: int | None) -> int:
    """How many tasks: as asked or scheduled (class), or one for each of the `listed` sources or domains."""
    at_least("tasks", tasks, 1)
    counted = (tasks or entries) if incremental == "class" else listed
    if counted is None:
        raise ConfigError("how many tasks is not said", "stream.tasks", "for example tasks: 5")
    require(
        tasks in (None, counted),
        "tasks",
        f"{tasks} tasks, but there are {counted}",
        "leave tasks out",
    )
    require(
        entries in (None, counted),
        "schedule",
        f"{counted} tasks, but {entries} in the schedule",
        "give one entry per task",
    )
    return counted


@dataclass(frozen=True)
class Timing:
    """The settings that say when tasks change."""

    schedule: str
    rounds_per_task: int | None
    boundaries: Sequence[int] | None
    durations: Sequence[tuple[int, int]] | None
    stagger: int | None

    def entries(self) -> int | None:
        """How many tasks the schedule names, if it names them."""
        listed = self.durations if self.durations is not None else self.boundaries
        return None if listed is None else len(listed)

    def build(self, tasks: int) -> Schedule:
        """The schedule of this many tasks."""
        self._check()
        if self.durations is not None:
            return gradual(self.durations)
        ends = self.boundaries or [
            (task + 1) * int(self.rounds_per_task or 1) for task in range(tasks)
        ]
        return separate(ends) if self.stagger is None else staggered(ends, self.stagger)

    def _check(self) -> None:
        """Refuse settings that do not belong together."""
        choose("schedule", self.schedule, SCHEDULES)
        at_least("rounds_per_task", self.rounds_per_task, 1)
        at_least("stagger", self.stagger, 1)
        for key, value, owner in (
            ("durations", self.durations, "gradual"),
            ("stagger", self.stagger, "staggered"),
        ):
            fits = (value is not None) == (self.schedule == owner)
            require(
                fits, key, f"{key} and schedule: {owner} belong together", "give both or neither"
            )
        lengths = (self.rounds_per_task is not None) + (self.boundaries is not None)
        if self.durations is not None:
            require(
                lengths == 0,
                "durations",
                "durations say how long tasks last",
                "drop rounds_per_task and boundaries",
            )
        else:
            require(
                lengths == 1,
                "rounds_per_task",
                f"the length of tasks is said {lengths} times",
                "give it or boundaries",
            )


def folders(data_dir: str | Path, cache_dir: str | Path | None) -> tuple[Path, Path]:
    """Where data are, and where decoded images go: `<data_dir>/.cache` unless told otherwise."""
    data = Path(data_dir).expanduser()
    return data, Path(cache_dir).expanduser() if cache_dir else data / ".cache"
