"""`fedbnn predict RUN_DIR PICTURES`: what a trained model sees in them, and how sure it is."""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonargparse.typing import PositiveInt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedbnn import export, images
from fedbnn.cli.main import Arguments
from fedbnn.errors import DataError, escaped
from fedbnn.export import Prediction

DOUBTS = ("entropy", "mutual_information", "unknown_class")


def main(argv: Sequence[str]) -> int:
    """Predict, and print a table or JSON."""
    options = _options(argv)
    model = export.load(options.run_dir, options.trust)
    paths, pixels = _decoded(images.find(options.pictures), model.card.image_shape)
    prediction = model.predict(torch.from_numpy(pixels), options.samples)
    rows = _rows(paths, prediction, options.top)
    if options.uncertain_first:
        rows.sort(key=lambda row: -row["entropy"])
    print(json.dumps(rows, indent=2)) if options.json else _print(rows)
    return 0


def _options(argv: Sequence[str]) -> Namespace:
    parser = Arguments("predict", "Say what a trained model sees in pictures, and how sure it is.")
    add, shown = parser.add_argument, "classes shown for each picture (default: 3)"
    add("run_dir", type=Path, metavar="RUN_DIR", help="directory of a finished run")
    add("pictures", nargs="+", metavar="IMAGE_OR_FOLDER", help="picture files, or folders of them")
    add("--samples", type=PositiveInt, default=16, help="draws of the weights (default: 16)")
    add("--top", type=PositiveInt, default=3, help=shown)
    add("--uncertain_first", action="store_true", help="the least certain pictures first")
    add("--trust", action="store_true", help="import the network that the run names, if it does")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(argv)


def _decoded(paths: Sequence[Path], shape: tuple[int, int, int]) -> tuple[list[Path], images.Array]:
    """The pictures that can be read; each of the others is named and left out, unless all are."""
    found: dict[Path, images.Array] = {}
    for path in paths:
        try:
            found[path] = images.decode(path, shape[0], shape[1:])
        except DataError as error:
            if len(paths) == 1 or (path == paths[-1] and not found):
                raise
            sys.stderr.write(f"left out: {error}\n")
    return [*found], np.stack([*found.values()])


def _rows(paths: Sequence[Path], prediction: Prediction, top: int) -> list[dict[str, Any]]:
    """One table row per picture: likeliest classes first."""
    best, rows = prediction.probabilities.topk(min(top, len(prediction.classes))), []
    for place, path in enumerate(paths):
        names = [prediction.classes[column] for column in best.indices[place].tolist()]
        shares = [round(share, 4) for share in best.values[place].tolist()]
        row: dict[str, Any] = {"picture": str(path), "label": prediction.labels[place]}
        row["classes"] = dict(zip(names, shares, strict=True))
        for name in DOUBTS:
            doubt = getattr(prediction, name)
            row[name] = None if doubt is None else round(float(doubt[place]), 4)
        rows.append(row)
    return rows


def _print(rows: Sequence[dict[str, Any]]) -> None:
    """A table for people; uncertainty in nats."""
    table = Table()
    table.add_column("picture", overflow="fold")
    for title in ("likeliest classes", "entropy", "mutual information", "unknown"):
        table.add_column(title, min_width=max(map(len, title.split())))
    for row in rows:
        classes = ", ".join(f"{name} {share:.0%}" for name, share in row["classes"].items())
        doubt = ["-" if row[name] is None else f"{row[name]:.3f}" for name in DOUBTS]
        table.add_row(*(Text(escaped(text)) for text in (row["picture"], classes, *doubt)))
    Console(highlight=False).print(table)
