"""From a state to scores: S draws of the weights, each made once and used for every image.

    p(y | x) = 1/S sum_s softmax(f(x; w_s)),   w_s ~ q(w);   for point weights S = 1 and w_1 = theta

where f is the score of the prototypes, or of the class posteriors: a linear discriminant with
Student-t tails. With covariance S shrunk towards a multiple of the identity by the closed form of
Chen et al. (OAS, 2010), and v degrees of freedom, the predictive density of class c at features f
is a multivariate Student-t:

    d_c = (f - m_c)^T S^-1 (f - m_c) / (1 + 1/n_c)
    log p(f | c) = -(v + d)/2 log(1 + d_c / v) - d/2 log(1 + 1/n_c) + const

n_c is the count of the class posterior, in which old visits count less. Where classes are not met
equally often (`prior: frequency`), p(c) is the mean of the Dirichlet posterior of these counts,
else all are alike:

    log p(c) = log(n_c + 1) + const
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedbnn.bayes.flatten import Layout
from fedbnn.heads import GaussianHead, Head
from fedbnn.heads.gaussian import ClassPosteriors
from fedbnn.heads.prototypes import trained
from fedbnn.images import ImageSet
from fedbnn.networks import Classifier
from fedbnn.seeds import generator
from fedbnn.state import State

SMALLEST = 1e-9
BATCH = 500


def shrinkage(covariance: Tensor, samples: float) -> float:
    """OAS: ((1 - 2/d) tr(S^2) + tr(S)^2) / ((n + 1 - 2/d) (tr(S^2) - tr(S)^2 / d)), at most 1."""
    width = len(covariance)
    squares, trace = float(covariance.square().sum()), float(covariance.trace())
    below = (samples + 1 - 2 / width) * (squares - trace**2 / width)
    return min(1.0, ((1 - 2 / width) * squares + trace**2) / below) if below > 0 else 1.0


@dataclass(frozen=True)
class Discriminant:
    """Class means in whitened coordinates: any number of images is one matrix product."""

    whiten: Tensor
    means: Tensor
    spread: Tensor
    freedom: float
    temperature: float
    log_prior: Tensor

    @classmethod
    def of(cls, posteriors: ClassPosteriors, rows: Tensor, head: GaussianHead) -> "Discriminant":
        """For the classes in these rows.

        Shrinking towards the identity keeps the eigenvectors, so it is done on the eigenvalues;
        those that rounding made negative are 0.
        """
        weight = float(posteriors.weight.clamp_min(1.0))
        scatter = posteriors.scatter
        values, vectors = torch.linalg.eigh((scatter + scatter.T) / (2 * weight))
        values = values.clamp_min(0)
        share, level = shrinkage(values.diag(), weight), float(values.mean()) or 1.0
        shrunk = ((1 - share) * values + share * level).clamp_min(SMALLEST * level)
        whiten, count = vectors * shrunk.rsqrt(), posteriors.count[rows]
        log_prior = count.log1p() if head.prior == "frequency" else torch.zeros_like(count)
        spread = 1 + 1 / count.clamp_min(1e-6)
        means = posteriors.mean[rows] @ whiten
        return cls(whiten, means, spread, weight, head.temperature, log_prior)

    def scores(self, features: Tensor) -> Tensor:
        """Log-scores (n, C) of features (n, d): log p(f | c) / temperature + log p(c) + const."""
        white = features.double() @ self.whiten
        cross = white.square().sum(1, keepdim=True) - 2 * white @ self.means.T
        distance = (cross + self.means.square().sum(1)).clamp_min(0) / self.spread
        width = white.shape[1]
        tails = -0.5 * (self.freedom + width) * torch.log1p(distance / self.freedom)
        logs = tails - 0.5 * width * self.spread.log()
        return (logs / self.temperature + self.log_prior).float()


class Predictor:
    """A state made ready to score images; `classes` have a trained row, in column order."""

    def __init__(
        self,
        backbone: nn.Module,
        layout: Layout,
        state: State,
        head: Head,
        samples: int = 8,
        seed: int = 0,
    ) -> None:
        self.classes = trained(state)
        rows = state.index(self.classes)
        self._network = Classifier(backbone, len(self.classes)).eval()
        self._put_in_place = partial(layout.write, backbone, state["backbone"], state["buffers"])
        self._discriminant = None
        if isinstance(head, GaussianHead) and "posteriors.count" in state:
            posteriors = ClassPosteriors.of(state, state["prototypes"].shape[1] - 1)
            self._discriminant = Discriminant.of(posteriors, rows, head)
            self._share = head.prototypes
        self._draws = [layout.by_parameter(*draw) for draw in _draws(state, rows, samples, seed)]

    def scores(self, images: ImageSet) -> Tensor:
        """Log-scores (S, n, C); softmax over any columns gives that draw's probabilities."""
        self._put_in_place()  # running statistics: others may have used the backbone meanwhile
        with torch.inference_mode():
            batches = [batch for batch, _ in images.loader(BATCH, shuffle=False)]
            scored = [[self._logits(draw, batch) for batch in batches] for draw in self._draws]
            return torch.stack([torch.cat(parts) for parts in scored])

    def _logits(self, draw: dict[str, Tensor], batch: Tensor) -> Tensor:
        """Scores of one draw: of the prototypes, or of class posteriors with a share of theirs."""
        if self._discriminant is None:
            logits: Tensor = functional_call(self._network, draw, (batch,))
            return logits
        named = {name.partition(".")[2]: v for name, v in draw.items() if name[:9] == "backbone."}
        features: Tensor = functional_call(self._network.backbone, named, (batch,))
        scores = self._discriminant.scores(features)
        if not self._share:
            return scores
        linear = nn.functional.linear(features, draw["head.weight"], draw["head.bias"])
        return scores + self._share * linear


def _draws(state: State, rows: Tensor, samples: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """w_s = m + s * noise, the same for the same seed; without a posterior the means alone."""
    backbone, prototypes = state["backbone"], state["prototypes"][rows].contiguous()
    if not state.bayesian or not samples:
        return [(backbone, prototypes)]
    source, draws = generator(seed, "prediction"), []
    scale, scales = state["backbone.scale"], state["prototypes.scale"][rows]
    for _ in range(samples):
        weights = backbone + scale * torch.randn(len(scale), generator=source)
        noise = torch.randn(prototypes.shape, generator=source)
        draws.append((weights, prototypes + scales * noise))
    return draws
