"""Exemplar memory of one client: a few images of every class it has met, chosen by herding (Rebuffi et al., 2017).

As private state: `pixels` (m, channels, height, width) in uint8 and `labels` (m,), which number the state's classes.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedbnn.images import ImageSet
from fedbnn.state import State


def herding(features: Tensor, count: int) -> Tensor:
    """Places of `count` rows, chosen one by one so that the mean of those chosen stays nearest to the mean of all.

    i_t = argmin_i || mean - (sum of chosen + x_i) / t ||,   on features of length 1
    """
    unit = torch.nn.functional.normalize(features, dim=1)
    mean, total = unit.mean(0), torch.zeros_like(unit[0])
    chosen: list[int] = []
    for step in range(1, min(count, len(unit)) + 1):
        distances = (mean - (total + unit) / step).norm(dim=1)
        distances[chosen] = torch.inf
        chosen.append(int(distances.argmin()))
        total = total + unit[chosen[-1]]
    return torch.tensor(chosen, dtype=torch.long)


def memorise(images: ImageSet, features: Tensor, memory: int) -> State:
    """The memory of a client that has just trained on these images: memory / (number of classes) of each class."""
    classes = tuple(images.counts())
    quota, kept, labels = memory // len(classes), [], []
    for number, name in enumerate(classes):
        places = (images.labels == images.classes.index(name)).nonzero().flatten()
        best = places if len(places) <= quota else places[herding(features[places], quota)]
        kept.append(best)
        labels.append(torch.full((len(best),), number))
    return State({"pixels": images.pixels[torch.cat(kept)], "labels": torch.cat(labels)}, classes)


def remembered(private: State | None, without: Mapping[str, int]) -> dict[str, int]:
    """How many images of which classes the memory holds, `without` those classes."""
    if private is None:
        return {}
    counts = torch.bincount(private["labels"], minlength=len(private.classes)).tolist()
    return {
        name: count
        for name, count in zip(private.classes, counts, strict=True)
        if count and name not in without
    }


def replay(images: ImageSet, private: State | None) -> ImageSet:
    """The images, and behind them all images in memory of classes that do not occur among them."""
    old = remembered(private, images.counts())
    if private is None or not old:
        return images
    names = torch.tensor(
        [images.classes.index(name) if name in old else -1 for name in private.classes]
    )
    labels = names[private["labels"]]
    pixels = torch.cat([images.pixels, private["pixels"][labels >= 0]])
    return replace(images, pixels=pixels, labels=torch.cat([images.labels, labels[labels >= 0]]))
