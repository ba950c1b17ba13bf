"""The schedule as a table and as a picture."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datamodules import FederatedStream
from datamodules.schedule_view import draw_schedule, schedule_rows

Make = Callable[..., FederatedStream]


def test_rows_tell_who_is_on_what_when(shapes: Make) -> None:
    rows = schedule_rows(shapes(durations=[(0, 6), (4, 8), (8, 9)], schedule="gradual", clients=9))
    assert [(row.first, row.last, row.task, row.clients) for row in rows] == [
        (1, 4, "classes 0-2", (9, 9)),
        (5, 6, "classes 0-2", (6, 3)),
        (5, 6, "classes 3-4", (3, 6)),
        (7, 8, "classes 3-4", (9, 9)),
        (9, 9, "classes 5-6", (9, 9)),
    ]
    assert rows[1].shares == pytest.approx((6 / 9, 3 / 9))
    assert rows[0].classes == ("shapes/class00", "shapes/class01", "shapes/class02")


@pytest.mark.parametrize(
    "changes", [{}, {"tasks": 7}, {"durations": [(0, 6), (4, 8), (8, 9)], "schedule": "gradual"}]
)
def test_the_picture_shows_every_task_in_its_own_colour(
    shapes: Make, changes: dict, tmp_path: Path
) -> None:
    stream = shapes(**changes)
    file = tmp_path / "deep" / "schedule.png"
    draw_schedule(stream, file)
    pixels = np.asarray(Image.open(file).convert("RGB")).reshape(-1, 3)
    colours, counts = np.unique(pixels, axis=0, return_counts=True)
    large = [tuple(colour) for colour, count in zip(colours, counts, strict=True) if count > 5000]
    assert len(set(large) - {(255, 255, 255)}) == len(stream.tasks)
