"""Picture files as the uint8 tensors a model was trained on: its channels, its size."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedbnn.errors import DataError

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


def find(places: Iterable[str | Path]) -> list[Path]:
    """Every picture named, and every picture below a folder named, in order."""
    found: list[Path] = []
    for place in map(Path, places):
        if not place.exists():
            raise DataError("there is no such picture or folder", str(place), "check the path")
        inside = (
            sorted(path for path in place.rglob("*") if path.suffix.lower() in ENDINGS)
            if place.is_dir()
            else [place]
        )
        found += inside
    if not found:
        raise DataError(
            "no picture found", ", ".join(map(str, places)), f"pictures end in {', '.join(ENDINGS)}"
        )
    return found


def read(paths: Sequence[Path], shape: tuple[int, int, int]) -> Tensor:
    """The pictures as one tensor (n, channels, height, width)."""
    return torch.stack([_read_one(path, shape) for path in paths])


def _read_one(path: Path, shape: tuple[int, int, int]) -> Tensor:
    channels, height, width = shape
    try:
        with Image.open(path) as file:
            picture = file.convert("L" if channels == 1 else "RGB").resize(
                (width, height), Image.Resampling.BILINEAR
            )
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, ValueError) as error:
        raise DataError(
            "not a picture that can be read", str(path), "remove it or convert it to PNG"
        ) from error
    pixels = np.asarray(picture).reshape(height, width, channels)
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())
