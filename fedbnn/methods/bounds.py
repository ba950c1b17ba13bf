"""What trained methods are measured by: all data in one place, every client alone, nothing trained.

    joint  each round   one virtual client has every image that participants of rounds 1..r were
                        given, once, and goes on with  min_theta  CE(theta; all of them)
           state        none;  floats per weight: 1 down, 1 up for one client
    local  each client  min_theta_k  CE(theta_k; D_k), from its own weights of the last time
           state        a whole model on every client;  floats per weight: 1 down (the start), 0 up
    exact  each client  n_c, s_c = sum f, and the R factor of F:  forward passes alone
           server       sums over clients, rounds and tasks:  the product of all likelihoods
           state        none;  floats down: none (a frozen backbone: 1 per weight);
                        up: see fedbnn.heads.exact

Each round of `joint` (upper bound) makes `client.epochs` passes over all images so far, so over the
rounds of a task it trains to convergence; it costs what it costs. A client of `local` (lower bound)
trains as often as it would be sampled, with the same budget; each is tested on the classes it
knows, then the mean over the clients of the round is taken.

`exact` is Bayes over features that nobody trains: the same images in another order, with other
clients or in other rounds, give the same posterior, so it forgets nothing. Features are random
convolutions (`head.features: random_conv`), or those of a network that is never trained
(`backbone`), which may be one of yours (`network.weights`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch

from fedbnn.bayes.flatten import Layout
from fedbnn.errors import ConfigError
from fedbnn.images import ImageSet, joined
from fedbnn.methods.aggregation import WHOLE, Aggregator, Spec
from fedbnn.methods.base import Assignment, LocalObjective, Method, Tensors
from fedbnn.networks import Classifier
from fedbnn.protocol.state import State
from fedbnn.protocol.stream import Stream


@dataclass(frozen=True)
class Joint(Method):
    """Central training on all data so far."""

    formula: ClassVar[str] = "theta = argmin CE(theta; D_1, ..., D_r in one place)"
    notes: ClassVar[Mapping[str, str]] = {"bound": "upper: all images so far in one place"}

    def stream(self, stream: Stream) -> Stream:
        """One virtual client with the pooled images."""
        if stream.held:
            what, fix = "clients hold their images, nobody has all", "use another method"
            raise ConfigError(what, "method.name", fix)
        return JointStream(stream)


class JointStream:
    """A stream with one client, number 0, that has been given everything so far."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._pool = stream, lru_cache(1)(self._pooled)

    def __getattr__(self, name: str) -> Any:
        """Everything else is as in the stream itself."""
        return getattr(self._stream, name)

    def participants(self, round: int) -> tuple[int, ...]:
        """The one client."""
        return (0,)

    def more_participants(self, round: int, clients: int) -> tuple[int, ...]:
        """There is nobody else."""
        return ()

    def counts(self, round: int, client: int) -> dict[str, int]:
        """Images so far by class."""
        return self._pool(round).counts()

    def train(self, round: int, client: int) -> ImageSet:
        """All images so far."""
        return self._pool(round)

    def at(self, round: int, client: int, batch_size: int) -> Any:
        """The same as a data module."""
        somebody = self._stream.participants(round)[0]
        return self._stream.at(round, somebody, batch_size).with_images(self._pool(round))

    def _pooled(self, round: int) -> ImageSet:
        """What participants of rounds 1..r were given, every image once."""
        given = [self._stream.train(round, client) for client in self._stream.participants(round)]
        pool = joined([self._pool(round - 1), *given] if round > 1 else given)
        places = {image.tobytes(): place for place, image in enumerate(pool.pixels.numpy())}
        return pool.subset(torch.tensor(list(places.values())))


@dataclass(frozen=True)
class Local(Method):
    """Every client alone with its own model."""

    formula: ClassVar[str] = "theta_k = argmin CE(theta; D_k), never averaged"
    notes: ClassVar[Mapping[str, str]] = {
        "bound": "lower: every client alone",
        "tested": "each client of the round on the classes it knows, then the mean",
    }

    share: Literal["backbone_only"] = "backbone_only"
    server_optimizer: Literal["sgd"] = "sgd"

    def __post_init__(self) -> None:
        if self.server_lr != 1:
            raise ConfigError("local has no server", "method.server_lr", "leave it out")

    def begins(self, sent: State, private: State | None) -> State:
        """The client's own weights; the common ones the first time."""
        return sent.having({name: private[name] for name in WHOLE}) if private else sent

    def kept(self, own: State, state: State, layout: Layout) -> Spec:
        """The whole model."""
        whole = {name: (tuple(state[name].shape), state[name].dtype) for name in WHOLE}
        return {**super().kept(own, state, layout), **whole}

    def aggregator(self, state: State) -> Aggregator:
        """Nothing is sent."""
        return Aggregator(shares_prototypes=False, names=())

    def objective(self, assignment: Assignment, network: Classifier) -> LocalObjective:
        """Cross-entropy."""
        return Alone()


class Alone(LocalObjective):
    """Cross-entropy; the weights stay on the client."""

    def answer(self, weights: Tensors, steps: int, lr: float) -> tuple[Tensors, State]:
        """Nothing is sent; backbone and statistics are kept beside the client's own prototypes."""
        return {}, State({name: weights[name] for name in WHOLE})


@dataclass(frozen=True)
class Exact(Method):
    """Nothing is trained: class posteriors over fixed features."""

    formula: ClassVar[str] = "p(c | x) from sums of n_c, s_c and f f^T over everybody"
    trains: ClassVar[bool] = False
    notes: ClassVar[Mapping[str, str]] = {"training": "none, so there is nothing to forget"}
