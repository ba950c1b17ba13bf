"""Local training of weights that are points, from the state a client was sent to the tensors it answers with."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedbnn.bayes.flatten import Layout
from fedbnn.federation.local import LocalTraining
from fedbnn.images import ImageSet
from fedbnn.methods import Method
from fedbnn.methods.base import Assignment
from fedbnn.networks import Classifier
from fedbnn.state import State
from lightning_modules.assembly import Assembly, assemble, load_backbone, read_rows
from lightning_modules.client_trainer import ClientTrainer
from lightning_modules.point_client import PointClient, WarmUp

Outcome = tuple[dict[str, Tensor], State | None, float]


def fit_points(
    assignment: Assignment,
    backbone: nn.Module,
    layout: Layout,
    method: Method,
    local: LocalTraining,
    fitter: ClientTrainer,
) -> Outcome:
    """Warm new rows up, train backbone and rows, and read out what is sent and what is kept."""
    state = assignment.instruction.state
    load_backbone(backbone, layout, state)
    assembly = assemble(state, assignment.classes, method, assignment.private, int(backbone.width))
    network = assembly.classifier(backbone)
    images = assignment.images.among(assembly.classes)
    warm = warm_up(network, assembly, images, local, fitter)
    network.requires_grad_(True)
    terms = method.objective(assignment, network, layout)
    client = PointClient(network, terms, method, local)
    fitter.fit(client, images, local.epochs)
    trained, buffers = layout.read(backbone)
    weights, rows = {"backbone": trained, "buffers": buffers}, read_rows(network)
    if method.share == "global":
        weights["rows"] = rows[: assembly.sent]
    sent, kept = terms.sends(weights, client.steps, client.lr), terms.keeps()
    if method.share != "global":
        kept = keep_rows(assembly, assignment, {"rows": rows}).having(kept.tensors if kept else {})
    return sent, kept, warm + client.inner


def warm_up(
    network: Classifier,
    assembly: Assembly,
    images: ImageSet,
    local: LocalTraining,
    fitter: ClientTrainer,
) -> float:
    """Fit the fresh rows with the backbone frozen, its batch statistics included; the seconds it took."""
    if not local.warmup_epochs or not bool(assembly.fresh.any()):
        return 0.0
    statistics = {name: value.clone() for name, value in network.backbone.named_buffers()}
    network.requires_grad_(False).head.requires_grad_(True)
    module = WarmUp(network, assembly.fresh, local)
    fitter.fit(module, images, local.warmup_epochs)
    with torch.no_grad():
        for name, value in network.backbone.named_buffers():
            value.copy_(statistics[name])
    return module.inner


def keep_rows(assembly: Assembly, assignment: Assignment, rows: Mapping[str, Tensor]) -> State:
    """The client's own library with its trained rows put back (`share: backbone_only`)."""
    holder, index = assembly.holder, assembly.index
    counts = torch.tensor(list(assignment.images.counts().values()), dtype=torch.float64)
    kept = {name: holder[name].clone() for name in (*rows, "rows.samples")}
    for name, value in rows.items():
        kept[name][index] = value
    kept["rows.samples"][index[: assembly.sent]] += counts
    return holder.having(kept)
