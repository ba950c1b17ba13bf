"""A worker that does not keep to the protocol, in whatever way, costs the client it serves only."""

import time
import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedbnn.errors import FederationError
from fedbnn.federation.engines import worker
from fedbnn.federation.engines.process import ProcessEngine
from fedbnn.protocol.messages import Failure, FitResult
from tests.federation import hostile

PROTOCOL = "its worker broke the protocol"
LATE = "no answer within 1 s"
WAYS = {
    "another_client": PROTOCOL,
    "not_json": PROTOCOL,
    "nested": PROTOCOL,
    "unknown_kind": PROTOCOL,
    "no_table": PROTOCOL,
    "missing_fields": PROTOCOL,
    "wrong_types": PROTOCOL,
    "no_number": PROTOCOL,
    "endless_seconds": PROTOCOL,
    "endless_loss": PROTOCOL,
    "done_before_it_began": PROTOCOL,
    "negative_size": PROTOCOL,
    "less_than_announced": PROTOCOL,
    "more_than_announced": PROTOCOL,
    "long_head": PROTOCOL,
    "endless_head": PROTOCOL,
    "another_language": PROTOCOL,
    "too_large": "too large: 1048576.0 MB, the cap is 1 MB",
    "too_large_private": "too large: 1048576.0 MB, the cap is 1 MB",
    "drip": LATE,
    "deaf": LATE,
    "unheard": LATE,
    "hang_up": "its worker hung up",
}


@pytest.fixture(autouse=True)
def in_place_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "__file__", hostile.__file__)


def engine(config: dict[str, Any], workers: int = 1, deadline: float = 1.0) -> Any:
    made = ProcessEngine("nowhere:nothing", config, workers, deadline=deadline, max_megabytes=1)
    return closing(made)


def gathered(one: ProcessEngine, clients: list[int]) -> dict[int, bytes | str]:
    answers = one.gather(b"instruction", clients, lambda client: b"own" if client % 2 else None)
    return {
        answer.client: answer.update if isinstance(answer, FitResult) else answer.reason
        for answer in answers
    }


@pytest.mark.parametrize("way", WAYS)
def test_one_worker_that_breaks_it_costs_its_client(way: str) -> None:
    start = time.monotonic()
    tracemalloc.start()
    try:
        with engine({"1": way}) as one:
            assert gathered(one, [0, 1, 2]) == {0: b"ok", 1: WAYS[way], 2: b"ok"}
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()
    assert time.monotonic() - start < 8


def test_a_flood_after_the_answer_harms_nobody() -> None:
    with engine({"1": "flood"}) as one:
        for _ in range(2):
            assert gathered(one, [0, 1, 2]) == {0: b"ok", 1: b"ok", 2: b"ok"}


def test_a_worker_that_does_not_read_is_late(tmp_path: Path) -> None:
    with engine({"0": "deaf"}, deadline=0.5) as one:
        answers = list(one.gather(b"x" * 2**24, [0, 1], lambda client: b"y" * 2**24))
    assert [type(answer) for answer in answers] == [Failure, FitResult]


@pytest.mark.parametrize("begin", [[["ready"]], ["{"], [{"broken": 3}], [{"broken": "x"}], [{}]])
def test_a_worker_that_begins_otherwise_does_not_start(begin: list[Any]) -> None:
    with engine({"begin": begin}) as one, pytest.raises(FederationError, match="do not start"):
        gathered(one, [0])
