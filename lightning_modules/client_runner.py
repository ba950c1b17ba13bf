"""All that happens on a client: read the instruction, train, answer with an update."""

import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from fedbnn import machine
from fedbnn.bayes.flatten import Layout
from fedbnn.defense.privacy import Privacy, Question, clipped, noised, unit
from fedbnn.errors import DataError
from fedbnn.federation.engines import ClientFailed
from fedbnn.heads import ExactHead, Head, exact, gaussian, prototypes
from fedbnn.heads.prototypes import Assembly
from fedbnn.heads.statistics import summed
from fedbnn.images import ImageSet
from fedbnn.methods import FedBNN, Method
from fedbnn.methods.aggregation import TRAIN
from fedbnn.methods.base import Assignment
from fedbnn.protocol.messages import ANNOUNCE, FitInstruction, FitResult, Update, is_receipt
from fedbnn.protocol.state import State, content_digest
from fedbnn.protocol.stream import Stream
from fedbnn.seeds import address, forked
from lightning_modules.client_trainer import ClientTrainer, LocalTraining
from lightning_modules.point_client import Answer, Fit, fit_points
from lightning_modules.svi_client import PosteriorFit

LOG = logging.getLogger(__name__)


@contextmanager
def _at_home(client: int) -> Iterator[None]:
    """Images that cannot be read fail their client; which these are does not leave its machine."""
    try:
        yield
    except DataError as error:
        LOG.error("client %d: %s", client, error)
        raise ClientFailed("its images cannot be read; the log of its site says why") from error


