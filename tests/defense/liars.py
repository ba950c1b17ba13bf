"""One client of every round that lies, on whole runs of the quickstart, and what it sends.

Runs that differ in a lie share all that is honest.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbnn.cli.compose import compose
from fedbnn.cli.train import parse
from fedbnn.federation import experiment
from fedbnn.federation.engines import Answer, Engine, Private
from fedbnn.heads import statistics
from fedbnn.methods import glfc
from fedbnn.protocol.messages import (
    Failure,
    FitInstruction,
    FitResult,
    Update,
    class_counts,
    read_update,
)
from fedbnn.protocol.stream import Stream
from results.quick import Asked, Remembering

Results = dict[str, Any]
Lie = Callable[[Update], Update]
When = Callable[[Stream], Sequence[int]]


@dataclass(frozen=True)
class Lying:
    """An engine in which the first client asked in each of these rounds lies, whoever it is."""

    engine: Engine
    exchange: str
    lie: Lie
    rounds: Sequence[int]
    told: set[int]

    def gather(self, payload: bytes, clients: Sequence[int], private: Private) -> Iterator[Answer]:
        asked = FitInstruction.from_bytes(payload)
        attacked = asked.exchange == self.exchange and asked.round in self.rounds
        for answer in self.engine.gather(payload, clients, private):
            if attacked and answer.client == clients[0] and isinstance(answer, FitResult):
                self.told.add(asked.round)
                forged = self.lie(read_update(answer.update))
                answer = replace(answer, update=forged.to_bytes())
            yield answer

    def close(self) -> None:
        self.engine.close()


class Silent(Lying):
    """The same client does not answer at all: what nobody can prevent."""

    def gather(self, payload: bytes, clients: Sequence[int], private: Private) -> Iterator[Answer]:
        asked = FitInstruction.from_bytes(payload)
        attacked = asked.exchange == self.exchange and asked.round in self.rounds
        yield from self.engine.gather(payload, clients[attacked:], private)
        if attacked:
            yield Failure(clients[0], "silent")


@dataclass
class Runs:
    """Runs of one method; results by lie, and what clients answered in any of them."""

    method: str
    folder: Path
    seed: int = 0
    known: dict[Asked, Answer] = field(default_factory=dict)
    without_lies: dict[tuple[str, str], Results] = field(default_factory=dict)

    def honest(self) -> Results:
        """Where nobody lies, once."""
        return self._once(("", ""), lambda engine, _: engine)

    def silent(self, exchange: str, named: str, when: When) -> Results:
        """Where the liar does not answer in these rounds, once."""

        def around(engine: Engine, stream: Stream) -> Engine:
            return Silent(engine, exchange, _same, when(stream), set())

        return self._once((exchange, named), around)

    def _once(self, name: tuple[str, str], around: Callable[[Engine, Stream], Engine]) -> Results:
        if name not in self.without_lies:
            folder = self.folder / "-".join(["nobody lies", *name]).replace(" ", "_")
            self.without_lies[name] = self._played(folder, around)
        return self.without_lies[name]

    def with_liar(self, exchange: str, lie: Lie, when: When, folder: Path) -> Results:
        """With one client that lies in an exchange of some rounds, in which there is one."""
        told: set[int] = set()
        found = self._played(folder, lambda e, s: Lying(e, exchange, lie, when(s), told))
        assert told, "nobody lied"
        return found

    def _played(self, folder: Path, around: Callable[[Engine, Stream], Engine]) -> Results:
        words = ["--config", "quickstart", "--method", self.method, "--beside", "[]"]
        words += ["--head.filters", "50"] if self.method == "exact" else []
        words += ["--evaluate.every", "0", "--run_dir", str(folder), "--seed", str(self.seed)]
        made = compose(parse(words), folder)
        engine = around(Remembering(made.engine, self.known), made.stream)
        return experiment.run(replace(made, engine=engine))


def every(change: Callable[[Tensor], Tensor]) -> Lie:
    """The same done to every tensor."""

    def lie(update: Update) -> Update:
        return replace(update, tensors={name: change(one) for name, one in update.tensors.items()})

    return lie


def _same(update: Update) -> Update:
    """No lie."""
    return update


def _rolled(tensor: Tensor) -> Tensor:
    """What belongs to a class under the name of the next one."""
    return tensor.roll(1, 0) if tensor.ndim == 2 else tensor


LIES: Mapping[str, Lie] = {
    "x 10": every(lambda tensor: 10 * tensor),
    "x -1": every(torch.neg),
    "x 1e6": every(lambda tensor: 1e6 * tensor),
    "zeros": every(torch.zeros_like),
    "classes swapped": every(_rolled),
    "rows x -20": every(lambda tensor: -20 * tensor if tensor.ndim == 2 else tensor),
}


def _saying(entropy: float, loss: float) -> Lie:
    """Signals of FCIL, whatever the images are."""
    said = torch.tensor([entropy, loss])
    return lambda update: replace(update, tensors=update.tensors | {glfc.SIGNALS: said})


ABOUT_SIGNALS: Mapping[str, Lie] = {
    "sure, and well off": _saying(1e-6, 0.0),
    "sure, and badly off": _saying(0.0, glfc.WORST),
    "unsure, and well off": _saying(1.0, 0.0),
    "unsure, and badly off": _saying(1.0, glfc.WORST),
    "of a single class": _saying(0.0, 0.0),
}

SUMS = {"posteriors.sum": "posteriors.factor", "exact.sum": "exact.factor"}
Means = Callable[[Tensor, Tensor], Tensor]


def invented(move: Means) -> Lie:
    """Statistics of images that are not there: other class means, the scatter within classes kept.

    `move` makes means of those there are and of the root mean square deviation of an image from the
    mean of its class.
    """

    def lie(update: Update) -> Update:
        mean, around = _seen(update)
        scale = (around.square().sum() / update.samples).sqrt()
        return _shown(update, move(mean, scale), around)

    return lie


def turned(update: Update) -> Update:
    """About the means of their classes images lie the other way in the last third of the features.

    Of class posteriors in trained features these are those of now.
    """
    mean, around = _seen(update)
    around[:, -(around.shape[1] // 3) :] *= -1
    return _shown(update, mean, around)


def _seen(update: Update) -> tuple[Tensor, Tensor]:
    """Class means, and n - C rows X with X^T X = M - sum_c n_c m_c m_c^T."""
    [(sums, root)] = [(s, r) for s, r in SUMS.items() if s in update.tensors]
    said, counts = update.tensors[sums].double(), class_counts(update)[:, None]
    upper = statistics.unpacked(update.tensors[root].double(), update.samples, said.shape[1])
    centres = said / counts.sqrt()
    values, vectors = torch.linalg.eigh(upper.T @ upper - centres.T @ centres)
    left = max(1, min(update.samples, said.shape[1]) - len(said))
    return said / counts, (vectors * values.clamp_min(0).sqrt()).T[-left:]


def _shown(update: Update, mean: Tensor, around: Tensor) -> Update:
    """The statistics of images with these means, which lie so about them: all is consistent."""
    [(sums, root)] = [(s, r) for s, r in SUMS.items() if s in update.tensors]
    counts = class_counts(update)[:, None]
    rows = torch.cat([around, counts.sqrt() * mean])[-update.samples :]
    found = {sums: counts * mean, root: statistics.factor(rows)}
    return replace(update, tensors={name: value.float() for name, value in found.items()})


def _swapped(mean: Tensor, scale: Tensor) -> Tensor:
    """The first two classes change places."""
    return torch.cat([mean[:2].flip(0), mean[2:]])


def _towards(far: float) -> Means:
    """Every class goes so far towards the next one, in deviations of an image."""

    def move(mean: Tensor, scale: Tensor) -> Tensor:
        way = mean.roll(-1, 0) - mean
        return mean + far * scale * way / way.norm(dim=1, keepdim=True).clamp_min(1e-12)

    return move


def _along(far: float) -> Means:
    """The first class goes so far along one direction, the same in every round."""

    def move(mean: Tensor, scale: Tensor) -> Tensor:
        source = torch.Generator().manual_seed(0)
        way = torch.randn(mean.shape[1], generator=source, dtype=mean.dtype)
        step = torch.zeros_like(mean)
        step[0] = far * scale * way / way.norm()
        return mean + step

    return move


def _nothing(update: Update) -> Update:
    """Sums of images of which there are none."""
    return replace(update, samples=0, counts=dict.fromkeys(update.counts, 0))


def _no_counts(update: Update) -> Update:
    """As many images as announced, and none of any class but the last."""
    last = update.classes[-1]
    return replace(update, counts={**dict.fromkeys(update.counts, 0), last: update.samples})


ABOUT_CLASSES: Mapping[str, Lie] = {
    "counts 0": _nothing,
    "counts of other classes": _no_counts,
    "two classes swapped": invented(_swapped),
    "images turned about their classes": turned,
    **{f"towards the next class, {far:g}": invented(_towards(far)) for far in (0.5, 1.0, 3.0)},
    **{f"along one direction, {far:g}": invented(_along(far)) for far in (0.5, 1.0, 3.0)},
}
"""By class and direction; lengths in deviations of an image from the mean of its class."""
