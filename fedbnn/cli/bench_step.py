"""One training step, Bayesian against standard: same network, batch, optimiser, one thread."""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedbnn import memory
from fedbnn.bayes.elbo import ClosedFormELBO
from fedbnn.bayes.flatten import layout_of
from fedbnn.bayes.model import BayesianModel, guide_for
from fedbnn.cli.bench import interleaved, summary
from fedbnn.networks import NETWORKS, Classifier

IMAGE, CLASSES, LR = (3, 32, 32), 25, 1e-3
CASES = {"lenet": (128, 40), "paper_resnet": (64, 12)}
REFERENCE = "SNN, Adam"
Loss = Callable[[Tensor, Tensor], Tensor]


def measure(repeats: float = 1.0) -> list[dict[str, Any]]:
    """All cases; `repeats` scales how often each is measured."""
    memory.keep()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [row for name in CASES for row in _case(name, repeats)]
    finally:
        torch.set_num_threads(before)
    return rows


def _case(network: str, repeats: float) -> list[dict[str, Any]]:
    batch, turns = CASES[network]
    images, labels = torch.randn(batch, *IMAGE), torch.randint(0, CLASSES, (batch,))
    steps = {
        REFERENCE: _step(*_standard(network), images, labels, fused=False),
        "SNN, fused Adam": _step(*_standard(network), images, labels, fused=True),
        "FedBNN (Pyro)": _step(*_bayesian(network), images, labels, fused=True),
        "FedBNN, function prior": _step(
            *_bayesian(network, function_prior=1.0), images, labels, fused=True
        ),
    }
    if importlib.util.find_spec("torchbnn"):
        steps["torchbnn"] = _step(*_torchbnn(network), images, labels, fused=False)
    seconds = interleaved(steps, max(3, round(turns * repeats)))
    return [{"network": network, "batch": batch, **row} for row in summary(seconds, REFERENCE)]


def _step(
    module: nn.Module, loss: Loss, images: Tensor, labels: Tensor, fused: bool
) -> Callable[[], None]:
    """Forward, backward and optimiser."""
    optimizer = torch.optim.Adam(
        [p for p in module.parameters() if p.requires_grad], LR, fused=fused
    )

    def step() -> None:
        optimizer.zero_grad()
        loss(images, labels).backward()
        optimizer.step()

    return step


def _standard(network: str) -> tuple[nn.Module, Loss]:
    """The network with point weights and cross-entropy."""
    module = Classifier(NETWORKS[network](IMAGE), CLASSES)
    return module, lambda images, labels: nn.functional.cross_entropy(module(images), labels)


def _bayesian(network: str, function_prior: float = 0.0) -> tuple[nn.Module, Loss]:
    """The same with a posterior, as a client trains it: one draw, closed-form KL."""
    backbone = NETWORKS[network](IMAGE)
    model = BayesianModel(backbone, layout_of(backbone), function_prior=function_prior)
    guide = guide_for(model, IMAGE)
    size = model.layout.size + CLASSES * (model.features + 1)
    start = 0.02 * torch.randn(size), torch.full((size,), 0.01)
    model.swap(*start)
    guide.swap(*start)
    trained = nn.ModuleList(
        [guide] if model.function_prior is None else [guide, model.function_prior]
    )
    return trained, ClosedFormELBO(torch.full((size,), 1e-6))(model, guide)


def _torchbnn(network: str) -> tuple[nn.Module, Loss]:
    """The library the paper used: Bayesian layers, its KL loss beside cross-entropy."""
    import torchbnn

    module = Classifier(NETWORKS[network](IMAGE), CLASSES)
    _convert(module, torchbnn)
    divergence = torchbnn.BKLLoss(reduction="mean", last_layer_only=False)
    return (
        module,
        lambda images, labels: (
            nn.functional.cross_entropy(module(images), labels) + 0.1 * divergence(module)
        ),
    )


def _convert(module: nn.Module, torchbnn: Any) -> None:
    """Replace convolutions and linear layers below a module."""
    prior = {"prior_mu": 0.0, "prior_sigma": 0.05}
    for name, child in module.named_children():
        if isinstance(child, nn.Conv2d):
            shape = child.in_channels, child.out_channels, child.kernel_size, child.stride
            how = {"padding": child.padding, "bias": child.bias is not None}
            setattr(module, name, torchbnn.BayesConv2d(*prior.values(), *shape, **how))
        elif isinstance(child, nn.Linear):
            sizes = child.in_features, child.out_features
            setattr(module, name, torchbnn.BayesLinear(*prior.values(), *sizes))
        else:
            _convert(child, torchbnn)
