"""The bounds: all data in one place (`joint`, upper), and every client alone (`local`, lower).

    joint  each round   one virtual client takes N images, drawn from everything participants were
                        given in rounds 1..r, and  min_theta  CE(theta; these images)
           state        none;  floats per weight: 1 down, 1 up for one client
    local  each client  min_theta_k  CE(theta_k; D_k), from its own weights of the last time
           state        a whole model on every client;  floats per weight: 1 down (the start), 0 up

N is the number of images that the participants of the round hold, so the budget of `joint` is that
of the federation. A client of `local` trains as often as it would be sampled, with the same budget;
each is tested on the classes it knows, then the mean over the clients of the round is taken.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedbnn.errors import ConfigError
from fedbnn.images import ImageSet, joined
from fedbnn.messages import Update
from fedbnn.methods.aggregation import Aggregator, Fold, PointFold, Spec
from fedbnn.methods.base import Assignment, LocalObjective, Method
from fedbnn.networks import Classifier
from fedbnn.seeds import generator
from fedbnn.state import State
from fedbnn.stream import Stream

OWN = ("backbone", "buffers")


@dataclass(frozen=True)
class Joint(Method):
    """Central training on all data so far, with the budget of the federation."""

    formula: ClassVar[str] = "theta = argmin CE(theta; D_1, ..., D_r in one place)"

    def stream(self, stream: Stream) -> Stream:
        """One virtual client with the pooled images."""
        return JointStream(stream)

    def facts(self) -> dict[str, Any]:
        """That this is no federation."""
        return {"bound": "upper: all images so far in one place"}


class JointStream:
    """A stream with one client, number 0, that has been given everything so far.

    In round r it trains on N_r images drawn from all that participants of rounds 1..r were given;
    N_r is how many the participants of round r hold. An image shown in several rounds counts as
    often.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._size = lru_cache(None)(self._sizes)
        self._draw = lru_cache(1)(self._drawn)

    def __getattr__(self, name: str) -> Any:
        """Everything else is as in the stream itself."""
        return getattr(self._stream, name)

    def participants(self, round: int) -> tuple[int, ...]:
        """The one client."""
        return (0,)

    def counts(self, round: int, client: int) -> dict[str, int]:
        """Images by class of the round's draw."""
        return self._draw(round).counts()

    def train(self, round: int, client: int) -> ImageSet:
        """The round's draw."""
        return self._draw(round)

    def at(self, round: int, client: int, batch_size: int) -> Any:
        """The round's draw as a data module."""
        somebody = self._stream.participants(round)[0]
        return self._stream.at(round, somebody, batch_size).with_images(self._draw(round))

    def _drawn(self, round: int) -> ImageSet:
        """N_r of all images so far, without replacement."""
        owners = [(past, client) for past in range(1, round + 1) for client in self._size(past)]
        sizes = torch.tensor([self._size(past)[client] for past, client in owners])
        wanted, source = sum(self._size(round).values()), generator(0, "pool", round)
        chosen = torch.randperm(int(sizes.sum()), generator=source)[:wanted].sort().values
        ends = sizes.cumsum(0)
        place = torch.searchsorted(ends, chosen, right=True)
        parts = []
        for number in place.unique().tolist():
            within = chosen[place == number] - (ends[number] - sizes[number])
            parts.append(self._stream.train(*owners[number]).subset(within))
        return joined(parts)

    def _sizes(self, round: int) -> dict[int, int]:
        """How many images each participant of a round holds."""
        stream = self._stream
        return {k: sum(stream.counts(round, k).values()) for k in stream.participants(round)}


@dataclass(frozen=True)
class Local(Method):
    """Every client alone with its own model."""

    formula: ClassVar[str] = "theta_k = argmin CE(theta; D_k), never averaged"

    share: Literal["global", "backbone_only"] = "backbone_only"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shares_prototypes:
            raise ConfigError("local shares nothing", "method.share", "leave it out")

    def begins(self, sent: State, private: State | None) -> State:
        """The client's own weights; the common ones the first time."""
        return sent.having({name: private[name] for name in OWN}) if private else sent

    def aggregator(self, state: State) -> Aggregator:
        """Nothing is sent."""
        return Silence()

    def objective(self, assignment: Assignment, network: Classifier) -> LocalObjective:
        """Cross-entropy."""
        return Alone()

    def facts(self) -> dict[str, Any]:
        """That this is no federation, and how it is tested."""
        tested = "each client of the round on the classes it knows, then the mean"
        return {"bound": "lower: every client alone", "tested": tested}


class Alone(LocalObjective):
    """Cross-entropy; the weights stay on the client."""

    def sends(self, weights: dict[str, Tensor], steps: int, lr: float) -> dict[str, Tensor]:
        """Nothing."""
        self.weights = {name: weights[name] for name in OWN}
        return {}

    def keeps(self) -> State:
        """Backbone and statistics, beside the client's own prototypes."""
        return State(self.weights)


class Silence(Aggregator):
    """Nothing comes up, and the state never changes."""

    def expected(self, state: State, classes: Sequence[str]) -> Spec:
        """No tensor."""
        return {}

    def influence(self, state: State, update: Update) -> Iterator[Tensor]:
        """None."""
        return iter(())

    def fold(self, state: State) -> Fold:
        """Nothing to fold."""
        return PointFold(state, ())
