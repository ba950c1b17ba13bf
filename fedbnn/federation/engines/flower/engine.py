"""The server's side of a Flower federation: its app, who serves whom, orders out and answers back.

Flower calls the ServerApp with a grid, and it plays a run on the sites that are there. Nodes come
and go, with random numbers; each says which clients it serves.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from time import monotonic, sleep
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from fedbnn.errors import Exit
from fedbnn.federation.engines import Answer, Private
from fedbnn.federation.engines.flower import wire
from fedbnn.protocol.messages import Failure, FitResult

Play = Callable[[Grid, Mapping[str, Any]], int]
QUERY, QUERY_SECONDS = "query", 600.0
LEFT = {3, 5}
"""Flower's codes for a message that its site could not fetch, and for a site that has left."""
TRAIN, LAUNCH_SECONDS, KEPT_SECONDS, PULL_SECONDS, LOOK_SECONDS = "train", 60.0, 600.0, 0.1, 1.0
NUDGE_SECONDS = 120.0
LOG = logging.getLogger(__name__)


class Sites:
    """Asks every node whom it serves, and forgets those that have left.

    A node that names no clients serves any of them.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._serves: dict[int, frozenset[int] | None] = {}
        self._asked: dict[str, int] = {}

    def look(self) -> None:
        """Take in who is online, who is new, and what the new ones have answered."""
        online = set(self._grid.get_node_ids())
        self._serves = {node: who for node, who in self._serves.items() if node in online}
        self._asked = {query: node for query, node in self._asked.items() if node in online}
        for node in sorted(online - self._serves.keys()):
            self._ask(node)
        self._listen()

    def nudge(self, node: int) -> None:
        """Ask a node once more, so that it passes on what it may be holding back.

        A SuperNode (Flower 1.41) sends the replies it has once for every message it takes, and goes
        on to the next. If an app replied twice, the second one is sent in place of the reply to the
        next message, which stays until another message comes; and so on for ever.
        """
        self._listen()
        self._ask(node)

    def _ask(self, node: int) -> None:
        """Send a query, unless the node has one to answer."""
        if node not in self._asked.values():
            query = Message(RecordDict(), node, QUERY, ttl=QUERY_SECONDS)
            self._asked |= {sent: node for sent in self._grid.push_messages([query]) if sent}

    def _listen(self) -> None:
        """Take in what nodes have answered."""
        for reply in self._grid.pull_messages(list(self._asked)) if self._asked else ():
            self._hear(self._asked.pop(reply.metadata.reply_to_message_id, None), reply)

    def _hear(self, node: int | None, reply: Message) -> None:
        """Note whom a node serves; one whose app cannot say so serves nobody until it is back."""
        if node is None or (reply.has_error() and reply.error.code in LEFT):
            return
        clients: frozenset[int] | None = frozenset()
        try:
            if reply.has_error():
                raise wire.Babble(reply.error.reason)
            clients = wire.read_served(reply.content)
        except wire.Babble as error:
            LOG.error("site %d does not say whom it serves: %s", node, error)
        known, self._serves[node] = node in self._serves, clients
        if known:
            return
        LOG.info("site %d serves %s", node, "any client" if clients is None else sorted(clients))

    @property
    def unsure(self) -> bool:
        """Whether a node online has not said yet whom it serves; its app may be starting."""
        return not self._serves.keys() >= set(self._asked.values())

    def of(self, client: int) -> list[int]:
        """The nodes that name this client; if there are none, those that serve any."""
        named = [node for node, clients in self._serves.items() if clients and client in clients]
        return named or [node for node, clients in self._serves.items() if clients is None]

    def claims(self, client: int) -> list[int]:
        """The nodes that name this client as theirs: more than one is a quarrel."""
        return [node for node in self.of(client) if self._serves[node] is not None]

    def free(self, client: int, busy: Iterable[int]) -> int | None:
        """A node for this client that has nothing to do, unless two of them claim it."""
        if len(self.claims(client)) > 1:
            return None
        return next((node for node in self.of(client) if node not in set(busy)), None)


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


class Ended(Exception):
    """A run ended otherwise than done; Flower reports the text as the end of its own run."""


def server_app(play: Play) -> ServerApp:
    """An app that plays with the grid and the run configuration, and fails with the exit code."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        code = play(grid, context.run_config)
        if code:
            name = Exit(code).name.lower() if code in set(Exit) else "unexpected"
            raise Ended(f"fedbnn ended with exit code {code} ({name.replace('_', ' ')})")

    return app
