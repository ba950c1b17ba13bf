"""A site: the ClientApp that answers for its clients, with data and memory that stay where it is.

What a site says of itself stands in the node configuration of its SuperNode: `clients="0,3"` are
those it serves, `state-dir` is where they keep what is theirs, and a key with a dot is a setting of
this site, as `stream.data_dir`. A node that names no clients, as those of a simulation, serves any
and keeps nothing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedbnn.errors import FedBNNError
from fedbnn.federation.engines import Answer, ClientFailed, SerialEngine, Worker
from fedbnn.federation.engines.flower import wire
from fedbnn.federation.engines.worker import composed
from fedbnn.protocol.messages import Failure, FitResult, is_receipt
from fedbnn.protocol.state import digest
from fedbnn.storage.files import keep_newest, write_atomic

STATE_DIR, KEPT = "site-state", 8
Node = Mapping[str, Any]


def client_app(entry: str) -> ClientApp:
    """The app of every site; `entry` is `module:function`, which composes the client's side."""
    app = ClientApp()

    @app.query()
    def served(message: Message, context: Context) -> Message:
        return Message(wire.served_records(clients_of(context.node_config)), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        answer = answered(entry, wire.read_order(message.content), context.node_config)
        return Message(wire.answer_records(answer), reply_to=message)

    return app


def clients_of(node: Node) -> frozenset[int] | None:
    """The clients that a site serves: `clients="0,3"`, or one number; None is any."""
    named = node.get("clients")
    return None if named is None else frozenset(int(one) for one in str(named).split(","))


def answered(entry: str, order: wire.Order, node: Node) -> Answer:
    """The answer of one client; whatever goes wrong here costs this client only."""
    clients = clients_of(node)
    if clients is not None and order.client not in clients:
        return Failure(order.client, "this site does not serve it")
    shelf = None if clients is None else _shelf(node, json.loads(order.config))
    try:
        worker = _worker(entry, order.config, json.dumps(_settings(node)))
        private = shelf.fetch(order.client, order.private) if shelf else order.private
    except (ClientFailed, FedBNNError, OSError) as error:
        return Failure(order.client, str(error))
    engine = SerialEngine(worker, order.deadline or None)
    (answer,) = engine.gather(order.payload, [order.client], lambda _: private)
    if shelf and isinstance(answer, FitResult) and answer.private is not None:
        return replace(answer, private=shelf.keep(order.client, answer.private))
    return answer


def _settings(node: Node) -> dict[str, Any]:
    """The settings of this site: `stream.data_dir: X`."""
    return {key: value for key, value in node.items() if "." in key}


@lru_cache(maxsize=1)
def _worker(entry: str, config: str, settings: str) -> Worker:
    """The client's side, composed once a process and configuration."""
    values = json.loads(config)
    for key, value in json.loads(settings).items():
        section, _, name = key.partition(".")
        values[section] = {**values.get(section, {}), name: value}
    return composed(entry, values)


def _shelf(node: Node, config: Mapping[str, Any]) -> "Shelf":
    """Where the clients of this site keep what is theirs in a run."""
    run = f"{config.get('name')}-{config.get('seed')}".replace("/", "-")
    return Shelf(Path(str(node.get("state-dir", STATE_DIR))).expanduser() / run)


@dataclass(frozen=True)
class Shelf:
    """What the clients of a site keep for themselves: files on its own disk, named by their digest.

    The server gets the digest, keeps it in its ledger in place of the thing, and shows it the next
    time. So what came out of a round that was never committed, or refused, is not taken up again.
    The newest files of a client stay, more than the rounds to which the ledger can fall back.
    """

    directory: Path

    def keep(self, client: int, private: bytes) -> bytes:
        """Put it on the shelf; the receipt."""
        name = f"{client}-{digest(private)}"
        self.directory.mkdir(parents=True, exist_ok=True)
        write_atomic(self.directory / name, private)
        keep_newest(self.directory.glob(f"{client}-*"), KEPT)
        return name.encode()

    def fetch(self, client: int, receipt: bytes | None) -> bytes | None:
        """What a receipt stands for; what the server had to keep so far is the thing itself."""
        if receipt is None or not is_receipt(client, receipt):
            return receipt
        name = receipt.decode()
        path = self.directory / Path(name).name
        private = path.read_bytes() if path.is_file() else b""
        if digest(private) != name.partition("-")[2]:
            raise ClientFailed(f"what it kept is not in {self.directory}: {name}")
        return private
