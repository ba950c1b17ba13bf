"""Foreign bytes -> Update, or one reason why not."""

from collections.abc import Mapping
from typing import Any

from fedbnn import wire
from fedbnn.messages import SCHEMA, Update

_TEXTS, _NUMBERS = ("run", "exchange", "prior"), ("round", "client", "samples")


class Refused(ValueError):
    """An update that is not let in; the text is the reason."""


def read_update(payload: bytes) -> Update:
    """The update in these bytes: readable header, matching digest, our schema, fields of the right types."""
    try:
        tensors, meta = wire.unpack(payload)
    except wire.Malformed as error:
        raise Refused(str(error)[:200]) from error
    if meta.get("schema") != SCHEMA:
        raise Refused(f"schema {str(meta.get('schema'))[:20]}, this version speaks {SCHEMA}")
    texts = [_field(meta, name, str) for name in _TEXTS]
    numbers = [_field(meta, name, int) for name in _NUMBERS]
    run, exchange, prior = texts
    round, client, samples = numbers
    return Update(run, round, exchange, client, prior, samples, _counts(meta), tensors)


def _field(meta: Mapping[str, Any], name: str, kind: type) -> Any:
    """One entry of the metadata, of exactly this type."""
    if type(meta.get(name)) is not kind:
        raise Refused(f"the metadata has no readable {name}")
    return meta[name]


def _counts(meta: Mapping[str, Any]) -> dict[str, int]:
    """Images by class: pairs of a name and a number, no name twice."""
    pairs = _field(meta, "counts", list)
    for pair in pairs:
        if not isinstance(pair, list) or [type(item) for item in pair] != [str, int]:
            raise Refused("the metadata has no readable counts")
    counts: dict[str, int] = dict(pairs)
    if len(counts) != len(pairs):
        raise Refused("a class is counted twice")
    return counts
