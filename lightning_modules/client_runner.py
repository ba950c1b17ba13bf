"""All that happens on a client: read the order, train on the data of the round, answer with an update."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol

from torch import Tensor, nn

from fedbnn import memory
from fedbnn.bayes.flatten import Layout
from fedbnn.federation.engines import ClientFailed
from fedbnn.federation.local import LocalTraining
from fedbnn.heads import places
from fedbnn.images import ImageSet
from fedbnn.messages import FitInstruction, FitResult, Update
from fedbnn.methods import FedBNN, Method
from fedbnn.methods.base import Assignment
from fedbnn.seeds import address, forked
from fedbnn.state import State, content_digest
from lightning_modules.assembly import assemble, load_backbone
from lightning_modules.client_trainer import ClientTrainer
from lightning_modules.point_fit import fit_points
from lightning_modules.svi_fit import PosteriorFit


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


class ClientRunner:
    """The clients of one process: it keeps one network (and one Pyro model) and swaps weights in for each client."""

    def __init__(
        self,
        data: Data,
        backbone: nn.Module,
        layout: Layout,
        method: Method,
        local: LocalTraining,
        trainer: Mapping[str, Any],
        seed: int,
    ) -> None:
        memory.keep()
        self.data, self.backbone, self.layout, self.method = data, backbone, layout, method
        self.local, self.fitter, self.seed = local, ClientTrainer(trainer), seed
        self.posterior: PosteriorFit | None = None
        self._read: tuple[bytes, FitInstruction, str] | None = None

    def perform(self, payload: bytes, client: int, private: bytes | None) -> FitResult:
        """Answer one order."""
        start = perf_counter()
        instruction, prior = self._instruction(payload)
        remembered = State.from_bytes(private) if private else None
        shown = self.data.train(instruction.round, client)
        images = self.method.images(shown, remembered)
        counts = images.counts()
        if not counts:
            raise ClientFailed("has no data this round")
        instruction = replace(instruction, state=self.method.begins(instruction.state, remembered))
        assignment = Assignment(
            instruction, client, tuple(counts), images, remembered, len(images) - len(shown)
        )
        with forked(address(self.seed, instruction.exchange, instruction.round, client)):
            answer = (
                self.train(assignment)
                if instruction.exchange == "train"
                else self.measure(assignment)
            )
        shared = counts if self.method.share == "global" else {}
        update = Update(
            instruction.run,
            instruction.round,
            instruction.exchange,
            client,
            prior,
            len(images),
            shared,
            answer.tensors,
        )
        kept = answer.kept.to_bytes() if answer.kept else None
        return FitResult(client, update.to_bytes(), kept, perf_counter() - start, answer.inner)

    def _instruction(self, payload: bytes) -> tuple[FitInstruction, str]:
        """The order and its digest, read once for all clients that were sent the same bytes."""
        if self._read is None or self._read[0] is not payload:
            self._read = payload, FitInstruction.from_bytes(payload), content_digest(payload)
        return self._read[1:]

    def train(self, assignment: Assignment) -> Answer:
        """Local training: points, or variational inference once the state is a posterior."""
        if not assignment.instruction.state.bayesian:
            return Answer(
                *fit_points(
                    assignment, self.backbone, self.layout, self.method, self.local, self.fitter
                )
            )
        assert isinstance(self.method, FedBNN)
        if self.posterior is None:
            self.posterior = PosteriorFit(
                self.backbone, self.layout, self.method, self.data.image_shape
            )
        return Answer(*self.posterior.fit(assignment, self.local, self.fitter))

    def measure(self, assignment: Assignment) -> Answer:
        """A later exchange of the round: the method measures something under the newest weights."""
        start, state = perf_counter(), assignment.instruction.state
        if assignment.instruction.exchange == places.EXCHANGE:
            found = places.measure(self.backbone, self.layout, state, assignment.images)
            return Answer(found, None, perf_counter() - start)
        load_backbone(self.backbone, self.layout, state)
        assembly = assemble(
            state, assignment.classes, self.method, assignment.private, int(self.backbone.width)
        )
        network = assembly.classifier(self.backbone).eval()
        tensors = self.method.measure(assignment, network, self.layout)
        return Answer(tensors, None, perf_counter() - start)
