"""Plain networks: a backbone turns images into features, a linear classifier these into logits.

A backbone is built from the shape of the images.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise, product
from math import ceil
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedbnn.errors import ConfigError
from fedbnn.networks.random_conv import RandomConv

Shape = tuple[int, int, int]
Norm = Literal["batch", "group"]


def _norm(kind: Norm, channels: int) -> nn.Module:
    """Batch norm, or group norm with 8 channels a group."""
    groups = max(1, channels // 8)
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(groups, channels)


class _Halves(torch.autograd.Function):
    """y = max of the four corners of every 2x2 window: whole rows are compared at once.

    The gradient goes to the first of the corners that are largest, as that of torch does.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor) -> Tensor:
        """The largest of each window, columns first."""
        columns = torch.maximum(images[..., ::2], images[..., 1::2])
        return torch.maximum(columns[..., ::2, :], columns[..., 1::2, :])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Keep what tells which corner was largest."""
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Zero but at one corner of each window."""
        images, largest = ctx.saved_tensors
        first = images[..., ::2, ::2] == largest
        second = (images[..., ::2, 1::2] == largest) & ~first
        above = first | second
        third = (images[..., 1::2, ::2] == largest) & ~above
        whole = torch.empty_like(images)
        whole[..., ::2, ::2] = gradient * first
        whole[..., ::2, 1::2] = gradient * second
        whole[..., 1::2, ::2] = gradient * third
        whole[..., 1::2, 1::2] = gradient * ~(above | third)
        return whole


class MaxPool(nn.MaxPool2d):
    """Max pooling; on a CPU in whichever way is faster: the same numbers."""

    def forward(self, images: Tensor) -> Tensor:
        """The largest value of every window."""
        halves = (self.kernel_size, self.stride, self.padding) == (2, 2, 0)
        even = images.shape[-2] % 2 == images.shape[-1] % 2 == 0
        if halves and even and images.device.type == "cpu":
            found: Tensor = _Halves.apply(images)  # type: ignore[no-untyped-call]
            return found
        many = images.shape[-3] >= 32 or not torch.is_grad_enabled()
        if many and images.device.type == "cpu":
            images = images.movedim(-3, -1).contiguous().movedim(-1, -3)
        pooled: Tensor = super().forward(images)
        return pooled.contiguous()


class _Window(torch.autograd.Function):
    """y = W[:, :, p : p + h, p : p + w] x: a convolution whose one window holds the whole map.

    Taps are copied one by one, each for all channels in one go: windows as small as 2x2 would be
    copied line by line, in six times the time.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, weight: Tensor, begin: int) -> tuple[Tensor, Tensor]:
        """The map of 1x1, and the taps that met the images."""
        taps = [weight[..., *tap] for tap in _taps(images, begin)]
        met = torch.stack(taps, -1).flatten(1) if len(taps) > 1 else taps[0]
        return nn.functional.linear(images.flatten(1), met)[..., None, None], met

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep what the gradients are made of."""
        images, weight, ctx.begin = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(images, output[1])
        ctx.shape = weight.shape

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, Tensor, None]:
        """That of the images, and of the taps; those beyond the map have none."""
        images, met = ctx.saved_tensors
        above = gradient.flatten(1)
        taps = (above.T @ images.flatten(1)).view(*ctx.shape[:2], -1)
        whole = taps.new_zeros(ctx.shape)
        for place, tap in enumerate(_taps(images, ctx.begin)):
            whole[..., *tap] = taps[..., place]
        return (above @ met).view_as(images), whole, None


def _taps(images: Tensor, begin: int) -> list[tuple[int, int]]:
    """Row and column of the taps that meet the map, where its window begins `begin` before it."""
    height, breadth = images.shape[-2:]
    return [(begin + row, begin + column) for row, column in product(range(height), range(breadth))]


class Convolution(nn.Conv2d):
    """A convolution without bias; where one window holds the whole map, a matrix product.

    On maps of 1x1 and 2x2, where deep layers on small images end, most taps of a 3x3 kernel meet
    padding alone: they are left out, and have the gradient 0, as before. Under autocast both are
    of its type, as they are for other convolutions.
    """

    def __init__(self, inner: int, outer: int, kernel: int, stride: int, padding: int) -> None:
        super().__init__(inner, outer, kernel, stride, padding, bias=False)
        self.margin = padding
        self.most = min(kernel - padding, kernel + stride - 2 * padding - 1)  # one window's map

    def forward(self, images: Tensor) -> Tensor:
        """The map of a batch."""
        if max(images.shape[-2:]) > self.most:
            return super().forward(images)
        weight, kind = self.weight, images.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            images, weight = (one.to(torch.get_autocast_dtype(kind)) for one in (images, weight))
        found: Tensor
        found, _ = _Window.apply(images, weight, self.margin)  # type: ignore[no-untyped-call]
        return found


class Backbone(nn.Module):
    """Parts that one after the other turn images into `width` features."""

    width: int

    def forward(self, images: Tensor) -> Tensor:
        """Features of a batch."""
        for part in self.children():
            images = part(images)
        return images


class MLP(Backbone):
    """Flattened pixels through fully connected ReLU layers."""

    def __init__(self, image_shape: Shape, hidden: tuple[int, ...] = (100, 100)) -> None:
        super().__init__()
        sizes = (torch.Size(image_shape).numel(), *hidden)
        layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
        self.layers = nn.Sequential(nn.Flatten(), *layers)
        self.width = sizes[-1]


