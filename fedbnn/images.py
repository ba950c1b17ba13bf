"""Images as one uint8 tensor: picture files are decoded in one way, and batches made in one way.

Training and `fedbnn predict` read a file through `decode`; training, evaluation and statistics read
a set through `ImageSet.loader`, which gathers, augments and normalises whole batches as tensors.
"""

import mmap
import os
import re
import stat
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import TILELENGTH, TILEWIDTH, TiffImageFile
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fedbnn.errors import DataError

Array = NDArray[np.uint8]
Batch = tuple[Tensor, Tensor]
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
MOST_PIXELS, MOST_SCANS = 2**26, 100
_MARKER = re.compile(rb"\xff+([^\x00\x01\xd0-\xd7\xff])")
_BEGIN, _SCAN, _END = b"\xd8", b"\xda", b"\xd9"
# What Pillow warns of is refused here in one line, or can be read.
warnings.filterwarnings("ignore", module=r"PIL\.")


def decode(path: Path, channels: int, size: tuple[int, int] | None = None) -> Array:
    """A picture file as (channels, height, width), one channel or three; cut and resized to `size`.

    Nothing but a regular file in one of `FORMATS` is opened, and what it costs is counted before
    any of it is decoded. Grey levels of 16 bits are scaled to 8.
    """
    try:
        with (
            open(path, "rb", opener=_regular) as file,
            Image.open(file, formats=FORMATS) as picture,
        ):
            _check_costs(picture, file)
            return fitted(_eight_bits(picture).convert("L" if channels == 1 else "RGB"), size)
    except Exception as error:  # the border to files of strangers: decoders raise anything
        what = f"picture cannot be read: {str(error) or type(error).__name__}"
        raise DataError(what, str(path), "replace or remove it, or convert it to PNG") from error


