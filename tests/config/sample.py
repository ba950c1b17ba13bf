"""A small schema with one of everything, for the tests of the configuration."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jsonargparse.typing import ClosedUnitInterval, PositiveFloat

from fedbnn.config.parse import Parsed, parse
from fedbnn.config.schema import Free, Named, Section, Value


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


@dataclass(frozen=True)
class Linear:
    """Nothing to set, either."""


@dataclass(frozen=True)
class Posteriors:
    """A head with options."""

    decay: PositiveFloat = 0.9
    share: ClosedUnitInterval | None = None


class Plugin:
    """Something a configuration names by its class."""

    def __init__(self, size: int = 1) -> None:
        self.size = size


class Trainer:
    """Somebody else makes it, from the arguments that are set."""

    def __init__(
        self,
        accelerator: str = "auto",
        devices: int | str = "auto",
        precision: Literal[16, 32, "bf16"] | None = None,
        plugins: list[Plugin] | None = None,
        max_epochs: int | None = None,
    ) -> None: ...


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
        {"fedavg": Average, "fedprox": Proximal, "strong": Proximal},
        "fedavg",
        presets={"strong": {"mu": 9.0}},
    ),
    "head": Named(
        {"linear": Linear, "gaussian": Posteriors},
        {"fedavg": "linear", "fedprox": "linear", "strong": "gaussian"},
        follows="method",
    ),
    "engine": Named({"serial": serial}, "serial"),
    "track": Section(Track),
    "trainer": Free(Trainer, {"max_epochs": "it is client.epochs"}, "handed to the Trainer"),
}


def parsed(folder: Path, yaml: str, *flags: str) -> Parsed:
    """The configuration of this YAML text and these flags."""
    file = folder / "config.yaml"
    file.write_text(yaml, encoding="utf-8")
    return parse(["--config", str(file), *flags], SCHEMA)
