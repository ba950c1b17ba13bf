"""From a state to scores: S draws of the weights, each made once and used for every image.

    p(y | x) = 1/S sum_s softmax(f(x; w_s)),   w_s ~ q(w);   for point weights S = 1 and w_1 = theta

where f is the score of the prototypes; or that of class posteriors (`fedbnn.heads.posteriors`),
in the features of the network or in such as never move, with a share of it.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear as linear_of

from fedbnn.bayes.flatten import Layout
from fedbnn.bayes.model import FeatureClassifier
from fedbnn.devices import CPU, visiting
from fedbnn.heads import ExactHead, GaussianHead, Head, LinearHead, exact
from fedbnn.heads.posteriors import ClassPosteriors, Discriminant
from fedbnn.heads.prototypes import trained
from fedbnn.images import ImageSet
from fedbnn.protocol.state import State
from fedbnn.seeds import generator

BATCH = 500
Read = tuple[Tensor, Tensor]
Scored = tuple[Tensor, Tensor | None]
"""Log-scores of known classes, and the log-odds of an unknown one where anything tells them."""


class Predictor:
    """A state made ready to score images; `classes` are those it knows, in column order."""

    def __init__(
        self,
        backbone: nn.Module,
        layout: Layout,
        state: State,
        head: Head,
        samples: int = 8,
        seed: int = 0,
        device: torch.device = CPU,
    ) -> None:
        self._backbone, self._device = backbone, device
        fixed = isinstance(head, ExactHead) and exact.COUNT in state
        self.classes = exact.met(state) if fixed else trained(state)
        rows = state.index(self.classes)
        self._network = FeatureClassifier(backbone, len(self.classes)).eval()
        self._put_in_place = partial(layout.write, backbone, state["backbone"], state["buffers"])
        self._moving: Discriminant | None = None
        self._fixed: Callable[[Tensor], Read] | None = None
        self._share = 0.0 if isinstance(head, LinearHead) else head.prototypes
        if isinstance(head, GaussianHead) and "posteriors.count" in state:
            posteriors = ClassPosteriors.of(state, state["prototypes"].shape[1] - 1)
            self._moving = Discriminant.of(posteriors, rows, head).on(device)
        elif isinstance(head, ExactHead) and fixed:
            self._fixed = exact.reader(head, backbone, state, rows, device)
            samples = samples if self._share else 0
        self._features = backbone.eval() if not layout.size else None
        draws = _draws(state, rows, samples, seed)
        self._draws = [layout.by_parameter(*(one.to(device) for one in draw)) for draw in draws]

    def read(self, images: ImageSet) -> Scored:
        """Log-scores (S, n, C), and what speaks for a class nobody has met (n,).

        Softmax over any columns of the scores gives that draw's probabilities. The log-odds of an
        unknown class are the mean over the draws; None where no class posteriors tell them.
        """
        self._put_in_place()  # running statistics: others may have used the backbone meanwhile
        with visiting(self._backbone, self._device), torch.inference_mode():
            batches = [batch.to(self._device) for batch, _ in images.loader(BATCH, shuffle=False)]
            fixed = [self._fixed(batch) if self._fixed else None for batch in batches]
            seen = [self._features(batch) if self._features else batch for batch in batches]
            both = list(zip(seen, fixed, strict=True))
            found = [[self._read(draw, *one) for one in both] for draw in self._draws]
        scores = torch.stack([torch.cat([own for own, _ in parts]) for parts in found])
        odds = [own for parts in found for _, own in parts if own is not None]
        return scores.cpu(), torch.cat(odds).view(len(found), -1).mean(0).cpu() if odds else None

    def scores(self, images: ImageSet) -> Tensor:
        """Log-scores (S, n, C) alone."""
        return self.read(images)[0]

    def _read(self, draw: dict[str, Tensor], batch: Tensor, fixed: Read | None) -> Scored:
        """Of one draw: scores of the prototypes, or of class posteriors with a share of theirs.

        Of images, or of their features where every draw has the same.
        """
        if fixed is not None and not self._share:
            return fixed
        if self._features:
            features, linear = batch, linear_of(batch, draw["head.weight"], draw["head.bias"])
        else:
            features, linear = functional_call(self._network, draw, (batch,))
        if self._moving is not None:
            fixed = self._moving.read(features)
        return (linear, None) if fixed is None else (fixed[0] + self._share * linear, fixed[1])


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
