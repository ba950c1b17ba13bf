"""What a picture of calibration or of uncertainty needs, as a few binned counts: small enough for a metrics line."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedbnn.evaluation import metrics
from fedbnn.evaluation.predictions import REGIMES, Predictions

BINS = 30
UNCERTAINTIES = ("entropy", "mutual_information")
Line = Mapping[str, object]


def novelty(judged: Sequence[Predictions]) -> dict[str, float | None] | None:
    """AUROC of both uncertainties for telling unseen from seen classes; None when there are not both."""
    areas = {name: metrics.unseen_auroc(*_split(judged, name)) for name in UNCERTAINTIES}
    return None if areas["entropy"] is None else areas


def reliability(judged: Sequence[Predictions]) -> dict[str, dict[str, list[float]]]:
    """Per regime, over all these images: confidence and accuracy in equal bins of confidence."""
    return {
        name: _total([metrics.reliability(*one.regime(name)) for one in judged]) for name in REGIMES
    }


def _total(bins: Sequence[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    """Bins of several image sets as the bins of their union."""
    images = torch.tensor([one["images"] for one in bins])
    means = {name: torch.tensor([one[name] for one in bins]) for name in ("confidence", "accuracy")}
    count = images.sum(0)
    pooled = {
        name: ((values * images).sum(0) / count.clamp(min=1)).tolist()
        for name, values in means.items()
    }
    return {"images": count.tolist(), **pooled}


def uncertainty(judged: Sequence[Predictions]) -> dict[str, dict[str, list[float]]]:
    """Histograms of both uncertainties, of seen and of unseen classes, on the same edges."""
    return {name: _histogram(*_split(judged, name)) for name in UNCERTAINTIES}


def _histogram(seen: Tensor, unseen: Tensor) -> dict[str, list[float]]:
    """Counts between 31 equal edges from 0 to the largest value."""
    largest = max(float(torch.cat([seen, unseen]).max()), metrics.SMALLEST)
    counts = {
        name: torch.histc(values, BINS, 0, largest).tolist()
        for name, values in (("seen", seen), ("unseen", unseen))
    }
    return {"edges": torch.linspace(0, largest, BINS + 1).tolist(), **counts}


def _split(judged: Sequence[Predictions], measure: str) -> tuple[Tensor, Tensor]:
    """One uncertainty of all images: those of seen classes, and those of classes without a row."""
    values = torch.cat([getattr(one, measure) for one in judged])
    seen = torch.cat([one.labels for one in judged]) >= 0
    return values[seen], values[~seen]


def last(lines: Sequence[Line]) -> dict[str, object]:
    """The diagnostics of a run: calibration of its last evaluation, uncertainty when classes were last unseen."""
    evaluated = [line for line in lines if line.get("diagnostics")]
    with_unseen = [line for line in evaluated if line.get("novelty")]
    return {
        "reliability": _part(evaluated, "reliability"),
        "uncertainty": _part(with_unseen or evaluated, "uncertainty"),
    }


def _part(lines: Sequence[Line], name: str) -> dict[str, object] | None:
    """One part of the last line's diagnostics, with the round it was taken in."""
    if not lines:
        return None
    found = lines[-1]["diagnostics"]
    assert isinstance(found, dict)
    return {"round": lines[-1]["round"], **found[name]}
