"""Pictures that clients hold: written to folders, the same ones on one box and on sites."""

from pathlib import Path

import numpy as np
from PIL import Image

HOLDS = {0: (0, 1), 1: (1, 2), 2: (2, 3), 3: (0, 3)}
"""The shades that each of four clients has pictures of."""
WORDS = "--stream.partition held --stream.sources folder:shades --stream.size 8 --stream.tasks 1"
WORDS += " --stream.rounds_per_task 3 --stream.samples_per_round 24 --stream.clients_per_round 3"


def painted(folder: Path, shade: int, count: int, seed: int) -> None:
    """So many pictures of a shade in a folder of its name."""
    random, place = np.random.default_rng([seed, shade]), folder / f"shade{shade}"
    place.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = (random.integers(0, 100, (8, 8, 3)) + 50 * shade).astype(np.uint8)
        Image.fromarray(pixels).save(place / f"{seed}-{number:02}.png")


def hold(data: Path, client: int) -> None:
    """What a client holds, below the data folder of its machine."""
    for shade in HOLDS[client]:
        painted(data / "shades" / str(client), shade, 7, seed=client)


def hold_tests(data: Path) -> None:
    """What the server tests on."""
    for shade in range(4):
        painted(data / "shades" / "test", shade, 3, seed=99)
