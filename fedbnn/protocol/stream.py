"""The stream of a run as everybody sees it: who takes part, with which images; what is tested."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fedbnn.images import ImageSet, Preprocess


@dataclass(frozen=True)
class Task:
    """What people call it, and the global names of the classes that occur in it."""

    name: str
    classes: tuple[str, ...]


class Stream(Protocol):
    """What server, clients and evaluation ask of a stream; rounds count from 1, clients from 0."""

    @property
    def rounds(self) -> int:
        """Number of rounds R."""

    @property
    def held(self) -> int:
        """The most images that a client may announce for a round; 0 if all is known without."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""

    @property
    def preprocess(self) -> Preprocess:
        """How pixels become network input."""

    @property
    def tasks(self) -> Sequence[Task]:
        """All tasks of the run."""

    def participants(self, round: int) -> tuple[int, ...]:
        """The clients of a round."""

    def more_participants(self, round: int, clients: int) -> tuple[int, ...]:
        """Others that have images in it, so that there are so many in all, if there are."""

    def counts(self, round: int, client: int) -> dict[str, int]:
        """Images by class of one client in one round."""

    def announce(self, round: int, client: int) -> dict[str, int]:
        """The same, said by the client itself: these it will show."""

    def train(self, round: int, client: int) -> ImageSet:
        """The images of one client in one round."""

    def at(self, round: int, client: int, batch_size: int) -> Any:
        """The same as a LightningDataModule: `images`, and `with_images` for others instead."""

    def shares(self, round: int) -> tuple[float, ...]:
        """Share of the clients on each task in a round."""

    def task_ends(self) -> tuple[int, ...]:
        """Last round of each task; of a method only its `consolidation` is told."""

    def test(self, task: int) -> ImageSet:
        """The full test set of a task."""

    def test_now(self, round: int, images: int | None) -> ImageSet:
        """At most so many test images, drawn from the mixture of tasks of a round."""