class ClientRunner:
    """The clients of one process: one network (and one Pyro model), weights are swapped in."""

    def __init__(
        self,
        stream: Stream,
        backbone: nn.Module,
        layout: Layout,
        method: Method,
        head: Head,
        local: LocalTraining,
        trainer: Mapping[str, Any],
        seed: int,
        privacy: Privacy | None = None,
    ) -> None:
        machine.keep_memory()
        self.stream, self.backbone, self.layout, self.method = stream, backbone, layout, method
        self.head, self.privacy = head, privacy or Privacy()
        self.local, self.trainer, self.seed = local, ClientTrainer(trainer), seed
        self.posterior: PosteriorFit | None = None
        self._read: tuple[bytes, FitInstruction, str] | None = None

    def perform(self, payload: bytes, client: int, private: bytes | None) -> FitResult:
        """Answer one instruction."""
        began = perf_counter()
        instruction, prior = self._instruction(payload)
        if instruction.exchange == ANNOUNCE:
            return self._announced(instruction, client, prior)
        assignment, data = self._assignment(instruction, client, private)
        with forked(address(self.seed, instruction.exchange, instruction.round, client)):
            train = instruction.exchange == TRAIN
            answer = self.train(assignment, data) if train else self.measure(assignment)
        shared = assignment.images.counts() if self.method.shares_prototypes else {}
        where = (instruction.run, instruction.round, instruction.exchange, client, prior)
        update = Update(*where, len(assignment.images), shared, answer.tensors)
        if self.privacy.on:
            update = self._private(update, instruction)
        kept = answer.kept.to_bytes() if answer.kept else None
        seconds = perf_counter() - began
        return FitResult(client, update.to_bytes(), kept, seconds, answer.seconds, answer.train)

    def _announced(self, instruction: FitInstruction, client: int, prior: str) -> FitResult:
        """How many images of each class it will show; a private client does not say."""
        with _at_home(client):
            held = self.stream.announce(instruction.round, client)
        held = {} if self.privacy.on else held
        counts = held if self.method.shares_prototypes else {}
        where = (instruction.run, instruction.round, ANNOUNCE, client, prior)
        return FitResult(client, Update(*where, sum(held.values()), counts, {}).to_bytes())

    def _private(self, update: Update, instruction: FitInstruction) -> Update:
        """What it may say of its images: clipped, the same counts as everybody, its own noise."""
        statistics, length = update.exchange == gaussian.EXCHANGE, 1.0
        if statistics:
            update, sent = summed(update), instruction.state
            network = self.backbone, self.layout
            length = unit(self.head, *network, sent, self.stream.image_shape)
        classes = tuple(instruction.class_totals)
        question = Question(instruction.state, classes, self.layout, length)
        clip = self.privacy.clip_of(statistics)
        steps = clipped(question.asked(update), clip)
        if self.privacy.at == "client" and self.privacy.noise:
            steps = noised(steps, self.privacy.noise * clip, secrets.randbits(56))
        return question.answer(steps, update, self.privacy.announced(classes))

    def _instruction(self, payload: bytes) -> tuple[FitInstruction, str]:
        """Instruction and digest, read once for all clients that were sent the same bytes."""
        if self._read is None or self._read[0] is not payload:
            self._read = payload, FitInstruction.from_bytes(payload), content_digest(payload)
        return self._read[1:]

    def _assignment(
        self, instruction: FitInstruction, client: int, private: bytes | None
    ) -> tuple[Assignment, Any]:
        """What one client trains on, and from where; its data as a Lightning data module."""
        if private and is_receipt(client, private):
            raise ClientFailed("what it keeps is at its site: go on there, with flwr run")
        with _at_home(client):
            data = self.stream.at(instruction.round, client, self.local.batch_size)
        remembered, replay = State.from_bytes(private) if private else None, self.method.replay
        images = replay.images(data.images, remembered) if replay else data.images
        if self.privacy.on and instruction.class_totals:
            images = images.of(tuple(instruction.class_totals))
        if instruction.exchange == gaussian.EXCHANGE:
            images = images.of(tuple(self.privacy.enough(images.counts())))
        if not (held := tuple(images.counts())):
            raise ClientFailed("has no data this round")
        begun = replace(instruction, state=self.method.begins(instruction.state, remembered))
        replayed = len(images) - len(data.images)
        parts = (begun, self.layout, client, held, images, remembered, replayed)
        return Assignment(*parts), data

    def train(self, assignment: Assignment, data: Any) -> Answer:
        """Local training: points, or variational inference once the state is a posterior."""
        assembly = self._assembled(assignment)
        network = self.layout.classifier(self.backbone, assembly.rows)
        state = assignment.instruction.state
        network.prior_mean = exact.PriorMean.of(self.head, state, assembly.classes)
        labelled = data.with_images(assignment.images.among(assembly.classes))
        settings = (self.method, self.local, self.trainer)
        fit = Fit(assignment, assembly, network, labelled, *settings)
        if not assignment.instruction.state.bayesian:
            return fit_points(fit)
        assert isinstance(self.method, FedBNN)
        if self.posterior is None:
            self.posterior = PosteriorFit(self.backbone, self.layout, self.method)
        return self.posterior.fit(fit)

    def measure(self, assignment: Assignment) -> Answer:
        """A later exchange of the round: something is measured under the newest weights."""
        began, state = perf_counter(), assignment.instruction.state
        if assignment.instruction.exchange == gaussian.EXCHANGE:
            found = self._statistics(state, assignment.images)
        else:
            network = self.layout.classifier(self.backbone, self._assembled(assignment).rows)
            assert self.method.consolidation is not None
            found = self.method.consolidation.measure(assignment, network.eval())
        return Answer(found, None, perf_counter() - began)

    def _statistics(self, state: State, images: ImageSet) -> dict[str, Tensor]:
        """What the head wants to know of the images."""
        if not isinstance(self.head, ExactHead):
            parts = self.backbone, self.layout, state, images
            return gaussian.measure(*parts, self.trainer.device)
        if "backbone" in state:
            self.layout.write(self.backbone, state["backbone"], state["buffers"])
        return exact.measure(self.head, self.backbone, images, self.trainer.device)

    def _assembled(self, assignment: Assignment) -> Assembly:
        """The backbone it was sent put in place, and the prototypes of the client's classifier."""
        state, held = assignment.instruction.state, assignment.classes
        self.layout.write(self.backbone, state["backbone"], state["buffers"])
        holder = state if self.method.shares_prototypes else self._own(assignment)
        return Assembly(holder, self.method.softmax(holder, held), len(held))

    def _own(self, assignment: Assignment) -> State:
        """The client's own prototypes (a posterior where the backbone is one), for its classes."""
        width = int(self.backbone.width)  # type: ignore[arg-type]
        own = assignment.private or State(prototypes.empty(width))
        wide = assignment.instruction.state.having({"prototypes": own["prototypes"]})
        scale = self.method.prototype_scale(wide)
        if scale is not None and "prototypes.scale" not in own:
            start = own["prototypes"].new_full(own["prototypes"].shape, scale)
            own = own.having({"prototypes.scale": start})
        return prototypes.grow(own, assignment.classes, scale)
