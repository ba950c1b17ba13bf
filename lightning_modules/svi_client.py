"""A client whose weights are a posterior: variational inference from the prior it was sent."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor, nn

from fedbnn.bayes.flatten import Layout, prototypes_of
from fedbnn.bayes.gaussian import Gaussian, spans
from fedbnn.bayes.inference import ClosedFormELBO, fisher, informed
from fedbnn.bayes.model import BayesianModel, MeanFieldGuide
from fedbnn.devices import CPU, visiting
from fedbnn.methods.fedbnn import FedBNN
from fedbnn.protocol.messages import FitInstruction
from fedbnn.seeds import forked
from lightning_modules.client_trainer import LocalTraining
from lightning_modules.point_client import UNTRAINED, Answer, ClientModule, Fit, optimizer

MOST = 1024
"""Images of a client by which curvature is measured, at even distances among all it has."""
PIECE = 2**15
"""Weights of which natural parameters are made at once."""


@dataclass(frozen=True)
class Start:
    """Where local inference begins: the prior over the flat vector, and the guide.

    They differ in prototypes. The prior of those that were warmed up is the one before, so that no
    image counts twice; and of a class that is new it is wide, for nothing is known of it, while the
    guide draws it no wider than other weights.
    """

    loc: Tensor
    scale: Tensor
    guide_loc: Tensor
    guide_scale: Tensor


class SVIClient(ClientModule):
    """Minimises CE + sum_j c_j KL_j over the guide's means and log scales."""

    def __init__(
        self,
        model: BayesianModel,
        guide: MeanFieldGuide,
        start: Start,
        kl_weight: Tensor,
        method: FedBNN,
        local: LocalTraining,
    ) -> None:
        super().__init__()
        model.swap(start.loc, start.scale)
        guide.swap(start.guide_loc, start.guide_scale)
        self.elbo = ClosedFormELBO(kl_weight)(model, guide)
        self.method, self.local = method, local

    def on_train_start(self) -> None:
        """The weights of the KL follow the guide to its device."""
        self.elbo.elbo.kl_weight = self.elbo.elbo.kl_weight.to(self.device)

    def objective(self, images: Tensor, labels: Tensor) -> Tensor:
        """The negative ELBO per image."""
        loss: Tensor = self.elbo(images, labels)
        return loss

    def parts(self) -> tuple[Tensor, ...]:
        """sum_j c_j KL_j of the last loss."""
        return (self.elbo.elbo.kl,)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Means at the learning rate, log scales at a multiple of it."""
        lr, guide = self.method.lr or self.local.lr, self.elbo.guide
        groups = [{"params": [guide.loc, *self.elbo.model.trained()]}]
        if guide.log_scale is not None:
            groups.append({"params": [guide.log_scale], "lr": lr * self.method.scale_lr})
        return optimizer(self.local.optimizer, groups, lr, self.local.momentum)


def kl_weights(
    method: FedBNN, backbone: int, width: int, counts: Mapping[str, int], sent: FitInstruction
) -> Tensor:
    """The weight of each KL term beside the mean cross-entropy.

    round    backbone tau / N,   prototype c  tau n_kc / (n_k N_c):  likelihood scaled to the round
    client   tau / n_k
    weights  tau / (number of weights)

    `counts` are the client's images by class of its softmax, 0 for classes it does not hold;
    prototypes are `width` wide.
    """
    images, size = sum(counts.values()), backbone + len(counts) * width
    if method.kl_per != "round":
        share = images if method.kl_per == "client" else size
        return torch.full((size,), method.temperature / share)
    each = [1 / sent.total] + [
        count / (images * sent.class_totals.get(name, count)) if count else 1 / sent.total
        for name, count in counts.items()
    ]
    weights = method.temperature * torch.tensor(each)
    return torch.cat([weights[:1].expand(backbone), weights[1:].repeat_interleave(width)])


@dataclass(frozen=True)
class Inferred:
    """q_0, and q_k as a function of it and of which weights are asked for.

    Natural parameters are made when they are asked for: in float64 those of all weights at once
    would be several times as many bytes as are sent.
    """

    loc: Tensor
    scale: Tensor
    posterior: Callable[[Gaussian, slice], Gaussian]

    def pair(self, here: slice) -> tuple[Gaussian, Gaussian]:
        """q_k and q_0 of these weights."""
        prior = Gaussian.from_moments(self.loc[here], self.scale[here])
        return self.posterior(prior, here), prior

    def factor(self) -> Gaussian:
        """l_k = q_k / q_0 of all weights, in float32."""
        found = Gaussian(torch.empty_like(self.loc), torch.empty_like(self.loc))
        for here in spans(len(self.loc), PIECE):
            posterior, prior = self.pair(here)
            factor = posterior / prior
            found.precision[here], found.info[here] = factor.precision, factor.info
        return found


def inferred(
    model: BayesianModel,
    guide: MeanFieldGuide,
    prior: tuple[Tensor, Tensor],
    images: Tensor,
    kl_weight: Tensor,
    device: torch.device = CPU,
) -> Inferred:
    """q_k: the means trained, and scales learned beside them or what the curvature says."""
    loc = guide.loc.detach()
    if guide.log_scale is not None:
        scale = guide.log_scale.detach().exp()
        return Inferred(*prior, lambda _, here: Gaussian.from_moments(loc[here], scale[here]))
    model.network.eval()
    with visiting(model, device):
        curvature = fisher(model, loc.to(device), images.to(device)).cpu()

    def learnt(q_0: Gaussian, here: slice) -> Gaussian:
        return informed(q_0, loc[here], curvature[here], kl_weight[here])

    return Inferred(*prior, learnt)


def _shown(fit: Fit) -> Tensor:
    """The images by which curvature is measured, not augmented."""
    images = fit.assignment.images
    return images.preprocess.normalise(images.pixels[:: ceil(len(images) / MOST)])


class PosteriorFit:
    """One Pyro model and guide for all clients of a process; each client swaps its prior in."""

    def __init__(self, backbone: nn.Module, layout: Layout, method: FedBNN) -> None:
        self.method, self.layout = method, layout
        with forked(0):  # made when the first client comes, it must not use up that client's draws
            self.model = BayesianModel(backbone, layout, method.feature_distillation)
        self.guide = MeanFieldGuide(self.model, learned=method.precision == "learned")

    def fit(self, fit: Fit) -> Answer:
        """Warm new prototypes up, infer the posterior, and divide the prior out."""
        sent, state = fit.assignment.instruction, fit.assignment.instruction.state
        warm = fit.warm_up()
        start, width = self._start(fit), self.model.features + 1
        held = fit.assignment.images.counts()
        counts = {name: held.get(name, 0) for name in fit.assembly.classes}
        weights = kl_weights(self.method, self.layout.size, width, counts, sent)
        self.model.network.requires_grad_(False).prior_mean = fit.network.prior_mean
        self.model.distils = sent.round > UNTRAINED
        if self.model.distillation is not None:
            self.model.distillation.swap(state["backbone"], state["buffers"])
        client = SVIClient(self.model, self.guide, start, weights, self.method, fit.local)
        fit.trainer.fit(client, fit.data, fit.local.epochs)
        meter, prior = client.meter, (start.loc, start.scale)
        meter.start()
        shown, device = _shown(fit), fit.trainer.device
        found = inferred(self.model, self.guide, prior, shown, weights, device)
        meter.stop()
        del client.elbo  # as large as the network; a used Trainer keeps its module for a while
        answer = self._answer(fit, found)
        return replace(answer, seconds=warm + meter.seconds, train=meter.train)

    def _start(self, fit: Fit) -> Start:
        """The flat prior of backbone and prototypes, and the guide's start with them warmed up."""
        state, assembly = fit.assignment.instruction.state, fit.assembly
        warmed = prototypes_of(dict(fit.network.named_parameters()))
        loc = torch.cat([state["backbone"], assembly.rows.reshape(-1)])
        guide_loc = torch.cat([state["backbone"], warmed.reshape(-1)])
        widest = self.method.row_scale(self.method.scale_gain, assembly.rows.shape[1])
        backbone, rows = state["backbone.scale"], assembly.scales.reshape(-1)
        both = (torch.cat([backbone, one]) for one in (rows, rows.clamp(max=widest)))
        scale, guide_scale = both
        return Start(loc, scale, guide_loc, guide_scale)

    def _answer(self, fit: Fit, found: Inferred) -> Answer:
        """l_k = q_k / q_0 in natural parameters, float32, with running statistics beside it."""
        size, width, held = self.layout.size, self.model.features + 1, fit.assembly.held
        parts = vars(found.factor())
        sent = {f"backbone.{name}": value[:size] for name, value in parts.items()}
        sent["buffers"] = self.layout.statistics(fit.network.backbone)
        if not self.method.shares_prototypes:
            posterior, _ = found.pair(slice(size, None))
            own = {"prototypes": posterior.loc.float(), "prototypes.scale": posterior.scale.float()}
            return Answer(sent, fit.keep({n: value.view(-1, width) for n, value in own.items()}))
        for name, value in parts.items():
            sent[f"prototypes.{name}"] = value[size:].view(-1, width)[:held]
        return Answer(sent)