def _regular(path: str, flags: int) -> int:
    """For `open`: no pipe or device, which nobody waits for."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise ValueError("it is not a regular file")


def _check_costs(picture: Image.Image, file: BinaryIO) -> None:
    """Raise for more pixels than are decoded, or for the same ones too often.

    A TIFF of few pixels may be cut from one tile of many; a JPEG may go over its pixels in as many
    scans as it likes, of a few bytes each. libtiff has the same limit for those in a TIFF.
    """
    sizes = [picture.size]
    if isinstance(picture, TiffImageFile):
        sizes.append(tuple(picture.tag_v2.get(side, 0) for side in (TILEWIDTH, TILELENGTH)))
    if any(width * height > MOST_PIXELS for width, height in sizes):
        raise ValueError(f"it has more than {MOST_PIXELS:,} pixels")
    if isinstance(picture, JpegImageFile):
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if _scans(content) > MOST_SCANS:
                raise ValueError(f"it has more than {MOST_SCANS} scans")


def _scans(content: mmap.mmap) -> int:
    """How often a JPEG goes over its pixels, up to one more than it may."""
    place = scans = 0
    while scans <= MOST_SCANS and (found := _MARKER.search(content, place)) and found[1] != _END:
        scans, place = scans + (found[1] == _SCAN), found.end()
        if found[1] != _BEGIN:
            place += int.from_bytes(content[place : place + 2])
    return scans


def fitted(picture: Image.Image, size: tuple[int, int] | None) -> Array:
    """(channels, height, width); with a `size` cropped about its centre to that shape, resized."""
    if size:
        picture = ImageOps.fit(picture, size[::-1], Image.Resampling.BILINEAR)
    array = np.asarray(picture, np.uint8)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def _eight_bits(picture: Image.Image) -> Image.Image:
    """The picture in a mode that converts to grey or colour as one sees it."""
    if picture.mode == "P":
        return picture.convert("RGBA")
    if picture.mode != "F" and not picture.mode.startswith("I"):
        return picture
    levels = np.asarray(picture)  # 16 bits: v becomes v / 257
    if picture.mode == "F" or levels.min() < 0 or levels.max() > 65535:
        raise ValueError("its pixels have more than 16 bits")
    return Image.fromarray((levels / 257).round().astype(np.uint8))


def as_picture(image: Any) -> Image.Image:
    """One image as Pillow holds it: a picture, or an array or tensor with one channel or three.

    Behind height and width there may be a fourth channel, the opacity, which does not count.
    """
    if isinstance(image, Image.Image):
        return _eight_bits(image)
    if isinstance(image, str | Path):
        raise DataError(f"{str(image)!r} is a name and no image", fix="open it: PIL.Image.open")
    array = np.asarray(_on_cpu(image) if isinstance(image, Tensor) else image)
    if array.ndim == 3 and array.shape[0] in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if 0 in array.shape or not (array.ndim == 2 or array.shape[2:] in ((3,), (4,))):
        fix = "it is (height, width), with one or three channels before or behind"
        raise DataError(f"an image has the shape {tuple(array.shape)}", fix=fix)
    if array.dtype.kind == "f":
        if not (array.min() >= 0 and array.max() <= 1):
            raise DataError("an image has pixels outside of 0..1", fix="floats go from 0 to 1")
        array = (array * 255).round().astype(np.uint8)
    if array.dtype != np.uint8:
        raise DataError(f"an image is of {array.dtype}", fix="give uint8, or floats from 0 to 1")
    return Image.fromarray(np.ascontiguousarray(array))


def _on_cpu(image: Tensor) -> Tensor:
    """Where NumPy can read it, and in a type it knows."""
    here = image.detach().cpu()
    return here.float() if here.is_floating_point() else here


def _is_one(images: Any, shape: tuple[int, int, int]) -> bool:
    """Whether these are one image; of three dimensions what the model sees decides.

    (3, h, w) is a picture to a model of colours, and three pictures to one of grey levels; a stack
    of its own height and width is many.
    """
    if isinstance(images, Image.Image | str | Path):
        return True
    dims: tuple[int, ...] = tuple(getattr(images, "shape", ()))
    if len(dims) != 3:
        return len(dims) == 2
    return dims[0] in (1, shape[0]) or (dims[1:] != shape[1:] and dims[2] in (1, 3, 4))


def stacked(images: Any, shape: tuple[int, int, int]) -> Tensor:
    """One image or many as uint8 (n, channels, height, width), cut and resized as a file is."""
    mode, size = "L" if shape[0] == 1 else "RGB", shape[1:]
    try:
        each = [images] if _is_one(images, shape) else list(images)
        pixels = [fitted(as_picture(image).convert(mode), size) for image in each]
        return torch.from_numpy(np.stack(pixels))
    except (TypeError, ValueError, OSError) as error:
        fix = "give a picture, an array or a tensor, or several"
        raise DataError(f"these are no images: {error}", fix=fix) from error


def find(places: Iterable[str | Path]) -> list[Path]:
    """Every picture named, and every picture below a folder named, in order."""
    found: list[Path] = []
    for place in map(Path, places):
        if not place.exists():
            raise DataError("there is no such picture or folder", str(place), "check the path")
        found += below(place) if place.is_dir() else [place]
    if not found:
        where, fix = ", ".join(map(str, places)), f"pictures end in {', '.join(ENDINGS)}"
        raise DataError("no picture found", where, fix)
    return found


def below(folder: Path) -> list[Path]:
    """The picture files in a folder and below, in the order of their names."""
    try:
        return sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS)
    except RecursionError as error:
        what, fix = "its folders are nested without end", "name the folder that has the pictures"
        raise DataError(what, str(folder), fix) from error


@dataclass(frozen=True)
class Preprocess:
    """How pixels become network input: channel mean and deviation, and augmentation in training."""

    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)
    flip: bool = False
    shift: int = 0

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8 in 0..255 -> (x / 255 - mean) / deviation."""
        factor, offset = (one.to(pixels.device) for one in self._line)
        return pixels.float().mul_(factor).sub_(offset)

    @cached_property
    def _line(self) -> tuple[Tensor, Tensor]:
        """Factor and offset of each channel."""
        mean, deviation = torch.tensor((self.mean, self.deviation)).view(2, 1, -1, 1, 1)
        return 1 / (255 * deviation), mean / deviation

    def views(self, pixels: Tensor) -> Tensor:
        """Views of each image: (mirrored, n, channels, top, left, height, width), not copied."""
        height, width = pixels.shape[2:]
        padded = torch.nn.functional.pad(pixels, (self.shift,) * 4)
        both = torch.stack([padded, padded.flip(-1)]) if self.flip else padded[None]
        return both.unfold(3, height, 1).unfold(4, width, 1)

    def draw(self, views: Tensor, chosen: Tensor) -> Tensor:
        """The chosen images, each mirrored with probability 1/2 and moved by up to `shift` pixels.

        One gather by NumPy copies whole lines of pixels, six times as fast as torch one by one.
        """
        counts, size = (views.shape[place] for place in (0, 3, 4)), (len(chosen),)
        mirrored, top, left = (torch.randint(0, count, size).numpy() for count in counts)
        return torch.from_numpy(views.numpy()[mirrored, chosen.numpy(), :, top, left])


