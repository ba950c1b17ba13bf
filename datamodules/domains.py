"""Shifted inputs for domain-incremental streams: the same image always looks the same in the same domain."""

import difflib
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from datamodules.scenarios import Integers
from fedbnn.errors import ConfigError
from fedbnn.seeds import generator

Change = Callable[[Tensor, Integers, float], Tensor]
_NOISES = 251


def shifted(domain: str, pixels: Tensor, positions: Integers) -> Tensor:
    """The uint8 images as they look in `domain`; `positions` name them, so that noise belongs to the image."""
    name, strength = parse(domain)
    changed = CHANGES[name](pixels.float(), positions, strength)
    return changed.round().clamp(0, 255).to(torch.uint8)


def parse(domain: str) -> tuple[str, float]:
    """`rotation:45` -> ("rotation", 45.0); `clean` needs no strength."""
    name, _, strength = domain.partition(":")
    if name not in CHANGES:
        close = difflib.get_close_matches(name, CHANGES, n=1)
        guess = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(CHANGES)}"
        raise ConfigError(f"unknown domain {domain!r}", "stream.domains", guess)
    try:
        value = 0.0 if name == "clean" and not strength else float(strength)
    except ValueError:
        raise ConfigError(
            f"domain {domain!r} has no strength", "stream.domains", f"write {name}:NUMBER"
        ) from None
    if not math.isfinite(value) or (value < 0 and name != "rotation"):
        raise ConfigError(
            f"domain {domain!r} has no possible strength",
            "stream.domains",
            "use a number of at least 0",
        )
    return name, value


def clean(pixels: Tensor, _positions: Integers, _strength: float) -> Tensor:
    """The images as they are."""
    return pixels


def rotation(pixels: Tensor, _positions: Integers, degrees: float) -> Tensor:
    """Turned counter-clockwise about the centre, bilinear, black where nothing was."""
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    ratio = pixels.shape[-1] / pixels.shape[-2]
    turn = torch.tensor([[cosine, -sine / ratio, 0.0], [sine * ratio, cosine, 0.0]]).expand(
        len(pixels), 2, 3
    )
    grid = functional.affine_grid(turn, list(pixels.shape), align_corners=False)
    return functional.grid_sample(pixels, grid, align_corners=False)


def noise(pixels: Tensor, positions: Integers, deviation: float) -> Tensor:
    """x + 255 deviation e, e ~ N(0, 1); image i always meets noise number i mod 251."""
    bank = torch.randn(_NOISES, *pixels.shape[1:], generator=generator(0, "noise"))
    return pixels + 255 * deviation * bank[torch.from_numpy(positions % _NOISES)]


def blur(pixels: Tensor, _positions: Integers, sigma: float) -> Tensor:
    """Convolved with a Gaussian of `sigma` pixels, borders repeated: rows first, then columns."""
    if sigma == 0:
        return pixels
    reach = max(1, math.ceil(3 * sigma))
    weights = torch.exp(-(torch.arange(-reach, reach + 1.0) ** 2) / (2 * sigma**2))
    kernel = (weights / weights.sum()).view(1, 1, 1, -1)
    flat = pixels.reshape(-1, 1, *pixels.shape[-2:])
    for axis in (kernel, kernel.transpose(-1, -2)):
        tall, wide = axis.shape[-2] // 2, axis.shape[-1] // 2
        flat = functional.conv2d(
            functional.pad(flat, (wide, wide, tall, tall), mode="replicate"), axis
        )
    return flat.view_as(pixels)


def contrast(pixels: Tensor, _positions: Integers, factor: float) -> Tensor:
    """m + factor (x - m), m the mean of the image: 0 is flat grey, 1 changes nothing."""
    mean = pixels.mean((1, 2, 3), keepdim=True)
    return mean + factor * (pixels - mean)


def brightness(pixels: Tensor, _positions: Integers, factor: float) -> Tensor:
    """factor x."""
    return factor * pixels


CHANGES: Mapping[str, Change] = {
    "clean": clean,
    "rotation": rotation,
    "noise": noise,
    "blur": blur,
    "contrast": contrast,
    "brightness": brightness,
}
