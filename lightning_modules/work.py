"""All that happens on a client: read the order, train on the data of the round, answer with an update."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol

from torch import Tensor, nn

from fedbnn import memory, wire
from fedbnn.bayes.layout import Layout
from fedbnn.federation.engines import ClientFailed
from fedbnn.federation.local import LocalTraining
from fedbnn.heads import places
from fedbnn.images import ImageSet
from fedbnn.messages import Order, Reply, Update
from fedbnn.methods import FedBNN, Method
from fedbnn.methods.base import Assignment
from fedbnn.seeds import address, forked
from fedbnn.state import State
from lightning_modules.assembly import assemble, load_trunk
from lightning_modules.point_fit import fit_points
from lightning_modules.svi_fit import PosteriorFit
from lightning_modules.trainer import Fitter


class Data(Protocol):
    """Where a client's images of a round come from."""

    image_shape: tuple[int, int, int]

    def train(self, round: int, client: int) -> ImageSet:
        """The images of this client in this round."""
        ...


@dataclass(frozen=True)
class Answer:
    """What one client found: tensors to send, the state it keeps, and its seconds of pure computation."""

    tensors: Mapping[str, Tensor]
    kept: State | None = None
    inner: float = 0.0


class ClientWork:
    """The clients of one process: it keeps one network (and one Pyro model) and swaps weights in for each client."""

    def __init__(
        self,
        data: Data,
        trunk: nn.Module,
        layout: Layout,
        method: Method,
        local: LocalTraining,
        trainer: Mapping[str, Any],
        seed: int,
    ) -> None:
        memory.keep()
        self.data, self.trunk, self.layout, self.method = data, trunk, layout, method
        self.local, self.fitter, self.seed = local, Fitter(trainer), seed
        self.posterior: PosteriorFit | None = None
        self._read: tuple[bytes, Order, str] | None = None

    def perform(self, payload: bytes, client: int, private: bytes | None) -> Reply:
        """Answer one order."""
        start = perf_counter()
        order, prior = self._order(payload)
        remembered = State.from_bytes(private) if private else None
        shown = self.data.train(order.round, client)
        images = self.method.images(shown, remembered)
        counts = images.counts()
        if not counts:
            raise ClientFailed("has no data this round")
        order = replace(order, state=self.method.begins(order.state, remembered))
        assignment = Assignment(order, client, tuple(counts), images, remembered, len(images) - len(shown))
        with forked(address(self.seed, order.exchange, order.round, client)):
            answer = self.train(assignment) if order.exchange == "train" else self.measure(assignment)
        shared = counts if self.method.share == "global" else {}
        update = Update(order.run, order.round, order.exchange, client, prior, len(images), shared, answer.tensors)
        kept = answer.kept.to_bytes() if answer.kept else None
        return Reply(client, update.to_bytes(), kept, perf_counter() - start, answer.inner)

    def _order(self, payload: bytes) -> tuple[Order, str]:
        """The order and its digest, read once for all clients that were sent the same bytes."""
        if self._read is None or self._read[0] is not payload:
            self._read = payload, Order.from_bytes(payload), wire.digest(payload)
        return self._read[1:]

    def train(self, assignment: Assignment) -> Answer:
        """Local training: points, or variational inference once the state is a posterior."""
        if not assignment.order.state.bayesian:
            return Answer(*fit_points(assignment, self.trunk, self.layout, self.method, self.local, self.fitter))
        assert isinstance(self.method, FedBNN)
        if self.posterior is None:
            self.posterior = PosteriorFit(self.trunk, self.layout, self.method, self.data.image_shape)
        return Answer(*self.posterior.fit(assignment, self.local, self.fitter))

    def measure(self, assignment: Assignment) -> Answer:
        """A later exchange of the round: the method measures something under the newest weights."""
        start, state = perf_counter(), assignment.order.state
        if assignment.order.exchange == places.EXCHANGE:
            found = places.measure(self.trunk, self.layout, state, assignment.images)
            return Answer(found, None, perf_counter() - start)
        load_trunk(self.trunk, self.layout, state)
        assembly = assemble(state, assignment.classes, self.method, assignment.private, int(self.trunk.width))
        network = assembly.classifier(self.trunk).eval()
        tensors = self.method.measure(assignment, network, self.layout)
        return Answer(tensors, None, perf_counter() - start)
