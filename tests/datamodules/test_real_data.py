"""Real images, where FEDBNN_DATA names a folder that has them."""

import time
from pathlib import Path

import pytest

from datamodules import FederatedStream

pytestmark = pytest.mark.real_data


def need(real_data: Path, name: str) -> Path:
    if not (real_data / name).is_dir():
        pytest.skip(f"no {name} below FEDBNN_DATA")
    return real_data


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def test_cifar100_starts_fast_the_second_time(real_data: Path, cache: str) -> None:
    options = {
        "sources": "cifar100",
        "tasks": 4,
        "rounds_per_task": 25,
        "data_dir": str(need(real_data, "cifar100")),
        "cache_dir": cache,
    }
    first = FederatedStream(**options)
    assert sum(len(first.test(task)) for task in range(4)) == 10_000
    started = time.process_time()
    second = FederatedStream(**options)
    images = second.train(1, second.participants(1)[0])
    assert time.process_time() - started < 2
    assert len(images) > 0
    assert second.preprocess.mean == pytest.approx((0.5071, 0.4865, 0.4409), abs=1e-3)


def test_tiny_imagenet_has_200_classes_of_readable_images(real_data: Path, cache: str) -> None:
    data_dir = str(need(real_data, "tiny-imagenet-200"))
    stream = FederatedStream(
        sources="tiny_imagenet",
        tasks=4,
        rounds_per_task=25,
        size=32,
        data_dir=data_dir,
        cache_dir=cache,
    )
    assert len(set(stream.classes)) == 200
    assert [len(task.classes) for task in stream.tasks] == [50] * 4
    assert stream.image_shape == (3, 32, 32)
