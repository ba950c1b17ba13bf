"""What one update must be, whoever else answers: each check refuses with its own reason, in the documented order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from fedbnn.defense import influence
from fedbnn.defense.updates import Refused
from fedbnn.messages import Update

Spec = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
Lengths = Mapping[str, Sequence[float]]
LARGEST = 1e18


@dataclass(frozen=True)
class ExpectedUpdate:
    """What the server asked in one exchange, and so what it may be answered.

    `prior` is the digest of the order; `sample_counts` the images by class of every client asked. `expected` gives the
    tensors of an update that carries rows of these classes, `defect` says why an update cannot be folded, and
    `influence` puts it as a point among the others, and `known` says how long its rows are in the library, by tensor.
    """

    run: str
    round: int
    exchange: str
    prior: str
    sample_counts: Mapping[int, Mapping[str, int]]
    expected: Callable[[tuple[str, ...]], Spec]
    defect: Callable[[Update], str | None]
    influence: Callable[[Update], Tensor]
    known: Callable[[Update], Lengths]


def addressed(update: Update, call: ExpectedUpdate) -> None:
    """This run, this round, this exchange, a client that was asked."""
    if update.run != call.run:
        raise Refused("meant for another run")
    if update.round != call.round:
        raise Refused(f"meant for round {update.round}, this is round {call.round}")
    if update.exchange != call.exchange:
        raise Refused(f"meant for another exchange than {call.exchange}")
    if update.client not in call.sample_counts:
        raise Refused(f"client {update.client} was not asked")


def _same_prior(update: Update, call: ExpectedUpdate) -> None:
    """It started from what the server sent."""
    if update.prior != call.prior:
        raise Refused("started from another prior")


def _same_sites(update: Update, call: ExpectedUpdate) -> None:
    """The same tensors with the same shapes and types; rows of classes the client holds."""
    unknown = [name for name in update.classes if name not in call.sample_counts[update.client]]
    if unknown:
        raise Refused(f"rows of a class it does not hold: {unknown[0][:60]!r}")
    spec, found = call.expected(update.classes), update.tensors
    for name in sorted(spec.keys() ^ found.keys()):
        raise Refused(f"{'missing' if name in spec else 'unexpected'} tensor {name[:60]!r}")
    for name, (shape, dtype) in spec.items():
        if tuple(found[name].shape) != shape:
            raise Refused(f"{name} has shape {tuple(found[name].shape)}, expected {shape}")
        if found[name].dtype != dtype:
            raise Refused(f"{name} has type {found[name].dtype}, expected {dtype}")


def _finite(update: Update, _call: ExpectedUpdate) -> None:
    """No NaN, no infinity, and nothing whose square a float32 cannot hold."""
    for name, tensor in update.tensors.items():
        largest = influence.largest(tensor)
        if not isfinite(largest):
            raise Refused(f"{name} is not finite")
        if largest > LARGEST:
            raise Refused(f"{name} reaches {largest:.3g}, beyond any weight or precision")


def _plausible(update: Update, call: ExpectedUpdate) -> None:
    """No more images than the announcement said, in all and by class."""
    sample_counts = call.sample_counts[update.client]
    if not 0 <= update.samples <= sum(sample_counts.values()):
        raise Refused(
            f"claims {update.samples} images, the announcement said {sum(sample_counts.values())}"
        )
    for name, count in update.counts.items():
        if not 0 <= count <= sample_counts[name]:
            raise Refused(
                f"claims {count} images of {name}, the announcement said {sample_counts[name]}"
            )
    if update.counts and sum(update.counts.values()) != update.samples:
        raise Refused(f"claims {update.samples} images, but {sum(update.counts.values())} by class")


def _foldable(update: Update, call: ExpectedUpdate) -> None:
    """The method's own condition: the folded precision is positive."""
    reason = call.defect(update)
    if reason is not None:
        raise Refused(reason)


CHECKS: tuple[Callable[[Update, ExpectedUpdate], None], ...] = (
    _same_prior,
    _same_sites,
    _finite,
    _plausible,
    _foldable,
)
