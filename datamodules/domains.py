"""Shifted inputs for domain-incremental streams: in a domain an image always looks the same."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode, functional

from datamodules.scenarios import Integers, require
from fedbnn.errors import ConfigError, did_you_mean
from fedbnn.seeds import generator

Change = Callable[[Tensor, Integers, float], Tensor]
_NOISES = 251


def shifted(domain: str, pixels: Tensor, positions: Integers) -> Tensor:
    """The uint8 images as they look in `domain`; `positions` name them, and noise is by name."""
    name, strength = parse(domain)
    changed = CHANGES[name](pixels.float(), positions, strength)
    return changed.round().clamp(0, 255).to(torch.uint8)


def domain_names(incremental: str, domains: Sequence[str] | None, sources: int) -> tuple[str, ...]:
    """The domains of a stream, each a known shift of its one source."""
    names, both = tuple(domains or ()), "give both or neither"
    paired = bool(names) == (incremental == "domain")
    require(paired, "domains", "domains belong to incremental: domain", both)
    require(not names or sources == 1, "sources", "domains shift one source", "keep one source")
    once = len(set(names)) == len(names)
    require(once, "domains", "a domain is named twice", "name each domain once")
    for name in names:
        parse(name)
    return names


def parse(domain: str) -> tuple[str, float]:
    """`rotation:45` -> ("rotation", 45.0); `clean` needs no strength."""
    name, _, strength = domain.partition(":")
    known = name in CHANGES
    require(known, "domains", f"unknown domain {domain!r}", did_you_mean(name, CHANGES))
    try:
        value = 0.0 if name == "clean" and not strength else float(strength)
    except ValueError:
        what, fix = f"domain {domain!r} has no strength", f"write {name}:NUMBER"
        raise ConfigError(what, "stream.domains", fix) from None
    possible = math.isfinite(value) and (value >= 0 or name == "rotation")
    what, fix = f"domain {domain!r} has no possible strength", "use a number of at least 0"
    require(possible, "domains", what, fix)
    return name, value


def clean(pixels: Tensor, _positions: Integers, _strength: float) -> Tensor:
    """The images as they are."""
    return pixels


def rotation(pixels: Tensor, _positions: Integers, degrees: float) -> Tensor:
    """Turned counter-clockwise about the centre, bilinear, black where nothing was."""
    return functional.rotate(pixels, degrees, InterpolationMode.BILINEAR)


def noise(pixels: Tensor, positions: Integers, deviation: float) -> Tensor:
    """x + 255 deviation e, e ~ N(0, 1); image i always meets noise number i mod 251."""
    bank = torch.randn(_NOISES, *pixels.shape[1:], generator=generator(0, "noise"))
    return pixels + 255 * deviation * bank[torch.from_numpy(positions % _NOISES)]


def blur(pixels: Tensor, _positions: Integers, sigma: float) -> Tensor:
    """Convolved with a Gaussian of `sigma` pixels that reaches 3 sigma, mirrored at the border."""
    reach = min(max(1, math.ceil(3 * sigma)), min(pixels.shape[-2:]) - 1)
    return functional.gaussian_blur(pixels, [2 * reach + 1] * 2, [sigma] * 2) if sigma else pixels


def contrast(pixels: Tensor, _positions: Integers, factor: float) -> Tensor:
    """m + factor (x - m), m the mean of the image: 0 is flat grey, 1 changes nothing."""
    mean = pixels.mean((1, 2, 3), keepdim=True)
    return mean + factor * (pixels - mean)


def brightness(pixels: Tensor, _positions: Integers, factor: float) -> Tensor:
    """factor x."""
    return factor * pixels


CHANGES: Mapping[str, Change] = {
    change.__name__: change for change in (clean, rotation, noise, blur, contrast, brightness)
}
