"""The server's side of a Flower federation: orders out to the sites, answers back."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from time import monotonic, sleep
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedbnn.federation.engines import Answer, Private
from fedbnn.federation.engines.flower import wire
from fedbnn.federation.engines.flower.sites import LEFT, QUERY_SECONDS, Sites
from fedbnn.protocol.messages import Failure, FitResult

TRAIN, LAUNCH_SECONDS, KEPT_SECONDS, PULL_SECONDS, LOOK_SECONDS = "train", 60.0, 600.0, 0.1, 1.0
NUDGE_SECONDS = 120.0
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """An order that is out: whose, at which node, since when; when it is overdue, and void."""

    client: int
    node: int
    sent: float
    due: float
    void: float


class FlowerEngine:
    """Sends each client's order to the node that serves it, one at a time to a node.

    `deadline` is kept by the site; the server allows a minute more, in which the site launches its
    app. A client that no site serves (or two claim) is waited for during `patience` seconds, once
    every site that is there has said whom it serves (ten minutes at most); and so is one whose site
    has left with its order. With `late`, nothing is lost by not waiting that minute: an order
    outlives its deadline by so many of them; its client is not asked again meanwhile, and its
    answer is passed on as late. `check` may raise while answers are awaited.
    """

    def __init__(
        self,
        grid: Grid,
        config: Mapping[str, Any],
        deadline: float | None = None,
        patience: float = 120.0,
        check: Callable[[], None] = lambda: None,
        late: int = 0,
    ) -> None:
        self._grid, self._config, self._sites = grid, json.dumps(config), Sites(grid)
        self._deadline, self._patience, self._check = deadline, patience, check
        self._lives, self._late = 1 + late, dict[str, Asked]()
        self._open = (deadline or inf) + (0.0 if late else LAUNCH_SECONDS)

    def gather(self, payload: bytes, clients: Sequence[int], private: Private) -> Iterator[Answer]:
        """One answer of each client, as they come."""
        exchange = Exchange(self._grid, self._sites, self._patience, self._late, clients)
        yield from exchange.busy()
        while exchange.unfinished:
            self._check()
            for client, node in exchange.placed():
                order = self._order(payload, client, private(client))
                if not exchange.send(order, node, self._open):
                    yield Failure(client, "Flower did not take its order")
            yield from exchange.answers()
            yield from exchange.given_up(late=self._lives > 1)
            if exchange.unfinished:
                sleep(PULL_SECONDS)

    def _order(self, payload: bytes, client: int, private: bytes | None) -> wire.Order:
        seconds = (self._deadline or 0.0) * self._lives
        return wire.Order(client, self._config, payload, private, seconds)

    def close(self) -> None:
        """The grid belongs to whoever made it."""


class Exchange:
    """One `gather`: who waits for a site, and since when; which orders are out.

    `late` are those of earlier exchanges that are still good.
    """

    def __init__(
        self,
        grid: Grid,
        sites: Sites,
        patience: float,
        late: dict[str, Asked],
        clients: Sequence[int],
    ) -> None:
        self._grid, self._sites, self._patience, self._late = grid, sites, patience, late
        self._waits = dict.fromkeys(clients, monotonic())
        self._asked: dict[str, Asked] = {}
        self._sent: dict[str, int] = {}
        self._began, self._looked = monotonic(), -inf

    @property
    def unfinished(self) -> bool:
        """Whether anybody is still to be heard."""
        return bool(self._waits or self._asked)

    def busy(self) -> Iterator[Answer]:
        """Those who still follow an earlier order: they are not asked again."""
        for asked in self._late.values():
            if self._waits.pop(asked.client, None) is not None:
                yield Failure(asked.client, "is still busy with an earlier round")

    def placed(self) -> Iterator[tuple[int, int]]:
        """Clients that wait, each with a node that is free for it."""
        if monotonic() - self._looked > LOOK_SECONDS:
            self._look()
            self._looked = monotonic()
        hopeful = self._sites.unsure and monotonic() - self._began < QUERY_SECONDS
        for client in list(self._waits):
            if hopeful or (len(self._sites.claims(client)) < 2 and self._sites.of(client)):
                self._waits[client] = monotonic()
            out = [*self._asked.values(), *self._late.values()]
            node = self._sites.free(client, (asked.node for asked in out))
            if node is not None:
                yield client, node

    def _look(self) -> None:
        """Who is there, if somebody waits; and what keeps those who have an order for long."""
        if self._waits:
            self._sites.look()
        for asked in self._asked.values():
            if monotonic() - asked.sent > NUDGE_SECONDS:
                self._sites.nudge(asked.node)

    def send(self, order: wire.Order, node: int, seconds: float) -> bool:
        """Send an order that is awaited for so many seconds; whether Flower took it.

        Flower keeps it longer than it is good, or it would speak of a site that has left.
        """
        del self._waits[order.client]
        good, began = order.deadline + LAUNCH_SECONDS if order.deadline else None, monotonic()
        kept = good and good + KEPT_SECONDS
        message = Message(wire.order_records(order), node, TRAIN, ttl=kept)
        number = next(iter(self._grid.push_messages([message])), None)
        if not number:
            return False
        due, void = began + seconds, began + (good or inf)
        self._asked[number] = Asked(order.client, node, began, due, void)
        self._sent[number] = order.client
        return True

    def answers(self) -> Iterator[Answer]:
        """What has come. An answer that comes twice is passed on twice: the gate refuses it."""
        out = [*self._asked, *self._late]
        for reply in self._grid.pull_messages(out) if out else ():
            number = reply.metadata.reply_to_message_id
            self._asked.pop(number, None)
            if number in self._sent:
                yield from self._heard(self._sent[number], reply)
            elif number in self._late:
                yield from self._overheard(self._late.pop(number).client, reply)

    def _overheard(self, client: int, reply: Message) -> Iterator[Answer]:
        """The answer to an order of an earlier exchange, if there is one."""
        for answer in self._heard(client, reply):
            if isinstance(answer, FitResult):
                yield replace(answer, late=True)
            else:
                LOG.warning("client %d is late and failed: %s", client, answer.reason)

    def _heard(self, client: int, reply: Message) -> Iterator[Answer]:
        """The answer in a reply; the client of a site that has left waits again."""
        if reply.has_content():
            try:
                yield wire.read_answer(reply.content, client)
            except wire.Babble as error:
                yield Failure(client, str(error))
        elif reply.error.code in LEFT:
            LOG.warning("the site of client %d has left: %s", client, reply.error.reason)
            self._waits[client] = monotonic()
        else:
            yield Failure(client, " ".join(f"its app failed: {reply.error.reason}".split())[:400])

    def given_up(self, late: bool) -> Iterator[Answer]:
        """Those whose order is overdue, and those for whom nobody came."""
        now = monotonic()
        for number in [one for one, asked in self._late.items() if now > asked.void]:
            del self._late[number]
        for number, asked in list(self._asked.items()):
            if now > asked.due:
                del self._asked[number], self._sent[number]
                self._late |= {number: asked} if late else {}
                yield Failure(asked.client, "no answer in time")
        for client, since in list(self._waits.items()):
            if now - since > self._patience:
                del self._waits[client]
                yield Failure(client, self._why(client))

    def _why(self, client: int) -> str:
        """Why nobody was asked."""
        claims = self._sites.claims(client)
        if len(claims) > 1:
            return f"claimed by {len(claims)} sites: {', '.join(map(str, sorted(claims)))}"
        return f"no site served it for {self._patience:g} s"
