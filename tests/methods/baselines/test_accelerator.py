"""Every method on an accelerator: `meta` is a device of its own whose tensors have no values, so
whatever asks for a value in a step raises, and here so does whatever meets a tensor of the CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedbnn.devices import CPU
from fedbnn.heads import HEADS, ExactHead, exact, gaussian, predictive
from fedbnn.heads.predictive import Predictor
from fedbnn.methods import METHODS
from fedbnn.methods.base import Assignment
from fedbnn.protocol.state import State
from lightning_modules import svi_client
from lightning_modules.client_trainer import ClientTrainer
from lightning_modules.point_client import ClientModule
from tests.methods.baselines.conftest import initial
from tests.methods.baselines.test_every_method import method_of

META = torch.device("meta")
TRIED = ("fedbnn", "fedavg_plus", "fedprox", "scaffold", "ewc", "mas", "lwf", "fcil")


class OneDevice(TorchDispatchMode):
    """No operation takes tensors of two devices; a single number may come from anywhere."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim()]
        places = {x.device.type for x in given}
        assert len(places) < 2, f"{op} takes tensors on {places}"
        return op(*args, **(kwargs or {}))


def steps(module: ClientModule, data: Any) -> None:
    """Two steps of a copy on the accelerator, as Lightning makes them."""
    held = vars(getattr(module, "terms", module)).values()
    memo = {id(one): one for one in held if isinstance(one, State | Assignment)}
    client = deepcopy(module, memo).train().to(META)
    client._trainer = SimpleNamespace(loggers=[], callbacks=[])
    client.on_train_start()
    optimizer = torch.optim.SGD([p for p in client.parameters() if p.requires_grad], 0.1)
    for number, batch in zip(range(2), data.train_dataloader(), strict=False):
        moved = tuple(part.to(META) for part in batch)
        with OneDevice():
            client.on_train_batch_start(moved, number)
            client.backward(client.training_step(moved, number))
            client.on_before_optimizer_step(optimizer)
            optimizer.step()


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fits are tried on the accelerator first; which modules were."""
    fit, seen = ClientTrainer.fit, []

    def both(self: ClientTrainer, module: ClientModule, data: Any, epochs: int) -> None:
        steps(module, data)
        seen.append(type(module).__name__)
        fit(self, module, data, epochs)

    monkeypatch.setattr(ClientTrainer, "fit", both)
    return seen


@pytest.mark.parametrize("name", TRIED)
def test_no_step_leaves_the_accelerator_or_waits_for_it(name: str, toy, played, stepped) -> None:
    run = played(method_of(name), toy(rounds=4, num_clients=2, per_round=2))
    assert [run.records[number]["failed"] for number in (1, 2, 3, 4)] == [{}] * 4
    assert "PointClient" in stepped
    assert ("SVIClient" in stepped) == name.startswith("fedbnn")


@contextmanager
def visiting(network: nn.Module, device: torch.device) -> Iterator[None]:
    """A visit from which the network comes home with what it went with."""
    kept = deepcopy(network)
    network.to(device)
    try:
        yield
    finally:
        network.to_empty(device=CPU)
        network.load_state_dict(kept.state_dict())


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Which devices networks visited; what they bring home are zeros."""
    home, seen = Tensor.cpu, []

    def noted(network: nn.Module, device: torch.device) -> Any:
        seen.append(device)
        return visiting(network, device)

    for module in (exact, gaussian, predictive, svi_client):
        monkeypatch.setattr(module, "visiting", noted)
    come = lambda one: torch.zeros(one.shape, dtype=one.dtype) if one.is_meta else home(one)  # noqa: E731
    monkeypatch.setattr(Tensor, "cpu", come)
    return seen


@pytest.mark.parametrize("name", ["linear", "gaussian", "exact"])
def test_evaluation_and_class_statistics_are_made_on_the_accelerator(
    name: str, toy, played, visits: list[torch.device]
) -> None:
    head = replace(HEADS[name](), **({"filters": 4} if name == "exact" else {}))
    method = METHODS["fedavg"].method()
    stream = toy(rounds=2, num_clients=2, per_round=2)
    state = played(method, stream, head=head).last
    _, backbone, layout = initial(method, stream)
    predictor = Predictor(backbone, layout, state, head, device=META)
    assert predictor.scores(stream.train(1, 0)).shape == (1, stream.images, len(predictor.classes))
    images = stream.train(1, 0)
    if isinstance(head, ExactHead):
        exact.measure(head, backbone, images, META)
    else:
        before = {f"{one}.before": state[one] for one in ("backbone", "buffers")}
        gaussian.measure(backbone, layout, state.having(before), images, META)
    assert visits[-2:] == [META, META]


def test_curvature_is_measured_on_the_accelerator(toy, played, visits, monkeypatch) -> None:
    monkeypatch.setattr(ClientTrainer, "device", META, raising=False)
    monkeypatch.setattr(ClientTrainer, "__setattr__", _but_device)
    method = replace(method_of("fedbnn"), precision="curvature")
    run = played(method, toy(rounds=2, num_clients=2, per_round=2))
    assert run.records[2]["failed"] == {}
    assert META in visits


def _but_device(self: Any, name: str, value: Any) -> None:
    """Set anything else."""
    if name != "device":
        object.__setattr__(self, name, value)
