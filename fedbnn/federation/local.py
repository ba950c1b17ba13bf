"""The local budget of a client, the same for every method: the `client:` section of a configuration."""

from dataclasses import dataclass
from typing import Literal

from fedbnn.errors import ConfigError


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains on its data of the round.

    Args:
        optimizer: adam, or sgd with `momentum`.
        lr: learning rate of the weights (of their means, once Bayesian); a method may set its own.
        momentum: momentum of sgd.
        epochs: passes over the data of the round.
        batch_size: images per step.
        warmup_epochs: passes with the backbone frozen that fit rows of classes nobody has met before.
        warmup_lr: learning rate of those passes.
    """

    optimizer: Literal["adam", "sgd"] = "adam"
    lr: float = 1e-3
    momentum: float = 0.0
    epochs: int = 5
    batch_size: int = 32
    warmup_epochs: int = 3
    warmup_lr: float = 1e-2

    def __post_init__(self) -> None:
        for name in ("lr", "warmup_lr", "epochs", "batch_size"):
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"{name} must be above 0, not {getattr(self, name)}", f"client.{name}"
                )
        if self.warmup_epochs < 0 or not 0 <= self.momentum < 1:
            raise ConfigError("warmup_epochs must be at least 0 and momentum in [0, 1)", "client")
