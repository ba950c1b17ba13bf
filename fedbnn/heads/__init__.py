"""What predicts: the prototype of every class, linear or as a posterior in feature space.

A posterior lies among the features of the trained network (`gaussian`), or of one that is never
trained (`exact`).
This is the `head:` section of a configuration.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fedbnn.config.schema import Count, NonNegative, NonNegativeCount, Positive, UnitInterval
from fedbnn.errors import ConfigError


@dataclass(frozen=True)
class LinearHead:
    """Scores are prototypes times features, as they were trained."""


@dataclass(frozen=True)
class GaussianHead:
    """Scores are those of class posteriors in feature space.

    log p(c | x) = log p(f | c) / temperature + prototypes (w_c . f + b_c) + log p(c) + const

    Args:
        memory: part of its weight that what older rounds say of the drift keeps in a round.
        ridge: how strongly the map that carries class posteriors along prefers to stay.
        anchor_rounds: rounds until the backbone of the day becomes the anchor.
        clients_per_round: how many clients measure statistics, with forward passes alone: more than
            train in the round; null takes those.
        shrinkage: how far, at least, the covariance is pulled towards a multiple of the identity.
        temperature: scores of the class posteriors are divided by it.
        prototypes: how much of the linear prototypes' scores is added.
        prior: classes are all alike (`uniform`), or as likely as met so far (`frequency`).
    """

    memory: UnitInterval = 0.5
    ridge: Positive = 1e-2
    anchor_rounds: Count = 10
    clients_per_round: Count | None = None
    shrinkage: UnitInterval = 0.0
    temperature: Positive = 3.0
    prototypes: NonNegative = 0.0
    prior: Literal["uniform", "frequency"] = "uniform"


@dataclass(frozen=True)
class ExactHead:
    """Scores are those of class posteriors over features that never move: nothing is forgotten.

    log p(c | x) = log p(f | c) / temperature + prototypes (w_c . g + b_c) + log p(c) + const

    Args:
        features: f, of random convolutions (`random_conv`), or of a `backbone` that stays as it is:
            of a method that trains nothing, or with nothing to train in it.
        filters: number of random convolutions; each gives nine features.
        projections: number of rectified random projections of these, as features beside them.
        mirror: whether features are those of an image and of its mirror image together.
        seed: seed of the random convolutions.
        shrinkage: how far, at least, the covariance is pulled towards a multiple of the identity.
        temperature: log-densities are divided by it.
        prototypes: how much of the scores of the trained network (features g) is added.
        prior_mean: how much of the scores above, as of the rounds before, is the prior mean of the
            network's in training, so that it learns only what they do not know; who predicts adds
            them up again (`prototypes`).
        prior: classes are all alike (`uniform`), or as likely as met so far (`frequency`).
    """

    features: Literal["random_conv", "backbone"] = "random_conv"
    filters: Count = 300
    projections: NonNegativeCount = 0
    mirror: bool = True
    seed: int = 0
    shrinkage: UnitInterval = 0.05
    temperature: Positive = 3.0
    prototypes: NonNegative = 0.0
    prior_mean: NonNegative = 0.0
    prior: Literal["uniform", "frequency"] = "uniform"

    def __post_init__(self) -> None:
        if self.prior_mean and not self.prototypes:
            what = "with a prior_mean, what the network learns beside it would never be read"
            raise ConfigError(what, "head.prototypes", "set it to 1, or leave prior_mean out")


Head = LinearHead | GaussianHead | ExactHead
HEADS: Mapping[str, type[Head]] = {
    "linear": LinearHead,
    "gaussian": GaussianHead,
    "exact": ExactHead,
}
