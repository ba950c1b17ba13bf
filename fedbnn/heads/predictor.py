"""From a state to scores: S draws of the weights, each made once and used for every image.

p(y | x) = 1/S sum_s softmax(f(x; w_s)),   w_s ~ q(w);   for point weights S = 1 and w_1 = theta

where f is the score of the rows, or of the class posteriors (`fedbnn.heads.discriminant`) and perhaps of the rows beside them.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedbnn.bayes.flatten import Layout
from fedbnn.heads import library
from fedbnn.heads.discriminant import PLAIN, Discriminant, Reading
from fedbnn.heads.places import Places
from fedbnn.images import ImageSet
from fedbnn.networks import Classifier
from fedbnn.seeds import generator
from fedbnn.state import State

BATCH = 500


class Predictor:
    """A state made ready to score images; `classes` are those with a trained row, in the order of the columns."""

    def __init__(
        self,
        backbone: nn.Module,
        layout: Layout,
        state: State,
        samples: int = 8,
        seed: int = 0,
        reading: Reading = PLAIN,
    ) -> None:
        self.classes = library.trained(state)
        self._rows = state.index(self.classes)
        self._network = Classifier(backbone, len(self.classes)).eval()
        layout.write(backbone, state["backbone"], state["buffers"])
        self._layout, self._state, self._reading = layout, state, reading
        self._discriminant = self._places() if "places.count" in state else None
        self._draws = self._drawn(samples, seed) if state.bayesian and samples else [self._means()]

    def _means(self) -> dict[str, Tensor]:
        """The weights at their means."""
        return self._by_name(self._state["backbone"], self._state["rows"][self._rows])

    def _drawn(self, samples: int, seed: int) -> list[dict[str, Tensor]]:
        """w_s = m + s * noise, with the same noise for the same seed."""
        source = generator(seed, "prediction")
        state, latent = self._state, len(self._state["backbone.scale"])
        rows, scales = state["rows"][self._rows], state["rows.scale"][self._rows]
        draws = []
        for _ in range(samples):
            backbone = state["backbone"].clone()
            backbone[:latent] += state["backbone.scale"] * torch.randn(latent, generator=source)
            draws.append(
                self._by_name(backbone, rows + scales * torch.randn(rows.shape, generator=source))
            )
        return draws

    def _by_name(self, backbone: Tensor, rows: Tensor) -> dict[str, Tensor]:
        named = {f"backbone.{name}": value for name, value in self._layout.views(backbone).items()}
        return {
            **named,
            "head.weight": rows[:, :-1].contiguous(),
            "head.bias": rows[:, -1].contiguous(),
        }

    def scores(self, images: ImageSet) -> Tensor:
        """Log-scores (S, n, C); softmax over any subset of the columns gives that draw's probabilities."""
        with torch.inference_mode():
            batches = [batch for batch, _ in images.loader(BATCH, shuffle=False)]
            return torch.stack(
                [
                    torch.cat([self._logits(draw, batch) for batch in batches])
                    for draw in self._draws
                ]
            )

    def _logits(self, draw: dict[str, Tensor], batch: Tensor) -> Tensor:
        """Scores of one draw: from the class posteriors where there are any (`Reading`), else from the rows."""
        if self._discriminant is None:
            logits: Tensor = functional_call(self._network, draw, (batch,))
            return logits
        backbone = {
            name.removeprefix("backbone."): value
            for name, value in draw.items()
            if name.startswith("backbone.")
        }
        features: Tensor = functional_call(self._network.backbone, backbone, (batch,))
        scores = self._discriminant.scores(features)
        if not self._reading.rows:
            return scores
        return scores + self._reading.rows * nn.functional.linear(
            features, draw["head.weight"], draw["head.bias"]
        )

    def _places(self) -> Discriminant:
        """The class posteriors of the trained rows."""
        return Discriminant.of(
            Places.of(self._state, self._state["rows"].shape[1] - 1), self._rows, self._reading
        )
