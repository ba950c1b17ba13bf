"""Images: one decoder for training and prediction, one batcher for training and measuring."""

import contextlib
import os
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from datamodules.sources import DatasetRegistry
from fedbnn import images
from fedbnn.errors import DataError
from fedbnn.images import ImageSet, Preprocess, decode, joined


def striped(width: int, height: int) -> Image.Image:
    """Black at both ends, white in the middle third: cropped it is white, stretched it is not."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, width // 3 : 2 * width // 3] = 255
    return Image.fromarray(pixels)


def test_training_and_prediction_see_the_same_pixels(tmp_path: Path) -> None:
    """A picture that is not square is cropped about its centre on both ways."""
    for split in ("train", "test"):
        folder = tmp_path / "birds" / split / "owl"
        folder.mkdir(parents=True)
        striped(60, 20).save(folder / "1.png")
    trained = DatasetRegistry(tmp_path, None, 8).open("folder:birds").train_pixels[0]
    predicted = decode(tmp_path / "birds" / "test" / "owl" / "1.png", 3, (8, 8))
    assert torch.equal(trained, torch.from_numpy(predicted.copy()))
    assert predicted.min() > 200


def test_a_picture_of_the_right_shape_is_left_as_it_is(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    for size in (None, (5, 7)):
        assert np.array_equal(decode(tmp_path / "x.png", 3, size), pixels.transpose(2, 0, 1))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_every_kind_of_picture_becomes_grey_or_colour(
    mode: str, channels: int, tmp_path: Path
) -> None:
    path = tmp_path / "picture.tiff"
    grey = Image.new("L", (6, 4), 255)
    scaled = Image.fromarray(np.full((4, 6), 65535, np.uint16))
    (scaled if mode == "I;16" else grey.convert(mode)).save(path)
    found = decode(path, channels, (4, 4))
    assert found.shape == (channels, 4, 4)
    assert found.dtype == np.uint8
    assert found.min() > 250


def test_a_transparent_palette_is_read_without_a_warning(tmp_path: Path) -> None:
    picture = Image.new("P", (4, 4), 1)
    picture.putpalette([0, 0, 0, 10, 20, 30])
    picture.save(tmp_path / "x.png", transparency=bytes([0, 128]))
    assert decode(tmp_path / "x.png", 3)[:, 0, 0].tolist() == [10, 20, 30]


def test_sixteen_bits_are_scaled_and_not_saturated(tmp_path: Path) -> None:
    levels = np.array([[0, 257, 12850], [32768, 65278, 65535]], np.uint16)
    for name in ("x.png", "x.tiff"):
        Image.fromarray(levels).save(tmp_path / name)
        assert decode(tmp_path / name, 1)[0].tolist() == [[0, 1, 50], [128, 254, 255]]
        assert decode(tmp_path / name, 3)[2].tolist() == [[0, 1, 50], [128, 254, 255]]


def bomb(path: Path) -> None:
    """A small PNG that says it is 30,000 x 30,000 pixels large."""
    parts = [(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 0, 0, 0, 0)), (b"IDAT", b"")]
    chunks = [
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in parts
    ]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


def large(path: Path) -> None:
    Image.new("1", (images.MOST_PIXELS // 1024 + 1, 1024)).save(path)


def scans(path: Path, count: int = 300) -> None:
    """A small progressive JPEG that repeats its last scan."""
    Image.new("L", (64, 64), 128).save(path, "JPEG", progressive=True)
    content = path.read_bytes()
    last = content.rindex(b"\xff\xda")
    path.write_bytes(content[:last] + count * content[last:-2] + b"\xff\xd9")


def tile(path: Path) -> None:
    """A TIFF of 64 pixels that are cut from a tile of 2^28."""
    packed = zlib.compressobj()
    data = b"".join(packed.compress(bytes(2**20)) for _ in range(256)) + packed.flush()
    sizes = {256: 8, 257: 8, 258: 8, 259: 8, 262: 1, 277: 1, 322: 2**14, 323: 2**14}
    tags = {**sizes, 324: 8 + 2 + 10 * 12 + 4, 325: len(data)}
    fields = b"".join(struct.pack("<HHLL", tag, 4, 1, value) for tag, value in tags.items())
    path.write_bytes(struct.pack("<2sHLH", b"II", 42, 8, 10) + fields + bytes(4) + data)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe.png": (os.mkfifo, "it is not a regular file"),
    "folder.png": (Path.mkdir, "it is not a regular file"),
    "text.png": (lambda path: path.write_text("not a picture"), "cannot identify"),
    "empty.png": (Path.touch, "cannot identify"),
    "cut.png": (lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n"), "picture cannot be read"),
    "bomb.png": (bomb, "pixels"),
    "large.png": (large, "more than 67,108,864 pixels"),
    "scans.jpg": (scans, "more than 100 scans"),
    "tile.tiff": (tile, "more than 67,108,864 pixels"),
    "drawing.png": (lambda path: path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n"), "cannot identify"),
    "netpbm.png": (lambda path: path.write_bytes(b"P5 1 1 255 x"), "cannot identify"),
    "float.tiff": (lambda path: Image.new("F", (3, 3), 0.5).save(path), "more than 16 bits"),
    "deep.tiff": (lambda path: Image.new("I", (3, 3), 70_000).save(path), "more than 16 bits"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_picture_is_named_in_one_line(name: str, tmp_path: Path) -> None:
    make, reason = WRONG[name]
    make(tmp_path / name)
    started = time.process_time()
    with pytest.raises(DataError, match=reason) as caught:
        decode(tmp_path / name, 3, (8, 8))
    assert time.process_time() - started < 2
    assert caught.value.where == str(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_scans_are_counted_to_the_end_of_the_picture(tmp_path: Path) -> None:
    """Not in a thumbnail that it holds, nor in what a camera writes behind it."""
    for count, behind in ((90, b""), (1, 200 * b"\xff\xda\0\x08")):
        scans(tmp_path / "x.jpg", count)
        whole = (tmp_path / "x.jpg").read_bytes()
        thumbnail = b"\xff\xe1\x01\x00" + (50 * b"\xff\xda\0\x08\0")[:254]
        (tmp_path / "x.jpg").write_bytes(whole[:2] + thumbnail + whole[2:] + behind)
        assert abs(int(decode(tmp_path / "x.jpg", 1).mean()) - 128) < 2


def test_a_pipe_that_takes_the_place_of_a_picture_makes_nobody_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "x.png")
    monkeypatch.setattr(Path, "is_file", lambda _: True)
    with pytest.raises(DataError, match="not a regular file"):
        decode(tmp_path / "x.png", 1)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=150, deadline=None)
@given(st.sampled_from(images.FORMATS), st.data())
def test_damaged_bytes_give_pixels_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "picture"
    striped(12, 9).save(path, format=kind)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    with contextlib.suppress(DataError):
        assert decode(path, 3, (4, 4)).shape == (3, 4, 4)


def test_pictures_are_found_by_name_and_below_folders_in_order(tmp_path: Path) -> None:
    for name in ("b/2.JPG", "b/1.png", "b/notes.txt", "a.gif"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = images.find([tmp_path / "b", tmp_path / "a.gif"])
    assert [path.name for path in found] == ["1.png", "2.JPG", "a.gif"]


def pictures(count: int) -> ImageSet:
    pixels = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 3, 3).clone()
    return ImageSet(pixels, torch.arange(count) % 2, ("a", "b"), Preprocess((0.5,), (0.25,)))


def test_pixels_are_normalised_channel_by_channel() -> None:
    look = Preprocess((0.5, 0.2), (0.25, 0.1))
    pixels = torch.randint(0, 256, (4, 2, 3, 3), dtype=torch.uint8)
    expected = (pixels.float() / 255 - torch.tensor([0.5, 0.2]).view(1, 2, 1, 1)) / torch.tensor(
        [0.25, 0.1]
    ).view(1, 2, 1, 1)
    torch.testing.assert_close(look.normalise(pixels), expected, rtol=1e-5, atol=1e-5)


def augmented(preprocess: Preprocess, pixels: torch.Tensor) -> torch.Tensor:
    return preprocess.draw(preprocess.views(pixels), torch.arange(len(pixels)))


def test_augmentation_flips_half_and_shifts_by_no_more_than_asked() -> None:
    pixels = torch.zeros(400, 1, 9, 9, dtype=torch.uint8)
    pixels[:, :, 4, 2] = 255
    flipped = augmented(Preprocess(flip=True), pixels)
    assert 120 < int((flipped[:, 0, 4, 6] == 255).sum()) < 280
    places = augmented(Preprocess(shift=2), pixels)[:, 0].flatten(1).argmax(1)
    assert set((places // 9).tolist()) == {2, 3, 4, 5, 6}
    assert set((places % 9).tolist()) == {0, 1, 2, 3, 4}
    assert torch.equal(augmented(Preprocess(), pixels), pixels)


@pytest.mark.parametrize(
    ("count", "size", "batches"),
    [(9, 4, [4, 4]), (8, 4, [4, 4]), (10, 4, [4, 4, 2]), (1, 4, [1]), (3, 1, [1, 1, 1])],
)
def test_training_leaves_a_lone_last_image_out_but_never_a_lone_client(
    count: int, size: int, batches: list[int]
) -> None:
    assert [len(labels) for _, labels in pictures(count).loader(size, shuffle=True)] == batches
    assert sum(len(labels) for _, labels in pictures(count).loader(size, shuffle=False)) == count


def test_labels_can_be_renumbered_for_a_client() -> None:
    images = pictures(5)
    turned = images.among(("z", "b", "a"))
    assert turned.labels.tolist() == [2, 1, 2, 1, 2]
    assert turned.counts() == {"a": 3, "b": 2} or turned.counts() == {"b": 2, "a": 3}
    assert images.subset(torch.tensor([1, 3])).counts() == {"b": 2}


def test_measuring_batches_are_in_order_never_augmented_and_draw_nothing() -> None:
    shown = ImageSet(pictures(7).pixels, pictures(7).labels, ("a", "b"), Preprocess(shift=2))
    before = torch.get_rng_state()
    batches = list(shown.loader(3, shuffle=False))
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(torch.cat([one for one, _ in batches]), shown.pixels / 255.0)
    assert [labels.tolist() for _, labels in batches] == [[0, 1, 0], [1, 0, 1], [0]]
    assert shown[2][1] == 0


def test_an_epoch_of_training_shows_every_image_once_in_another_order() -> None:
    loader = pictures(40).loader(8, shuffle=True)
    epochs = [torch.cat([batch[:, 0, 0, 0] for batch, _ in loader]) for _ in range(2)]
    assert torch.equal(epochs[0].sort().values, epochs[1].sort().values)
    assert not torch.equal(*epochs)


def test_a_batch_costs_little_beside_a_step() -> None:
    """The bound is ten times what a batch takes on a quiet machine."""
    look = Preprocess((0.5,) * 3, (0.25,) * 3, flip=True, shift=2)
    pixels = torch.zeros(512, 3, 32, 32, dtype=torch.uint8)
    loader = ImageSet(pixels, torch.zeros(512, dtype=torch.long), ("a",), look).loader(64, True)
    list(loader)
    started = time.process_time()
    for _ in range(25):
        list(loader)
    assert (time.process_time() - started) / 200 < 2e-3


def test_sets_are_joined_one_after_the_other() -> None:
    both = joined([pictures(3), pictures(2)])
    assert both.labels.tolist() == [0, 1, 0, 0, 1]
    assert both.pixels[:, 0, 0, 0].tolist() == [0, 1, 2, 0, 1]
