"""The roll call: where clients alone know what they hold, they announce it when a round begins.

    down   run and round, and nothing else
    up     how many images of each class the client will show, at most `stream.held` in all

It is an exchange like every other, through the same gate, with the same deadline and quorum. What
is announced is what the gate holds the client to for the rest of the round, what N and the new rows
of the round follow from, and what the ledger keeps before anybody trains: a run that is resumed
asks nobody again. Of private clients nothing is announced: they only settle which images they show.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedbnn.defense.gate import Candidates, ExpectedUpdate
from fedbnn.errors import FederationError
from fedbnn.federation.exchange import keep_late
from fedbnn.federation.parts import COUNTS, Federation, RoundStats
from fedbnn.protocol.messages import ANNOUNCE, FitInstruction, FitResult, Update
from fedbnn.protocol.state import State, content_digest

_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,200}")
Roll = dict[str, dict[int, Any]]


def roll_call(
    federation: Federation, number: int, clients: Sequence[int], stats: RoundStats
) -> list[int]:
    """Those of the clients that take part: who has images, or all of them if they are private."""
    if not federation.stream.held:
        return list(clients)
    roll = federation.ledger.roll(number)
    if roll is None:
        roll = _called(federation, number, clients, stats)
        federation.ledger.keep_roll(number, roll)
    stats.failed |= roll["failed"]
    stats.refused |= roll["refused"]
    if federation.privacy.on:
        return list(clients)
    found = [client for client in clients if sum(roll[COUNTS].get(client, {}).values())]
    if clients and not found:
        what, fix = f"nobody has images in round {number}", "resume it when somebody has"
        raise FederationError(what, "stream.partition: held", fix)
    return found


def _called(federation: Federation, number: int, clients: Sequence[int], stats: RoundStats) -> Roll:
    """Ask them; what is announced, and who did not, or not as agreed."""
    this = federation.run, number, ANNOUNCE
    payload = FitInstruction(*this, State({})).to_bytes()
    call = _expected(federation, (*this, content_digest(payload)), clients)
    trusting = replace(federation.gate, influence_cap=None, robust="influence")
    with stats.timing(ANNOUNCE), federation.ledger.spool(number, ANNOUNCE) as spool:
        candidates = Candidates(trusting, call, spool, federation.rejected)
        for answer in federation.engine.gather(payload, clients, lambda _: None):
            if isinstance(answer, FitResult) and answer.late:
                keep_late(federation, answer, candidates)
            else:
                candidates.admit(answer)
        candidates.close()
        counts = {update.client: dict(call.announced(update)) for update, _ in candidates}
    stats.bytes_down[ANNOUNCE] = len(payload) * len(clients)
    stats.bytes_up[ANNOUNCE] = candidates.bytes_up
    return {COUNTS: counts, "failed": candidates.failed, "refused": candidates.refused}


def _expected(
    federation: Federation, this: tuple[str, int, str, str], clients: Sequence[int]
) -> ExpectedUpdate:
    """No tensors, but counts that can be believed."""
    most = federation.stream.held

    def defect(update: Update) -> str | None:
        """Why an announcement is none."""
        if not 0 <= update.samples <= most:
            return f"announces {update.samples} images, the most is {most}"
        if any(count < 1 for count in update.counts.values()):
            return "announces a class without images"
        strange = [name for name in update.counts if not _NAME.fullmatch(name)]
        return f"announces a class that has no name: {strange[0][:60]!r}" if strange else None

    return ExpectedUpdate(
        *this,
        {client: {} for client in clients},
        expected=lambda _counts: {},
        defect=defect,
        influence=lambda _update: [],
        known=lambda _update: {},
        announces=True,
    )