@dataclass(frozen=True)
class ImageSet(Dataset[Batch]):
    """Images (n, channels, height, width) in uint8, and of each its place in `classes`."""

    pixels: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    preprocess: Preprocess = Preprocess()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        chosen = torch.tensor(indices)
        return self.preprocess.normalise(self.pixels[chosen]), self.labels[chosen]

    def loader(self, batch_size: int, shuffle: bool) -> DataLoader[Batch]:
        """A DataLoader that fetches whole batches at once.

        Shuffled it is for training: images are augmented, and a last batch of a single image is
        left out (each epoch another one), since batch norm cannot train on it; a set of one image
        is given as it is. In order it is for measuring: every image as it is, nothing random drawn.
        """
        if not shuffle:
            return DataLoader(self, batch_size, collate_fn=_as_is, generator=torch.Generator())
        shared = dist.is_available() and dist.is_initialized()  # Lightning gives each its part
        count = ceil(len(self) / (dist.get_world_size() if shared else 1))
        lonely, seen = count > batch_size > 1 and count % batch_size == 1, Augmented(self)
        return DataLoader(seen, batch_size, shuffle=True, drop_last=lonely, collate_fn=_as_is)

    def subset(self, indices: Tensor) -> "ImageSet":
        """Some of the images, by position."""
        pixels, labels = (part.index_select(0, indices) for part in (self.pixels, self.labels))
        return replace(self, pixels=pixels, labels=labels)

    def of(self, classes: tuple[str, ...]) -> "ImageSet":
        """The images of these classes alone; itself if that is all."""
        held = torch.tensor([name in classes for name in self.classes], dtype=torch.bool)
        there = held[self.labels]
        return self if bool(there.all()) else self.subset(there.nonzero()[:, 0])

    def among(self, classes: tuple[str, ...]) -> "ImageSet":
        """The same images, labels numbering `classes` (which hold every class that occurs)."""
        place = {name: row for row, name in enumerate(classes)}
        lookup = torch.tensor([place.get(name, -1) for name in self.classes], dtype=torch.long)
        return replace(self, labels=lookup[self.labels], classes=classes)

    def counts(self) -> dict[str, int]:
        """How many images of each class that occurs here."""
        numbers, counts = self.labels.unique(return_counts=True)
        found = zip(numbers.tolist(), counts.tolist(), strict=True)
        return {self.classes[number]: count for number, count in found}


class Augmented(Dataset[Batch]):
    """The images as training sees them: mirrored and moved at random, each time anew."""

    def __init__(self, images: ImageSet) -> None:
        self.images, self.views = images, images.preprocess.views(images.pixels)

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        chosen, look = torch.tensor(indices), self.images.preprocess
        return look.normalise(look.draw(self.views, chosen)), self.images.labels[chosen]


def joined(sets: Sequence[ImageSet]) -> ImageSet:
    """Sets with the same classes as one, one after the other."""
    pixels, labels = ([getattr(one, part) for one in sets] for part in ("pixels", "labels"))
    return replace(sets[0], pixels=torch.cat(pixels), labels=torch.cat(labels))


def _as_is(batch: Any) -> Any:
    """The batch is whole already; there is nothing to collate."""
    return batch
