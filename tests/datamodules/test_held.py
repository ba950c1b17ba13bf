"""What clients hold: folders and functions of their own, drawn by address, settled at once."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules.held import KEPT, LOOK
from datamodules.stream import FederatedStream
from fedbnn.errors import ConfigError, DataError

CLASSES = ("daisy", "rose", "tulip")


def pictures(folder: Path, count: int, colour: int = 3) -> None:
    """So many pictures, each of one value: its number."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.new("RGB" if colour == 3 else "L", (6, 4), (number,) * colour).save(
            folder / f"{number:03}.png"
        )


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Client 0 holds 30 roses and 10 tulips, client 1 five daisies; a test of all three."""
    pictures(tmp_path / "flowers" / "0" / "rose", 30)
    pictures(tmp_path / "flowers" / "0" / "tulip", 10)
    pictures(tmp_path / "flowers" / "1" / "daisy", 5)
    for name in CLASSES:
        pictures(tmp_path / "flowers" / "test" / name, 2)
    return tmp_path


def held(data: Path, **settings: Any) -> FederatedStream:
    asked = {"sources": "folder:flowers", "size": 4, "samples_per_round": 40, "clients": 2}
    asked |= {"clients_per_round": 2, "rounds_per_task": 20, "data_dir": str(data)}
    return FederatedStream(**{"partition": "held", **asked, **settings})


def test_all_that_a_client_holds_is_shown_up_to_its_part_of_the_round(data: Path) -> None:
    stream = held(data)
    assert stream.counts(1, 1) == {"flowers/daisy": 5}
    assert sum(stream.counts(1, 0).values()) == stream.held == 20
    every = {"flowers/rose": 30, "flowers/tulip": 10}
    assert held(data, samples_per_round=80).counts(1, 0) == every


def test_the_draw_follows_from_seed_round_and_client(data: Path) -> None:
    shown = [held(data, seed=seed).train(round, 0).pixels for seed in (0, 1) for round in (1, 2)]
    again = held(data).train(1, 0)
    assert torch.equal(again.pixels, shown[0])
    assert not any(torch.equal(shown[0], other) for other in shown[1:])
    assert again.counts() == held(data).counts(1, 0)
    assert len(set(again.pixels[:, 0, 0, 0].tolist())) > 15


def test_what_was_announced_is_shown_whatever_comes_or_goes_since(data: Path) -> None:
    stream = held(data)
    said = stream.announce(3, 0)
    before = stream.train(3, 0)
    for picture in (data / "flowers" / "0" / "tulip").iterdir():
        picture.unlink()
    pictures(data / "flowers" / "0" / "violet", 9)
    after = held(data).train(3, 0)
    assert after.counts() == before.counts() == said
    assert torch.equal(after.pixels, before.pixels)
    assert "flowers/violet" in held(data, samples_per_round=200).counts(4, 0)


def test_announced_images_of_old_rounds_make_room(data: Path) -> None:
    stream = held(data)
    for round in range(1, KEPT + 4):
        stream.announce(round, 0)
        stream.announce(round, 1)
    kept = sorted(path.name for path in data.glob(".cache/held-*/0-*"))
    assert len(kept) == KEPT
    assert "0-1.safetensors" not in kept


def test_a_client_without_images_announces_none_and_one_without_a_folder_fails(data: Path) -> None:
    (data / "flowers" / "2").mkdir()
    stream = held(data, clients=4)
    assert stream.announce(1, 2) == {}
    assert len(stream.train(1, 2)) == 0
    with pytest.raises(DataError, match="client 3 has no folder"):
        stream.announce(1, 3)


def test_the_test_is_one_task_of_the_classes_there_are_or_empty(data: Path, tmp_path: Path) -> None:
    stream = held(data)
    (task,) = stream.tasks
    assert task.classes == tuple(f"flowers/{name}" for name in CLASSES)
    assert stream.test(0).counts() == dict.fromkeys(task.classes, 2)
    assert len(stream.test_now(1, 4)) == 4
    nothing = held(tmp_path / "nowhere")
    assert nothing.tasks[0].classes == ()
    assert len(nothing.test(0)) == 0
    assert nothing.image_shape == stream.image_shape == (3, 4, 4)
    assert nothing.preprocess == stream.preprocess == LOOK


class Ward(torch.utils.data.Dataset[Any]):
    """Three grey pictures of two classes."""

    classes = ("rose", "tulip")

    def __len__(self) -> int:
        return 3

    def __getitem__(self, place: int) -> tuple[np.ndarray[Any, Any], int]:
        return np.full((4, 4), 40 * place, np.uint8), place % 2


def test_a_function_of_the_clients_own_stands_for_a_folder(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("ward")
    module.flowers = lambda client: Ward() if client in (0, None) else None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ward", module)
    stream = held(data, sources="ward:flowers")
    assert stream.announce(1, 0) == {"flowers/rose": 2, "flowers/tulip": 1}
    assert stream.train(1, 0).pixels.shape == (3, 3, 4, 4)
    assert stream.test(0).counts() == {"flowers/rose": 2, "flowers/tulip": 1}
    with pytest.raises(DataError, match="client 1 has no"):
        stream.counts(1, 1)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"sources": "digits"}, "stream.sources"),
        ({"size": None}, "stream.size"),
        ({"samples_per_round": None}, "stream.samples_per_round"),
        ({"tasks": 2}, "stream.partition"),
        ({"validation": True}, "stream.partition"),
    ],
)
def test_what_needs_all_images_in_one_place_is_refused(
    data: Path, settings: dict[str, Any], where: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        held(data, **settings)
    assert refused.value.where == where


def test_participants_are_a_sample_of_all_clients(data: Path) -> None:
    stream = held(data, clients=9, clients_per_round=3, expelled=[(4, 2)])
    seen = [stream.participants(round) for round in range(1, 21)]
    assert all(len(one) in (2, 3) for one in seen)
    assert {client for one in seen for client in one} >= {0, 1, 2, 3, 5, 6, 7, 8}
    assert not any(4 in one for one in seen[1:])
    with pytest.raises(ConfigError, match="only the clients of a round"):
        stream.more_participants(1, 5)
