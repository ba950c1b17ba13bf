"""Data sets that are directories of image files: anything in the ImageFolder layout, and Tiny-ImageNet as published."""

from pathlib import Path

from datamodules.originals import Located, Original, Split, fingerprint, from_files
from fedbnn.errors import DataError

_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


def folder_parts(root: Path) -> tuple[Path, Path] | None:
    """The train directory and the test (or val) directory of an image folder, if it is one."""
    train = root / "train"
    test = next((root / name for name in ("test", "val") if (root / name).is_dir()), None)
    return (train, test) if train.is_dir() and test else None


def image_folder(root: Path) -> Located:
    """`<root>/train/<class>/*.png` and `<root>/test/<class>/*.png` (or `val`): classes are the directories of train."""
    parts = folder_parts(root)
    if parts is None:
        raise DataError(
            "no image folder",
            f"looked in {root}",
            "it needs train/<class>/ and test/<class>/ (or val/<class>/)",
        )
    return Located(fingerprint(parts), lambda: _read_folder(*parts))


def _read_folder(train: Path, test: Path) -> Original:
    classes = tuple(path.name for path in sorted(train.iterdir()) if path.is_dir())
    unknown = [
        path for path in sorted(test.iterdir()) if path.is_dir() and path.name not in classes
    ]
    if unknown:
        raise DataError(
            f"class {unknown[0].name!r} has test images only",
            str(unknown[0]),
            f"add {train / unknown[0].name}",
        )
    return Original(classes, _labelled(train, classes), _labelled(test, classes))


def _labelled(top: Path, classes: tuple[str, ...]) -> Split:
    """Every image of every class directory below `top`, in the order of names."""
    found = [
        (file, label) for label, name in enumerate(classes) for file in images_below(top / name)
    ]
    return from_files([file for file, _ in found], [label for _, label in found])


def images_below(folder: Path) -> list[Path]:
    """The image files in `folder` and below."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in _IMAGES)


def tiny_imagenet_folder(root: Path) -> Located:
    """Tiny-ImageNet in its official layout; the test split is `val`, whose labels are public."""
    needed = [root / "wnids.txt", root / "train", root / "val"]
    absent = [path for path in needed if not path.exists()]
    if absent:
        raise DataError(
            "tiny_imagenet is incomplete",
            f"looked for {absent[0]}",
            "remove the folder and set stream.download=true",
        )
    return Located(fingerprint(needed), lambda: _read_tiny_imagenet(root))


def _read_tiny_imagenet(root: Path) -> Original:
    """train/<wnid>/images/*.JPEG, and val/images/*.JPEG named line by line in val/val_annotations.txt."""
    wnids = (root / "wnids.txt").read_text().split()
    train = [
        (file, label)
        for label, wnid in enumerate(wnids)
        for file in images_below(root / "train" / wnid)
    ]
    test = _annotated(root / "val", {wnid: label for label, wnid in enumerate(wnids)})
    return Original(
        _words(root, wnids),
        *(from_files([f for f, _ in part], [n for _, n in part]) for part in (train, test)),
    )


def _annotated(val: Path, number: dict[str, int]) -> list[tuple[Path, int]]:
    annotations = val / "val_annotations.txt"
    if not annotations.is_file():
        raise DataError(
            "tiny_imagenet is incomplete", f"looked for {annotations}", "fetch the data set again"
        )
    rows = [line.split("\t") for line in annotations.read_text().splitlines() if line]
    for line, row in enumerate(rows, 1):
        if len(row) < 2 or row[1] not in number:
            raise DataError(
                f"label out of range in line {line}", str(annotations), "fetch the data set again"
            )
    return [(val / "images" / row[0], number[row[1]]) for row in rows]


def _words(root: Path, wnids: list[str]) -> tuple[str, ...]:
    """The first English name of each class; the wnid where the name is missing or not unique."""
    file = root / "words.txt"
    rows = [line.split("\t", 1) for line in file.read_text().splitlines()] if file.is_file() else []
    words = {row[0]: row[1].split(",")[0].strip() for row in rows if len(row) == 2}
    names = [words.get(wnid, wnid) for wnid in wnids]
    return tuple(
        name if names.count(name) == 1 else wnid for name, wnid in zip(names, wnids, strict=True)
    )
