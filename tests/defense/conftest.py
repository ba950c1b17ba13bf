"""One call of a round, and an honest answer to it that tests then spoil."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedbnn.defense.gate import Candidates, ExpectedUpdate, Gate
from fedbnn.methods.aggregation import influence_of_point
from fedbnn.protocol.messages import FitResult, Update
from fedbnn.storage.files import Rejected, Spool

ROLL = {client: {"cat": 6, "dog": 4} for client in range(5)}
FEATURES = 3


def expected(classes: tuple[str, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {
        "backbone": ((8,), torch.float32),
        "prototypes": ((len(classes), FEATURES), torch.float32),
    }


def defect(update: Update) -> str | None:
    return (
        "the folded precision is not positive"
        if bool((update.tensors["backbone"] <= -50).any())
        else None
    )


def point(update: Update) -> Iterator[Tensor]:
    return influence_of_point(torch.zeros(8), update.tensors["backbone"])


CALL = ExpectedUpdate(
    "run-1", 7, "train", "digest", ROLL, expected, defect, point, lambda update: {}
)


def honest(client: int = 0, /, **changes: Any) -> Update:
    values = torch.randn(8, generator=torch.Generator().manual_seed(client)) * 0.1 + 1
    tensors = {"backbone": values, "prototypes": torch.ones(2, FEATURES)}
    return replace(
        Update("run-1", 7, "train", client, "digest", 10, dict(ROLL[client % 5]), tensors),
        **changes,
    )


def having(name: str, tensor: Tensor, client: int = 0) -> Update:
    update = honest(client)
    return replace(update, tensors={**update.tensors, name: tensor})


Open = Callable[..., Candidates]


@pytest.fixture
def candidates(tmp_path: Path) -> Open:
    def opened(call: ExpectedUpdate = CALL, **settings: Any) -> Candidates:
        gate = Gate(**settings)
        return Candidates(
            gate,
            call,
            Spool(tmp_path / "spool"),
            Rejected(tmp_path / "rejected", gate.keep_rejected),
        )

    return opened


def reply(update: Update | bytes, client: int = 0) -> FitResult:
    return FitResult(client, update if isinstance(update, bytes) else update.to_bytes())


def reason_of(candidates: Candidates, update: Update | bytes, client: int = 0) -> str | None:
    """Why the gate refuses this answer, or None."""
    return None if candidates.admit(reply(update, client)) else candidates.refused[client]
