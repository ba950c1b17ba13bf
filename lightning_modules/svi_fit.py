"""Local variational inference, from the prior a client was sent to the likelihood factor it answers with."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedbnn.bayes.flatten import Layout
from fedbnn.bayes.gaussian import Gaussian
from fedbnn.bayes.model import BayesianModel, guide_for
from fedbnn.federation.local import LocalTraining
from fedbnn.methods import FedBNN
from fedbnn.methods.base import Assignment
from fedbnn.seeds import forked
from lightning_modules.assembly import Assembly, assemble, load_backbone, read_rows
from lightning_modules.client_trainer import ClientTrainer
from lightning_modules.point_fit import Outcome, keep_rows, warm_up
from lightning_modules.svi_client import Start, SVIClient, kl_weights


class PosteriorFit:
    """One Pyro model and guide for all clients of a process; each client swaps its prior in."""

    def __init__(
        self, backbone: nn.Module, layout: Layout, method: FedBNN, image_shape: tuple[int, int, int]
    ) -> None:
        self.layout, self.method, self.backbone = layout, method, backbone
        with forked(
            0
        ):  # made when the first client of a process comes, it must not use up that client's draws
            self.model = BayesianModel(backbone, layout, method.flipout, method.function_prior)
            self.guide = guide_for(self.model, image_shape)

    def fit(self, assignment: Assignment, local: LocalTraining, fitter: ClientTrainer) -> Outcome:
        """Warm new rows up, infer the posterior, and divide the prior out."""
        state, counts = assignment.instruction.state, assignment.images.counts()
        load_backbone(self.backbone, self.layout, state)
        assembly = assemble(
            state, assignment.classes, self.method, assignment.private, int(self.backbone.width)
        )
        images = assignment.images.among(assembly.classes)
        network = assembly.classifier(self.backbone)
        warm = warm_up(network, assembly, images, local, fitter)
        start = self._start(
            state["backbone"], state["backbone.scale"], assembly, read_rows(network)
        )
        totals = (assignment.instruction.total, dict(assignment.instruction.class_totals))
        weights = kl_weights(
            self.method,
            len(state["backbone.scale"]),
            int(self.backbone.width),
            _padded(counts, assembly),
            totals,
        )
        self.model.free_points()
        if self.model.function_prior is not None:
            self.model.function_prior.swap(state["backbone"], state["buffers"])
        client = SVIClient(self.model, self.guide, start, weights, self.method, local)
        fitter.fit(client, images, local.epochs)
        return self._outcome(start, assembly, assignment, warm + client.inner)

    def _start(self, backbone: Tensor, scale: Tensor, assembly: Assembly, warmed: Tensor) -> Start:
        """The flat prior of backbone and rows, and the guide's start with the rows warmed up."""
        latent = backbone[: len(scale)]
        loc = torch.cat([latent, assembly.rows.reshape(-1)])
        return Start(
            loc,
            torch.cat([scale, assembly.scales.reshape(-1)]),
            torch.cat([latent, warmed.reshape(-1)]),
        )

    def _outcome(
        self, start: Start, assembly: Assembly, assignment: Assignment, inner: float
    ) -> Outcome:
        """l_k = q_k / q_0 in natural parameters, float32, with points and statistics beside it."""
        loc, scale = self.guide.loc.detach(), self.guide.log_scale.detach().exp()
        factor = Gaussian.from_moments(loc, scale) / Gaussian.from_moments(start.loc, start.scale)
        latent, width = self.layout.latent, self.model.features + 1
        weights, buffers = self.layout.read(self.backbone)
        sent = {
            "backbone.precision": factor.precision[:latent].float(),
            "backbone.info": factor.info[:latent].float(),
            "points": weights[latent:],
            "buffers": buffers,
        }
        if self.method.share == "global":
            sent["rows.precision"] = (
                factor.precision[latent:].view(-1, width)[: assembly.sent].float()
            )
            sent["rows.info"] = factor.info[latent:].view(-1, width)[: assembly.sent].float()
            return sent, None, inner
        own = {"rows": loc[latent:].view(-1, width), "rows.scale": scale[latent:].view(-1, width)}
        return sent, keep_rows(assembly, assignment, own), inner


def _padded(counts: Mapping[str, int], assembly: Assembly) -> dict[str, int]:
    """Images by class for every assembled row; rows that are only in the softmax count none."""
    return {name: counts.get(name, 0) for name in assembly.classes}
