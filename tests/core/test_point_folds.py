"""The fold of points: the backbone by images, rows by images of their class."""

from collections.abc import Mapping

import pytest
import torch

from fedbnn.methods.aggregation import PointFold
from fedbnn.protocol.messages import Update
from fedbnn.protocol.state import State
from tests.core.posteriors import NAMES


def point_update(backbone: float, rows: Mapping[str, float], counts: Mapping[str, int]) -> Update:
    tensors = {"backbone": torch.full((2,), backbone), "buffers": torch.full((1,), backbone)}
    tensors["prototypes"] = torch.tensor([[rows[name]] * 3 for name in counts]).reshape(-1, 3)
    return Update("run", 1, "train", 0, "", sum(counts.values()), counts, tensors)


def point_state() -> State:
    tensors = {
        "backbone": torch.zeros(2),
        "buffers": torch.zeros(1),
        "prototypes": torch.full((3, 3), 0.1),
        "prototypes.samples": torch.zeros(3).double(),
    }
    return State(tensors, NAMES)


def test_fedavg_weighs_the_backbone_by_images_and_rows_by_images_of_their_class() -> None:
    fold = PointFold(point_state())
    fold.add(point_update(1.0, {"a": 1.0, "b": 2.0}, {"a": 1, "b": 9}))
    fold.add(point_update(3.0, {"a": 5.0}, {"a": 3}))
    found = fold.close()
    assert found["backbone"].tolist() == pytest.approx([(10 * 1 + 3 * 3) / 13] * 2)
    assert found["prototypes"][:, 0].tolist() == pytest.approx([4.0, 2.0, 0.1])
    assert torch.equal(found["prototypes"][2], point_state()["prototypes"][2])
    assert found["prototypes.samples"].tolist() == [4, 9, 0]


def test_fedavg_pulls_a_distrusted_client_towards_its_start() -> None:
    fold = PointFold(point_state())
    fold.add(point_update(4.0, {"a": 4.1}, {"a": 3}), trust=0.5)
    found = fold.close()
    assert found["backbone"].tolist() == [2.0, 2.0]
    assert found["prototypes"][0].tolist() == pytest.approx([2.1] * 3)


def test_fedavg_of_nobody_is_the_state() -> None:
    fold = PointFold(point_state())
    fold.add(point_update(4.0, {}, {}))
    found = fold.close()
    assert all(torch.equal(found[name], value) for name, value in point_state().tensors.items())
