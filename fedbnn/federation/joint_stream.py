"""A stream as one client sees it that has been given everything so far."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from fedbnn.images import ImageSet, Preprocess
from fedbnn.seeds import generator
from fedbnn.stream import ClientData, Stream, Task


class JointStream:
    """One client, number 0. In round r it trains on N_r images drawn from all that participants of rounds 1..r were given.

    N_r is how many images the participants of round r hold. An image shown in several rounds counts as often.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._sizes: dict[int, dict[int, int]] = {}
        self._drawn: tuple[int, ImageSet] | None = None

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return self.stream.rounds

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return self.stream.image_shape

    @property
    def preprocess(self) -> Preprocess:
        """How pixels become network input."""
        return self.stream.preprocess

    @property
    def tasks(self) -> Sequence[Task]:
        """All tasks of the run."""
        return self.stream.tasks

    def shares(self, round: int) -> tuple[float, ...]:
        """Share of the clients on each task."""
        return self.stream.shares(round)

    def test(self, task: int) -> ImageSet:
        """The full test set of a task."""
        return self.stream.test(task)

    def test_now(self, round: int, images: int | None) -> ImageSet:
        """Test images of the mixture of a round."""
        return self.stream.test_now(round, images)

    def at(self, round: int, client: int, batch_size: int) -> ClientData:
        """The round's draw as a data module."""
        return self.stream.at(round, client, batch_size).with_images(self.train(round, client))

    def task_ends(self) -> tuple[int, ...]:
        """Last round of each task."""
        return self.stream.task_ends()

    def participants(self, round: int) -> tuple[int, ...]:
        """The one client."""
        return (0,)

    def counts(self, round: int, client: int) -> dict[str, int]:
        """Images by class of the round's draw."""
        return self.train(round, client).counts()

    def train(self, round: int, client: int) -> ImageSet:
        """The round's draw."""
        if self._drawn is None or self._drawn[0] != round:
            self._drawn = round, self._draw(round)
        return self._drawn[1]

    def _draw(self, round: int) -> ImageSet:
        """N_r of all images so far, without replacement."""
        owners = [(past, client) for past in range(1, round + 1) for client in self._size(past)]
        sizes = torch.tensor([self._size(past)[client] for past, client in owners])
        wanted = sum(self._size(round).values())
        chosen = (
            torch.randperm(int(sizes.sum()), generator=generator(0, "pool", round))[:wanted]
            .sort()
            .values
        )
        ends = sizes.cumsum(0)
        place = torch.searchsorted(ends, chosen, right=True)
        parts = []
        for number in place.unique().tolist():
            within = chosen[place == number] - (ends[number] - sizes[number])
            parts.append(self.stream.train(*owners[number]).subset(within))
        return joined(parts)

    def _size(self, round: int) -> dict[int, int]:
        """How many images each participant of a round holds."""
        if round not in self._sizes:
            held = {
                client: self.stream.counts(round, client)
                for client in self.stream.participants(round)
            }
            self._sizes[round] = {client: sum(counts.values()) for client, counts in held.items()}
        return self._sizes[round]


def joined(parts: list[ImageSet]) -> ImageSet:
    """Image sets with the same classes as one."""
    return replace(
        parts[0],
        pixels=torch.cat([part.pixels for part in parts]),
        labels=torch.cat([part.labels for part in parts]),
    )
