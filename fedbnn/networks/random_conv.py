"""Features that never move: random convolutions, drawn from a seed (`features: random_conv`).

Nothing is learnt and nothing is sent: everybody draws the same filters. A filter is a Gabor wave of
random place, width, direction, length and phase, grey or of a random colour; it sees patches of one
contrast, and a feature is the root of how strongly it answers, on average, in one of nine fields:

    z_j(p) = w_j . (p - mean p) / sqrt(var p + 0.002)        of every patch p of 6 x 6 pixels
    f_ji   = sqrt(mean over field i of max(0, z_j - 1/2))    plus that of the mirrored image

Filters are scaled to answer with variance 1 where neighbouring pixels are as alike as in pictures
of nature: Cov(p_a, p_b) = exp(-|a - b| / 4), times 0.9 between colours.

There may be `projections` beside them, which tell more apart than lines between features can: with
u, the usual value of a feature, and d features,

    g = max(0, W (f - u)),      W_ij ~ N(0, 1/d)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from fedbnn.seeds import generator

SIZE, FIELDS, THRESHOLD, NOISE = 6, 3, 0.5, 0.002
COLOURED, COLOURS_ALIKE, REACH = 0.6, 0.9, 4.0
WIDEST, PLACES = 48, 16
BATCH = 20
"""Images whose responses fit into the cache of a processor."""


@dataclass(frozen=True)
class RandomConv:
    """Maps images (n, channels, height, width), as networks see them, to 9 features a filter.

    Larger images are averaged to at most 48 pixels a side, and filters look at some 16 places a
    side: 0.3 ms an image of 32 x 32 with 300 filters.
    """

    filters: int
    mirror: bool
    seed: int
    projections: int = 0

    @property
    def heard(self) -> int:
        """Number of features that filters give."""
        return self.filters * FIELDS**2

    @property
    def width(self) -> int:
        """Number of features, projections included."""
        return self.heard + self.projections

    @property
    def usual(self) -> float:
        """A feature where z ~ N(0, 1): sqrt E max(0, z - t) = sqrt(p(t) - t P(z > t)), t = 1/2."""
        density = math.exp(-(THRESHOLD**2) / 2) / math.sqrt(2 * math.pi)
        above = math.erfc(THRESHOLD / math.sqrt(2)) / 2
        return (1 + self.mirror) * math.sqrt(density - THRESHOLD * above)

    def __call__(self, images: Tensor) -> Tensor:
        """Features of a batch."""
        few = BATCH if images.device.type == "cpu" else len(images)
        features = torch.cat([self._features(some) for some in images.split(few)])
        if not self.projections:
            return features
        weights = _projection(self.heard, self.projections, self.seed, images.device, images.dtype)
        return torch.cat([features, ((features - self.usual) @ weights).relu_()], 1)

    def _features(self, images: Tensor) -> Tensor:
        """Of few images: those as they are, and in the mirror."""
        seen = functional.avg_pool2d(images, math.ceil(min(images.shape[2:]) / WIDEST))
        views = (seen, seen.flip(-1)) if self.mirror else (seen,)
        return torch.stack([self._responses(view) for view in views]).sum(0)

    def _responses(self, images: Tensor) -> Tensor:
        """The root of the mean response in each field."""
        channels, side = images.shape[1], min(images.shape[2:])
        size, stride = min(SIZE, side // 2), max(1, side // PLACES)
        bank = _bank(self.filters, channels, size, self.seed, images.device, images.dtype)
        images = images.contiguous(memory_format=torch.channels_last)
        answers = functional.conv2d(images, bank, stride=stride)
        heard = answers.mul_(_contrast(images, size, stride)).sub_(THRESHOLD).relu_()
        return functional.adaptive_avg_pool2d(heard, FIELDS).sqrt().flatten(1)


@lru_cache(4)
def _projection(
    width: int, count: int, seed: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """W^T (width, count)."""
    drawn = torch.randn(width, count, generator=generator(seed, "projections")) / math.sqrt(width)
    return drawn.to(device, dtype)


def _contrast(images: Tensor, size: int, stride: int) -> Tensor:
    """1 / sqrt(var p + noise) of every patch p."""
    mean, square = (
        functional.avg_pool2d(power.mean(1, keepdim=True), size, stride)
        for power in (images, images.square())
    )
    return (square - mean.square()).clamp_min_(0).add_(NOISE).rsqrt_()


@lru_cache(8)
def _bank(
    count: int, channels: int, size: int, seed: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """The filters where images are, taken there once."""
    return gabor_filters(count, channels, size, seed).to(device, dtype)


@lru_cache(8)
def gabor_filters(count: int, channels: int, size: int, seed: int) -> Tensor:
    """The filters (count, channels, size, size): mean 0, and variance 1 on pictures of nature."""
    source = generator(seed, "filters")
    waves = _waves(torch.rand(6, count, 1, 1, generator=source, dtype=torch.float64), size)
    colours = torch.randn(count, channels, generator=source, dtype=torch.float64)
    colours[torch.rand(count, generator=source) > COLOURED] = 1
    bank = (colours[:, :, None, None] * waves[:, None]).flatten(1)
    bank = bank - bank.mean(1, keepdim=True)
    scale = ((bank @ _covariance(channels, size)) * bank).sum(1, keepdim=True).rsqrt()
    shape = (count, channels, size, size)
    return (bank * scale).view(shape).float().contiguous(memory_format=torch.channels_last)


def _waves(drawn: Tensor, size: int) -> Tensor:
    """exp(-(u^2 + v^2 / 2) / (2 s^2)) cos(2 pi r u + phase), (u, v) turned about a place."""
    turn, frequency, phase, scale, *place = drawn
    down, right = _grid(size)
    x, y = (at - (2 * moved - 1) * size / 4 for at, moved in zip((right, down), place, strict=True))
    angle, rate, spread = math.pi * turn, 0.08 + 0.3 * frequency, 1 + 1.5 * scale
    u, v = x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()
    envelope = torch.exp(-(u.square() + v.square() / 2) / (2 * spread.square()))
    return envelope * torch.cos(2 * math.pi * (rate * u + phase))


def _covariance(channels: int, size: int) -> Tensor:
    """Of the pixels of a patch, channel by channel."""
    places = torch.stack([axis.flatten() for axis in _grid(size)], 1)
    near = torch.exp(-torch.cdist(places, places) / REACH)
    alike = torch.full((channels, channels), COLOURS_ALIKE, dtype=torch.float64).fill_diagonal_(1)
    return torch.kron(alike, near)


def _grid(size: int) -> Iterator[Tensor]:
    """Rows and columns of the pixels of a patch, from its middle."""
    line = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    return iter(torch.meshgrid(line, line, indexing="ij"))
