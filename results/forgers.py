"""Clients that lie, for results/attacks.py: what they send, and what they train on.

In every round the first so many participants lie together and know what all others send. With x_k
a client's step (of factors: de - dL m_0 and dL; of points: theta - theta_0), number by number:

    sign flip      x = -4 x_k
    inner product  x = -5 mean_j x_j                                    Xie et al., 2020
    ALIE           x = mean_j x_j - 1.5 std_j x_j                       Baruch et al., 2019

These forge the training; their statistics are those of their images, for what no images can have
is refused by definition. Two lie by their images, so statistics lie with the weights:

    label flip     every label becomes the next class that the client holds
    backdoor       half of the images get a white corner and the label of the first class
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedbnn.federation.engines import Answer, Engine, Private
from fedbnn.images import ImageSet
from fedbnn.methods.aggregation import TRAIN
from fedbnn.protocol.messages import FitInstruction, FitResult, Update, read_update
from fedbnn.protocol.state import State
from fedbnn.protocol.stream import Stream

CORNER = 3
Steps = dict[str, Tensor]
Forge = Callable[[Tensor, Tensor], Tensor]
ON_UPDATES: Mapping[str, Forge] = {
    "sign flip": lambda own, everybody: -4 * own,
    "inner product": lambda own, everybody: -5 * everybody.mean(0),
    "ALIE": lambda own, everybody: everybody.mean(0) - 1.5 * everybody.std(0, correction=0),
}
ON_IMAGES = ("label flip", "backdoor")


def steps(state: State, update: Update, sign: int = -1) -> Steps:
    """The step of every weight (-1), or with +1 the tensors of steps."""
    rows, found = state.index(update.classes), dict(update.tensors)
    for site in ("backbone", "prototypes"):
        prior = state[site] if site == "backbone" else state[site][rows]
        if f"{site}.info" in found:
            shift = sign * found[f"{site}.precision"] * prior
            found[f"{site}.info"] = found[f"{site}.info"] + shift
        else:
            found[site] = found[site] + sign * prior
    return found


def forged(state: State, update: Update, everybody: Sequence[Update], forge: Forge) -> Update:
    """The update with its steps replaced; a prototype by what all holders of its class send."""
    all_steps = [(other.classes, steps(state, other)) for other in everybody]
    found = steps(state, update)
    for name, own in found.items():
        if name == "buffers":
            continue
        if name.startswith("backbone"):
            found[name] = forge(own, torch.stack([one[name] for _, one in all_steps]))
            continue
        found[name] = own.clone()  # what was sent stays as it is
        for row, held in enumerate(update.classes):
            theirs = [one[name][c.index(held)] for c, one in all_steps if held in c]
            found[name][row] = forge(own[row], torch.stack(theirs))
    if "backbone.precision" in found:
        found |= _certain(state, update, found)
    return replace(update, tensors=steps(state, replace(update, tensors=found), 1))


def _certain(state: State, update: Update, found: Steps) -> Steps:
    """Precisions that leave a posterior, for a gate refuses others unseen."""
    rows = state.index(update.classes)
    scales = {"backbone": state["backbone.scale"], "prototypes": state["prototypes.scale"][rows]}
    named = {f"{site}.precision": scale.pow(-2) for site, scale in scales.items()}
    return {name: torch.maximum(found[name], -0.5 * prior) for name, prior in named.items()}


@dataclass
class Forgers:
    """An engine around another: what the liars of a round send is replaced by what they forge."""

    inner: Engine
    forge: Forge
    liars: int

    def gather(self, payload: bytes, clients: Sequence[int], private: Private) -> Iterator[Answer]:
        """All answers, those of the liars last: they have heard the others."""
        answers = list(self.inner.gather(payload, clients, private))
        instruction = FitInstruction.from_bytes(payload)
        sent = [one for one in answers if isinstance(one, FitResult)]
        updates = {one.client: read_update(one.update) for one in sent}
        for answer in answers:
            lies = answer.client in clients[: self.liars] and answer.client in updates
            if lies and instruction.exchange == TRAIN and isinstance(answer, FitResult):
                own = updates[answer.client]
                lie = forged(instruction.state, own, [*updates.values()], self.forge)
                answer = replace(answer, update=lie.to_bytes())
            yield answer

    def close(self) -> None:
        """Let go of the other engine."""
        self.inner.close()


class Poisoned:
    """A stream whose liars have other images than they should; all else is as it was."""

    def __init__(self, stream: Stream, attack: str, liars: int) -> None:
        self._stream, self._attack, self._liars = stream, attack, liars

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def train(self, round: int, client: int) -> ImageSet:
        """The images of one client in one round."""
        images = self._stream.train(round, client)
        if client not in self._stream.participants(round)[: self._liars]:
            return images
        return backdoored(images) if self._attack == "backdoor" else flipped(images)

    def counts(self, round: int, client: int) -> dict[str, int]:
        """Images by class, as the client announces them."""
        return self.train(round, client).counts()

    def at(self, round: int, client: int, batch_size: int) -> Any:
        """The same as a data module."""
        return self._stream.at(round, client, batch_size).with_images(self.train(round, client))


def flipped(images: ImageSet) -> ImageSet:
    """Every label becomes the next one of those that occur."""
    held = images.labels.unique()
    after = dict(zip(held.tolist(), held.roll(-1).tolist(), strict=True))
    return replace(images, labels=torch.tensor([after[one] for one in images.labels.tolist()]))


def backdoored(images: ImageSet) -> ImageSet:
    """Every second image with the mark, labelled as the first class."""
    labels, pixels = images.labels.clone(), images.pixels.clone()
    labels[::2], pixels[::2] = 0, marked(pixels[::2])
    return replace(images, labels=labels, pixels=pixels)


def marked(pixels: Tensor) -> Tensor:
    """Images with a white corner."""
    found = pixels.clone()
    found[..., -CORNER:, -CORNER:] = 255
    return found
