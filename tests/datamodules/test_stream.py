"""The stream as others use it: shapes, names, mixtures, no leakage, the same for the same seed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from PIL import Image
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor, nn

from datamodules import FederatedStream
from fedbnn.errors import ConfigError
from fedbnn.images import ImageSet, joined

Make = Callable[..., FederatedStream]
NAMES = ["class00, class01, class02", "class03, class04", "class05, class06"]
OPTIONS = st.fixed_dictionaries(
    {
        "partition": st.sampled_from(["dirichlet", "iid"]),
        "shuffle_classes": st.booleans(),
        "validation": st.booleans(),
        "clients": st.integers(4, 30),
        "seed": st.integers(0, 20),
    }
)


def prints(images: ImageSet) -> list[bytes]:
    return [image.numpy().tobytes() for image in images.pixels]


def test_the_facts_of_a_stream(shapes: Make) -> None:
    stream = shapes()
    assert (stream.rounds, stream.num_clients, stream.image_shape) == (12, 10, (3, 8, 8))
    assert stream.classes == tuple(f"shapes/class{number:02d}" for number in range(7))
    assert [len(task.classes) for task in stream.tasks] == [3, 2, 2]
    assert [task.name for task in stream.tasks] == NAMES
    assert stream.task_ends() == (4, 8, 12)
    assert stream.shares(5) == (0, 1, 0)


@settings(max_examples=25, deadline=None)
@given(OPTIONS)
def test_no_image_is_both_trained_on_and_tested(shapes: Make, options: dict) -> None:
    stream = shapes(**options)
    tested = {image for task in range(3) for image in prints(stream.test(task))}
    for round in (1, 4, 5, 12):
        assert set(prints(stream.test_now(round, None))) <= tested
        for client in stream.participants(round):
            shown = stream.train(round, client)
            assert tested.isdisjoint(prints(shown))
            assert shown.counts() == stream.counts(round, client)
            assert set(shown.counts()) <= set(stream.tasks[stream.task_of(round, client)].classes)


def test_train_and_test_are_all_of_the_data(shapes: Make) -> None:
    stream = shapes()
    shown = [
        image
        for round in (1, 5, 9)
        for client in range(10)
        for image in prints(stream.train(round, client))
    ]
    assert len(set(shown)) == len(shown) == 140
    assert sum(len(stream.test(task)) for task in range(3)) == 42


def test_validation_is_a_tenth_of_every_class_of_train(shapes: Make) -> None:
    everything, tuning = shapes(), shapes(validation=True)
    assert [tuning.test(task).counts() for task in range(3)] == [
        dict.fromkeys(task.classes, 2) for task in tuning.tasks
    ]
    trained = {
        image
        for round in (1, 5, 9)
        for client in range(10)
        for image in prints(everything.train(round, client))
    }
    assert {image for task in range(3) for image in prints(tuning.test(task))} <= trained


def test_the_same_settings_give_the_same_stream_in_any_order_of_calls(shapes: Make) -> None:
    stream, again = (shapes(samples_per_round=30, seed=4) for _ in range(2))
    stream.train(1, 0)
    for round in (9, 2):
        assert again.participants(round) == stream.participants(round)
        for client in again.participants(round):
            assert torch.equal(
                again.train(round, client).pixels, stream.train(round, client).pixels
            )


def test_labels_name_the_class_of_the_image(shapes: Make, shapes_dir: Path) -> None:
    stream = shapes(shuffle_classes=True)
    names = {
        np.asarray(Image.open(file)).transpose(2, 0, 1).tobytes(): file.parent.name
        for file in shapes_dir.rglob("*.png")
    }
    shown = [stream.test(1), *(stream.train(5, client) for client in range(10))]
    for images in shown:
        for pixels, label in zip(prints(images), images.labels, strict=True):
            assert images.classes[label] == f"shapes/{names[pixels]}"


def test_every_seed_may_have_its_own_order_of_classes(shapes: Make) -> None:
    first, again, other = (shapes(shuffle_classes=True, seed=seed).classes for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(first) == sorted(other) == list(shapes(seed=1).classes)


@pytest.mark.parametrize("samples", [None, 8])
def test_now_is_the_mixture_of_tasks_that_is_trained(shapes: Make, samples: int | None) -> None:
    """Tasks have 60, 40 and 40 train images: all shown, or at most two by each of four clients."""
    stream = shapes(
        durations=[(0, 6), (3, 8), (7, 10)], schedule="gradual", samples_per_round=samples
    )
    clients = np.array(stream.shares(4))
    assert clients == pytest.approx([0.7, 0.3, 0]) or clients == pytest.approx([0.8, 0.2, 0])
    images = clients * ([60, 40, 40] if samples is None else [1, 1, 1])
    assert stream.image_shares(4) == pytest.approx(images / images.sum())
    counts = [
        sum(stream.test_now(4, 10).counts().get(name, 0) for name in task.classes)
        for task in stream.tasks
    ]
    assert counts == [round(10 * share) for share in stream.image_shares(4)]
    assert set(prints(stream.test_now(4, 10))) <= set(prints(stream.test_now(4, 20)))
    assert len(stream.test_now(1, None)) == len(stream.test(0))
    assert len(stream.test_now(1, 10**6)) == len(stream.test(0))


def test_an_expelled_client_is_asked_for_nothing_and_nobody_takes_its_place(shapes: Make) -> None:
    """Neither to train nor, among more clients than train, for statistics."""
    plain = shapes()
    for ask in (plain.participants, lambda number: plain.more_participants(number, 100)):
        for lost in ask(2):
            rest = shapes(expelled=[(lost, 2)])
            for number in (1, 2, 3):
                trains, more = plain.participants(number), plain.more_participants(number, 100)
                gone = {lost} if number > 1 else set()
                assert set(rest.participants(number)) == set(trains) - gone
                assert set(rest.more_participants(number, 100)) == set(more) - gone


def test_training_images_are_augmented_and_test_images_are_not(shapes: Make) -> None:
    stream = shapes(flip=True, shift=2)
    shown, tested = stream.train(1, stream.participants(1)[0]), stream.test(0)
    assert (shown.preprocess.flip, shown.preprocess.shift) == (True, 2)
    assert (tested.preprocess.flip, tested.preprocess.shift) == (False, 0)
    assert shown.preprocess.mean == tested.preprocess.mean == stream.preprocess.mean


def test_task_incremental_repeats_grey_images_in_colour(shapes_dir: Path) -> None:
    stream = FederatedStream(
        "task",
        ["digits", "folder:shapes"],
        rounds_per_task=2,
        clients=5,
        clients_per_round=2,
        data_dir=str(shapes_dir),
    )
    grey = stream.test(0).pixels
    assert [task.name for task in stream.tasks] == ["digits", "shapes"]
    assert stream.image_shape == (3, 8, 8)
    assert torch.equal(grey[:, 0], grey[:, 1])
    assert torch.equal(grey[:, 0], grey[:, 2])
    assert set(stream.test(1).counts()) == set(stream.tasks[1].classes)
    assert (len(stream.classes), len(stream.preprocess.mean)) == (17, 3)


def test_sources_of_two_sizes_ask_for_one(
    shapes_dir: Path, picture_folder: Callable[..., None]
) -> None:
    picture_folder(shapes_dir / "large", classes=2, train=2, test=1, side=12)
    stream = FederatedStream(
        "task", ["folder:shapes", "folder:large"], rounds_per_task=2, data_dir=str(shapes_dir)
    )
    with pytest.raises(ConfigError, match=r"shapes 8x8, large 12x12.*stream.size"):
        _ = stream.classes


def test_domain_incremental_keeps_classes_and_shifts_inputs(shapes: Make) -> None:
    domains = ["clean", "rotation:90", "noise:0.1"]
    stream = shapes(incremental="domain", domains=domains, tasks=None, rounds_per_task=2)
    clean, turned, noisy = (stream.test(task) for task in range(3))
    assert [task.name for task in stream.tasks] == domains
    assert {task.classes for task in stream.tasks} == {stream.classes}
    assert torch.equal(clean.labels, turned.labels)
    assert torch.equal(turned.pixels, clean.pixels.rot90(1, (2, 3)))
    assert not torch.equal(noisy.pixels, clean.pixels)


def test_a_round_or_client_that_does_not_exist_is_an_error(shapes: Make) -> None:
    stream = shapes()
    for place in ((0, 0), (13, 0), (1, -1), (1, 10)):
        with pytest.raises(IndexError, match="is not one of"):
            stream.train(*place)


def test_making_a_stream_opens_nothing(tmp_path: Path) -> None:
    stream = FederatedStream(
        sources="cifar100", tasks=4, rounds_per_task=25, data_dir=str(tmp_path / "nowhere")
    )
    assert (stream.rounds, stream.shares(26), stream.task_ends()) == (
        100,
        (0, 1, 0, 0),
        (25, 50, 75, 100),
    )
    assert not list(tmp_path.iterdir())


def test_yaml_values_reach_the_constructor() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(FederatedStream, "stream")
    values = {
        "sources": ["cifar10", "cifar100"],
        "incremental": "task",
        "schedule": "gradual",
        "durations": [[0, 60], [40, 110]],
    }
    stream = parser.instantiate(parser.parse_object({"stream": values})).stream
    assert stream.task_ends() == (60, 110)


class Linear(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(192, 7)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.layer(images.flatten(1)), labels)

    def test_step(
        self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        assert len(batch[0]) == len(batch[1])
        self.seen = {*getattr(self, "seen", ()), dataloader_idx}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*LeafSpec:FutureWarning"
)
def test_lightning_fits_one_client_and_tests_every_task(shapes: Make) -> None:
    stream, module = shapes(), Linear()
    before = module.layer.weight.clone()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(max_epochs=1, accelerator="cpu", **quiet)
    data = stream.at(1, stream.participants(1)[0], batch_size=4)
    trainer.fit(module, datamodule=data)
    images = len(data.images)
    assert trainer.global_step == images // 4 + (images % 4 > 1)
    assert not torch.equal(before, module.layer.weight)
    trainer.test(module, datamodule=stream, verbose=False)
    assert module.seen == {0, 1, 2}


def test_a_client_is_given_other_images_to_train_on(shapes: Make) -> None:
    data = shapes().at(1, shapes().participants(1)[0], batch_size=4)
    more = data.with_images(joined([data.images, data.images]))
    assert len(more.images) == 2 * len(data.images)
    assert more.batch_size == more.train_dataloader().batch_size == 4


def test_rows_tell_who_is_on_what_when(shapes: Make) -> None:
    stream = shapes(durations=[(0, 6), (4, 8), (8, 9)], schedule="gradual", clients=9)
    rows = stream.schedule_rows()
    shown = ("first", "last", "task", "clients")
    assert [tuple(row[name] for name in shown) for row in rows] == [
        (1, 4, NAMES[0], [9, 9]),
        (5, 6, NAMES[0], [6, 3]),
        (5, 6, NAMES[1], [3, 6]),
        (7, 8, NAMES[1], [9, 9]),
        (9, 9, NAMES[2], [9, 9]),
    ]
    assert rows[1]["client_shares"] == pytest.approx([6 / 9, 3 / 9], abs=1e-3)
    assert rows[1]["image_shares"] == pytest.approx([6 * 60 / 480, 3 * 60 / 420], abs=1e-3)
    assert rows[0]["classes"] == "3: shapes/class00 .. shapes/class02"
