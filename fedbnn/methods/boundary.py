"""Methods that must be told when a task ends, and what becomes of them where tasks have no end."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fedbnn.errors import ConfigError
from fedbnn.methods.base import Method
from fedbnn.state import State


@dataclass(frozen=True)
class BoundaryMethod(Method):
    """A method that must be told when a task ends; nothing else ever receives a boundary. `blind` is its pace without one.

    Args:
        every: consolidate every so many rounds; null at the true end of each task, and every 10 rounds where tasks overlap.
    """

    consolidation: ClassVar[tuple[str, ...]] = ()
    blind: ClassVar[int] = 10

    every: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every is not None and self.every < 1:
            raise ConfigError(f"every must be at least 1, not {self.every}", "method.every")

    def consolidates(self, round: int, task_ended: bool) -> bool:
        """Whether what was learnt so far is consolidated in this round."""
        return task_ended if self.every is None else round % self.every == 0

    def exchanges_at(self, round: int, task_ended: bool) -> tuple[str, ...]:
        """The exchanges of this round, knowing whether it is the last of a task."""
        return (
            *self.exchanges(round),
            *(self.consolidation if self.consolidates(round, task_ended) else ()),
        )

    def consolidate(self, state: State) -> State:
        """The state a consolidation leaves behind, after all folds of its round."""
        return state

    def facts(self) -> dict[str, Any]:
        """Which boundary was used."""
        return {
            "consolidation": "at task ends" if self.every is None else f"every {self.every} rounds"
        }


def without_boundaries(method: Method) -> Method:
    """The method for a stream whose tasks overlap: what needs an end consolidates at a fixed pace instead."""
    if isinstance(method, BoundaryMethod) and method.every is None:
        return replace(method, every=method.blind)
    return method
