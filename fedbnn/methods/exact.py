"""Exact Bayes over features that nobody trains: the baseline of everything that is trained.

    local    n_c, s_c = sum f, and the R factor of F:  forward passes alone
    server   sums over clients, rounds and tasks:  the product of all likelihoods, in any order
    state    none;  floats down: none (a frozen backbone: 1 per weight); up: see fedbnn.heads.exact

The same images in another order, with other clients or in other rounds, give the same posterior: it
forgets nothing. Features are random convolutions (`head.features: random_conv`), or those of a
network that is never trained (`backbone`), which may be one of yours (`network.weights`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedbnn.methods.base import Method


@dataclass(frozen=True)
class Exact(Method):
    """Nothing is trained: class posteriors over fixed features."""

    formula: ClassVar[str] = "p(c | x) from sums of n_c, s_c and f f^T over everybody"
    trains: ClassVar[bool] = False
    notes: ClassVar[Mapping[str, str]] = {"training": "none, so there is nothing to forget"}
