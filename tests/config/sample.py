"""A small schema with one of everything, for the tests of the configuration."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fedbnn.config import Choice, Free, Named, Parsed, Section, Value, parse


@dataclass(frozen=True)
class Window:
    """A part nested in a section."""

    rounds: int = 3
    overlap: float = 0.5

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, not {self.rounds}")


@dataclass(frozen=True)
class Client:
    """How a client trains.

    Args:
        lr: learning rate of the weights.
    """

    lr: float = 0.1
    epochs: int = 2
    optimizer: Literal["adam", "sgd"] = "adam"
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float | None = None
    window: Window = field(default_factory=Window)

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"lr must be above 0, not {self.lr}")


class Stream:
    """A stream that is told its seed by the program."""

    def __init__(
        self, seed: int, sources: list[str] | str = "digits", clients: int = 10, once: bool = False
    ) -> None:
        self.seed, self.sources, self.clients, self.once = seed, sources, clients, once


@dataclass(frozen=True)
class Average:
    """Plain averaging; nothing to set."""


@dataclass(frozen=True)
class Proximal:
    """Averaging with a pull of strength `mu`."""

    mu: float = 0.1


def serial() -> str:
    """A function can be built, too."""
    return "serial"


@dataclass(frozen=True)
class Track:
    """A word that YAML 1.1 takes for a truth value."""

    wandb: Literal["auto", "off"] = "auto"


SCHEMA = {
    "name": Value(str | None, None, "name of the run"),
    "seed": Value(int, 0, "where all random numbers come from"),
    "folder": Value(str, "runs", "where runs go"),
    "stream": Section(Stream, given={"seed"}),
    "client": Section(Client),
    "method": Named(
        {
            "fedavg": Choice(Average),
            "fedprox": Choice(Proximal),
            "strong": Choice(Proximal, {"mu": 9.0}),
        },
        "fedavg",
    ),
    "engine": Named({"serial": Choice(serial)}, "serial"),
    "track": Section(Track),
    "trainer": Free(("accelerator", "devices", "precision"), "handed to the Trainer"),
}


def parsed(folder: Path, yaml: str, *flags: str) -> Parsed:
    """The configuration of this YAML text and these flags."""
    file = folder / "config.yaml"
    file.write_text(yaml, encoding="utf-8")
    return parse(["--config", str(file), *flags], SCHEMA)
