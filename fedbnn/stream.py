"""The stream as the rounds see it: who takes part, and with which images."""

from typing import Any, Protocol

from fedbnn.images import ImageSet


class Stream(Protocol):
    """Who takes part in the rounds, and with what: the stream as server and clients see it."""

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        ...

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        ...

    def participants(self, round: int) -> tuple[int, ...]:
        """The clients of a round."""
        ...

    def counts(self, round: int, client: int) -> dict[str, int]:
        """Images by class of one client in one round."""
        ...

    def train(self, round: int, client: int) -> ImageSet:
        """The images of one client in one round."""
        ...

    def at(self, round: int, client: int, batch_size: int) -> Any:
        """The same as a Lightning data module, with `images` and `with_images(images)`."""
        ...

    def shares(self, round: int) -> tuple[float, ...]:
        """Share of the clients on each task."""
        ...

    def task_ends(self) -> tuple[int, ...]:
        """Last round of each task; told to a `BoundaryMethod` only."""
        ...
