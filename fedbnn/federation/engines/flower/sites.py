"""Which node of a Flower federation serves which client. Nodes come and go, with random numbers."""

import logging
from collections.abc import Iterable

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedbnn.federation.engines.flower import wire

QUERY, QUERY_SECONDS = "query", 600.0
LEFT = {3, 5}
"""Flower's codes for a message that its site could not fetch, and for a site that has left."""
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