class LeNet(Backbone):
    """Two 5x5 convolutions (6 and 16 channels) with 2x2 pooling, then one fully connected layer."""

    def __init__(self, image_shape: Shape, width: int = 200) -> None:
        super().__init__()
        channels, height, breadth = image_shape
        rest = [((side - 4) // 2 - 4) // 2 for side in (height, breadth)]
        if min(rest) < 1:
            what = f"lenet needs images of at least 16x16, not {height}x{breadth}"
            raise ConfigError(what, "network.name", "use mlp")
        first = nn.Conv2d(channels, 6, 5), nn.ReLU(), MaxPool(2)
        second = nn.Conv2d(6, 16, 5), nn.ReLU(), MaxPool(2)
        last = nn.Flatten(), nn.Linear(16 * rest[0] * rest[1], width), nn.ReLU()
        self.layers, self.width = nn.Sequential(*first, *second, *last), width


class _Residual(nn.Module):
    """out = conv-norm(ReLU(conv-norm(x))) + shortcut(x), convolved where the shape changes."""

    def __init__(
        self, inner: int, outer: int, stride: int, norm: Norm, kernel: int, last_relu: bool
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(
            Convolution(inner, outer, 3, stride, 1),
            _norm(norm, outer),
            nn.ReLU(),
            Convolution(outer, outer, 3, 1, 1),
            _norm(norm, outer),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inner != outer:
            convolution = Convolution(inner, outer, kernel, stride, kernel // 2)
            self.shortcut = nn.Sequential(convolution, _norm(norm, outer))
        self.last: nn.Module = nn.ReLU() if last_relu else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The sum of body and shortcut."""
        out: Tensor = self.last(self.body(x) + self.shortcut(x))
        return out


def _stages(blocks: int, norm: Norm, shortcut_kernel: int, last_relu: bool) -> nn.Sequential:
    """Four stages of 64, 128, 256, 512 channels with strides 1, 2, 2, 2."""
    layers, look = [], (norm, shortcut_kernel, last_relu)
    for inner, outer, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        layers.append(_Residual(inner, outer, stride, *look))
        layers += [_Residual(outer, outer, 1, *look) for _ in range(blocks - 1)]
    return nn.Sequential(*layers)


class PaperResNet(Backbone):
    """The paper's table: 7x7 stem of stride 4, a residual layer a stage, 3x3 shortcuts, fc 1000.

    Side of the last map: (side + 2 - 7) // 4 + 1 after the stem, three times halved upwards.
    """

    def __init__(self, image_shape: Shape, blocks_per_stage: int = 1, norm: Norm = "batch") -> None:
        super().__init__()
        stem = nn.Conv2d(image_shape[0], 64, 7, 4, 1, bias=False)
        self.stem = nn.Sequential(stem, _norm(norm, 64), nn.ReLU(), MaxPool(3, 1, 1))
        self.stages = _stages(blocks_per_stage, norm, shortcut_kernel=3, last_relu=False)
        sides = [ceil(((side - 5) // 4 + 1) / 8) for side in image_shape[1:]]
        if min(sides) < 1:
            what = "paper_resnet needs images of at least 5x5"
            raise ConfigError(what, "network.name", "use mlp")
        self.width = 1000
        last = nn.Linear(512 * sides[0] * sides[1], self.width)
        self.fc1 = nn.Sequential(nn.Flatten(), last, nn.ReLU())


class CifarResNet18(Backbone):
    """ResNet-18 as in the class-incremental literature: 3x3 stem, global average pooling."""

    def __init__(self, image_shape: Shape, norm: Norm = "batch") -> None:
        super().__init__()
        stem = nn.Conv2d(image_shape[0], 64, 3, 1, 1, bias=False)
        self.stem = nn.Sequential(stem, _norm(norm, 64), nn.ReLU())
        self.stages = _stages(2, norm, shortcut_kernel=1, last_relu=True)
        self.width = 512

    def forward(self, images: Tensor) -> Tensor:
        """Features of a batch."""
        return super().forward(images).mean((-2, -1))


class FixedFeatures(Backbone):
    """Random convolutions, with nothing to train but the prototypes on top of them.

    Features are counted from their usual value u, in halves of it: 2 (f - u) / u, which needs no
    data and leaves them near 0 with a spread near 1.
    """

    def __init__(
        self, image_shape: Shape, filters: int = 300, mirror: bool = True, seed: int = 0
    ) -> None:
        super().__init__()
        self.features = RandomConv(filters, mirror, seed)
        self.width = self.features.width

    def forward(self, images: Tensor) -> Tensor:
        """Features of a batch; no gradient reaches them."""
        with torch.no_grad():
            return (self.features(images) * (2 / self.features.usual)).sub_(2)


NETWORKS: Mapping[str, Callable[..., Backbone]] = {
    "mlp": MLP,
    "lenet": LeNet,
    "paper_resnet": PaperResNet,
    "cifar_resnet18": CifarResNet18,
    "random_conv": FixedFeatures,
}


class Classifier(nn.Module):
    """A backbone and one linear row per class; returns logits, on top of a `prior_mean` if any."""

    def __init__(self, backbone: nn.Module, classes: int) -> None:
        super().__init__()
        self.prior_mean: Callable[[Tensor, Tensor], Tensor] | None = None
        self.backbone = backbone
        self.head = nn.Linear(int(backbone.width), classes)  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch, one column per row of the head."""
        return self.outputs(images)[1]

    def outputs(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features and logits of a batch."""
        features = self.backbone(images)
        return features, self.logits(images, features)

    def logits(self, images: Tensor, features: Tensor) -> Tensor:
        """Logits of a batch whose features are known."""
        own: Tensor = self.head(features)
        return own if self.prior_mean is None else own + self.prior_mean(images, features)
