"""How much of its data a client shows in one round."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from datamodules.scenarios import Integers, Schedule, largest_remainder
from datamodules.settings import at_least, require


@dataclass(frozen=True)
class SampleBudget:
    """All its images, a bounded draw a round (over all participants, or by each), or every image in one round only."""

    samples_per_round: int | None = None
    samples_per_client: int | None = None
    replacement: bool = False
    show_once: bool = False

    def check(self, clients_per_round: int) -> None:
        """Refuse settings that contradict each other."""
        at_least("samples_per_client", self.samples_per_client, 1)
        at_least("samples_per_round", self.samples_per_round, clients_per_round)
        bounds = (self.samples_per_round is not None) + (self.samples_per_client is not None)
        require(
            bounds < 2,
            "samples_per_round",
            "samples_per_round and samples_per_client both bound the draw",
            "keep one",
        )
        require(
            bounds == 1 or not self.replacement,
            "replacement",
            "replacement needs a bounded draw",
            "set samples_per_round",
        )
        require(
            bounds == 0 or not self.show_once,
            "show_once",
            "show_once shows all new images of a round",
            "drop the bound",
        )

    def allowed(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """How many images each participant draws, when they own this many."""
        if self.samples_per_client is not None:
            return tuple(
                self.samples_per_client if self.replacement else min(size, self.samples_per_client)
                for size in sizes
            )
        if self.samples_per_round is None or (
            not self.replacement and sum(sizes) <= self.samples_per_round
        ):
            return tuple(sizes)
        return shared_out(sizes, self.samples_per_round)


def shared_out(sizes: Sequence[int], total: int) -> tuple[int, ...]:
    """`total` draws in proportion to what participants own, by largest remainder, each at least one."""
    weights = [max(size - 1, 0) for size in sizes]
    more = largest_remainder(weights if any(weights) else [1] * len(sizes), total - len(sizes))
    return tuple(1 + extra for extra in more)


def shown_once(
    images: Integers, task: int, round: int, schedule: Schedule, clients: int
) -> Integers:
    """The images (in random order) whose only round this is: rounds of the task cut them in proportion to its clients."""
    start, end = schedule.windows[task]
    weights = [schedule.clients_on(each, clients)[task] for each in range(start + 1, end + 1)]
    cuts = np.floor(np.cumsum([0, *weights]) / max(sum(weights), 1) * len(images) + 1e-9).astype(
        np.int64
    )
    return images[cuts[round - start - 1] : cuts[round - start]]
