"""What the server knows: a few flat tensors and the names of the classes. A value: never changed in place.

Tensors, by name (P backbone weights, B buffer values, C classes in the library, d features):

    backbone        (P,)      weights, or their posterior means      backbone.scale  (Q <= P,)  once Bayesian
    rows         (C, d+1)  library: weights and bias of a class   rows.scale   (C, d+1)   once Bayesian
    rows.samples (C,)      images folded into the row so far; 0 means the row is fresh
    buffers      (B,)      running statistics of batch norm

and whatever a method keeps beside them under its own prefix (`scaffold.control`, `ewc.importance`, ...).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from fedbnn import wire


@dataclass(frozen=True)
class State:
    """Named tensors plus the class of each library row."""

    tensors: Mapping[str, Tensor]
    classes: tuple[str, ...] = ()
    notes: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    @property
    def bayesian(self) -> bool:
        """Whether the weights have a posterior yet, or are points."""
        return "backbone.scale" in self.tensors

    def having(self, tensors: Mapping[str, Tensor], **notes: object) -> "State":
        """The same state with some tensors (and notes) replaced or added."""
        return replace(self, tensors={**self.tensors, **tensors}, notes={**self.notes, **notes})

    def only(self, *names: str) -> "State":
        """The same state with these tensors alone (those it has)."""
        return replace(self, tensors={name: self[name] for name in names if name in self})

    def index(self, classes: tuple[str, ...]) -> Tensor:
        """Row numbers of these classes."""
        place = {name: row for row, name in enumerate(self.classes)}
        return torch.tensor([place[name] for name in classes], dtype=torch.long)

    def to_bytes(self) -> bytes:
        """The state as bytes; equal states give equal bytes."""
        return wire.pack(self.tensors, {"classes": list(self.classes), "notes": dict(self.notes)})

    @classmethod
    def from_bytes(cls, payload: bytes) -> "State":
        """The state that `to_bytes` wrote; raises `wire.Malformed` otherwise."""
        tensors, meta = wire.unpack(payload)
        classes, notes = meta.get("classes"), meta.get("notes")
        if not isinstance(classes, list) or not isinstance(notes, dict):
            raise wire.Malformed("not a state: classes or notes are missing")
        return cls(tensors, tuple(map(str, classes)), notes)
