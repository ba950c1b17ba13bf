"""A Flower grid in this process: the same ServerApp and ClientApp, without SuperLink and Ray.

Every message is taken apart into the objects that Flower sends, and put together again from their
bytes.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

RUN = 7
LEFT = 5
Fault = Callable[["LocalGrid", Message, Message], Iterable[Message]]


def crossed(message: Message) -> Message:
    """The message as it arrives: made of the bytes of its objects alone."""
    objects = {key: one.deflate() for key, one in get_all_nested_objects(message).items()}
    number = message.object_id
    arrived = inflate_object_from_contents(number, objects)
    assert isinstance(arrived, Message)
    arrived.metadata.__dict__["_message_id"] = number
    return arrived


class LocalGrid(Grid):
    """Nodes by their number, each with its configuration; a reply is there as soon as it is asked.

    `fault(grid, order, reply)` gives the replies to an order to train in place of the honest one.
    """

    def __init__(
        self, app: ClientApp, nodes: Mapping[int, Mapping[str, Any]], fault: Fault | None = None
    ) -> None:
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = RUN, 1, 1
        self.app, self.nodes, self.fault = app, dict(nodes), fault
        self.replies: dict[str, list[Message]] = {}
        self.orders: list[Message] = []

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        return Run.create_empty(RUN)

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._sent(crossed(message)) for message in messages]

    def _sent(self, order: Message) -> str:
        honest = self._reply(order)
        trained = order.metadata.message_type == "train"
        replies = self.fault(self, order, honest) if self.fault and trained else [honest]
        self.replies[order.metadata.message_id] = [crossed(reply) for reply in replies]
        self.orders += [order] if trained else []
        return str(order.metadata.message_id)

    def _reply(self, order: Message) -> Message:
        """What the site answers, or Flower for it."""
        node = order.metadata.dst_node_id
        if node not in self.nodes:
            return Message(Error(LEFT, "Node Unavailable"), reply_to=order)
        context = Context(RUN, node, dict(self.nodes[node]), RecordDict(), {})
        try:
            return self.app(order, context)
        except Exception as error:  # noqa: BLE001 - as Flower does around an app
            return Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=order)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [reply for number in message_ids for reply in self.replies.pop(number, [])]

    def send_and_receive(self, *_: Any, **__: Any) -> Iterable[Message]:
        raise NotImplementedError
