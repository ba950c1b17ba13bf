"""What crosses Flower: an order to one client and its answer, as records and back.

Bytes travel as Flower's `Array`, which it cuts into pieces of a few megabytes, so that no update is
too large for a frame; all else stands in a small head. Nothing is pickled. What comes from a site
need not be believed: whatever has another form than expected is `Babble`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedbnn.federation.engines import Answer
from fedbnn.federation.engines.process import measured
from fedbnn.protocol.messages import Failure, FitResult

HEAD, BYTES, RAW = "head", "bytes", "fedbnn.bytes"
LONGEST = 400


class Babble(ValueError):
    """Records that are not what was agreed."""


@dataclass(frozen=True)
class Order:
    """What a site needs to let one of its clients follow an instruction.

    `config` is the complete configuration of the run as JSON, `private` what the client gave the
    server to keep, and `deadline` how many seconds it may take (0: as long as it likes).
    """

    client: int
    config: str
    payload: bytes
    private: bytes | None = None
    deadline: float = 0.0


def order_records(order: Order) -> RecordDict:
    """An order as it is sent."""
    head = {"client": order.client, "config": order.config, "deadline": order.deadline}
    return _records(head, {"payload": order.payload, "private": order.private})


def read_order(records: RecordDict) -> Order:
    """The order that the server sent."""
    head, blobs = _head(records), _blobs(records)
    settings = {name: head[name] for name in ("client", "config", "deadline")}
    return Order(**settings, payload=blobs["payload"], private=blobs.get("private"))


def answer_records(answer: Answer) -> RecordDict:
    """The answer of a client as it is sent."""
    if isinstance(answer, Failure):
        return _records({"client": answer.client, "failure": answer.reason[:LONGEST]}, {})
    said = {"seconds": answer.seconds, "inner": answer.inner, **answer.train}
    head = {"client": answer.client, **said}
    return _records(head, {"update": answer.update, "private": answer.private})


def read_answer(records: RecordDict, client: int) -> Answer:
    """What a site answers for this client, in the only forms it may have."""
    blobs = _blobs(records)
    match _head(records):
        case {"client": int(who), "failure": str(reason)} if who == client:
            return Failure(client, reason[:LONGEST])
        case {"client": int(who), **said} if who == client and "update" in blobs:
            if numbers := measured(said):
                return FitResult(client, blobs["update"], blobs.get("private"), *numbers)
    raise Babble("its site broke the protocol")


def served_records(clients: frozenset[int] | None) -> RecordDict:
    """Which clients a site serves; one that names none serves any."""
    head = {"any": True} if clients is None else {"clients": sorted(clients)}
    return _records(head, {})


def read_served(records: RecordDict) -> frozenset[int] | None:
    """Which clients a site says it serves; None is any."""
    match _head(records):
        case {"any": True}:
            return None
        case {"clients": [*clients]} if all(type(one) is int for one in clients):
            return frozenset(clients)
    raise Babble("it does not say whom it serves")


def _records(head: Mapping[str, Any], blobs: Mapping[str, bytes | None]) -> RecordDict:
    """A head and named bytes."""
    whole = {name: blob for name, blob in blobs.items() if blob is not None}
    arrays = {name: Array("uint8", (len(blob),), RAW, blob) for name, blob in whole.items()}
    return RecordDict({HEAD: ConfigRecord(dict(head)), BYTES: ArrayRecord(arrays)})


def _head(records: RecordDict) -> dict[str, Any]:
    head = records.config_records.get(HEAD)
    if head is None:
        raise Babble("there is no head")
    return dict(head)


def _blobs(records: RecordDict) -> dict[str, bytes]:
    return {name: array.data for name, array in records.array_records.get(BYTES, {}).items()}
