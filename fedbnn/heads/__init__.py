"""What predicts: the prototype of every class, as a linear row or as a posterior in feature space.

The `head:` section of a configuration; training is the same with either.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fedbnn.config.ranges import NonNegative, Positive, UnitInterval


@dataclass(frozen=True)
class LinearHead:
    """Scores are prototypes times features, as they were trained."""


@dataclass(frozen=True)
class GaussianHead:
    """Scores are those of class posteriors in feature space.

    log p(c | x) = log p(f | c) / temperature + prototypes (row_c . f + bias_c) + log p(c) + const

    Args:
        decay: part of its old count that a class posterior keeps when the class is seen again.
        memory: part of its old weight that the scatter within classes keeps in a round.
        ridge: how strongly the map that carries class posteriors along prefers to stay.
        drift: whether class posteriors are carried along when the backbone moves.
        temperature: scores of the class posteriors are divided by it.
        prototypes: how much of the linear prototypes' scores is added.
        prior: classes are all alike (`uniform`), or as likely as met of late (`frequency`).
    """

    decay: UnitInterval = 0.9
    memory: UnitInterval = 0.7
    ridge: Positive = 1e-2
    drift: bool = True
    temperature: Positive = 3.0
    prototypes: NonNegative = 0.0
    prior: Literal["uniform", "frequency"] = "uniform"


Head = LinearHead | GaussianHead
HEADS: Mapping[str, type[Head]] = {"linear": LinearHead, "gaussian": GaussianHead}
