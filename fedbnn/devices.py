"""Where tensors live: accelerators are found without waking them, and networks visit them.

A process that has used CUDA cannot fork one that uses it, and forks are how one client trains on
several devices. So GPUs are counted as their driver does (NVML), random numbers are seeded without
asking for those there were, and a network is on an accelerator only while it computes.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

CPU = torch.device("cpu")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus() -> list[str]:
    """The GPUs that this process may use, each as `CUDA_VISIBLE_DEVICES` names it."""
    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    return named[:count] or [str(number) for number in range(count)]


def pinned(number: int, among: Sequence[str]) -> Mapping[str, str]:
    """The environment of worker `number`: one GPU, the next worker the next, round and round."""
    return {VISIBLE: among[number % len(among)]} if among else {}


def described(device: torch.device) -> str:
    """The device as a person knows it; a GPU says its name once it may be woken."""
    if device.type != "cuda":
        return str(device)
    return f"{device}, {torch.cuda.get_device_name(device)}"


@contextmanager
def visiting(network: nn.Module, device: torch.device) -> Iterator[None]:
    """The network is on the device in here, and at home on the CPU afterwards."""
    if device == CPU:
        yield
        return
    _moved(network, device)
    try:
        yield
    finally:
        _moved(network, CPU)


def _moved(network: nn.Module, device: torch.device) -> None:
    """To the device; also where nothing is differentiated, as something that can be."""
    with torch.inference_mode(False):
        network.to(device)
