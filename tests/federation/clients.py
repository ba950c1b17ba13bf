"""Client sides that behave, and some that do not; composed in worker processes by their name."""

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedbnn.federation.engines import ClientFailed
from fedbnn.protocol.messages import FitResult
from fedbnn.protocol.state import digest
from fedbnn.seeds import address, forked


class Echo:
    """Answers with what it was sent."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def perform(self, payload: bytes, client: int, private: bytes | None) -> FitResult:
        print("a library that prints")
        return FitResult(
            client,
            payload + b"|%d|%s" % (client, str(self.config).encode()),
            (private or b"") + b"+",
            1.5,
            0.5,
        )


class Trouble(Echo):
    """Does to client k what the configuration says under k."""

    def perform(self, payload: bytes, client: int, private: bytes | None) -> FitResult:
        getattr(self, self.config.get(str(client), "behave"))()
        return super().perform(payload, client, private)

    def behave(self) -> None:
        pass

    def train(self) -> None:
        self.config = {**self.config, "trained": trained_weights()}

    def fail(self) -> None:
        raise ClientFailed("it has no images")

    def raise_defect(self) -> None:
        raise ZeroDivisionError("a defect")

    def sleep(self) -> None:
        time.sleep(600)

    def die(self) -> None:
        os._exit(7)

    def be_killed(self) -> None:
        os.kill(os.getpid(), 9)

    def hang_up(self) -> None:
        for descriptor in range(3, 20):
            with suppress(OSError), socket.socket(fileno=descriptor) as open_one:
                open_one.shutdown(socket.SHUT_RDWR)
        time.sleep(600)

    def eat(self) -> None:
        hoard = torch.ones(2**28)
        time.sleep(600)
        del hoard

    def spin(self) -> None:
        while True:
            pass


def trained_weights() -> str:
    """A small network with convolutions after a few steps: the order of sums shows in its bytes."""
    with forked(address(0, "train")):
        network = nn.Sequential(
            nn.Conv2d(3, 16, 5), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 28 * 28, 10)
        )
        optimizer = torch.optim.Adam(network.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(
                network(torch.randn(16, 3, 32, 32)), torch.randint(10, (16,))
            ).backward()
            optimizer.step()
    return digest(b"".join(p.detach().numpy().tobytes() for p in network.parameters()))


class Slow(Echo):
    """Leaves its process number in a directory, then takes long."""

    def perform(self, payload: bytes, client: int, private: bytes | None) -> FitResult:
        Path(self.config["pids"], str(os.getpid())).touch()
        time.sleep(600)
        raise AssertionError("unreachable")


def trouble(config: Mapping[str, Any]) -> Trouble:
    return Trouble(config)


def slow(config: Mapping[str, Any]) -> Slow:
    return Slow(config)


def broken(config: Mapping[str, Any]) -> Echo:
    raise ValueError("no such data set")


def stillborn(config: Mapping[str, Any]) -> Echo:
    os._exit(3)


def never_composed(config: Mapping[str, Any]) -> Echo:
    Path(config["pids"], str(os.getpid())).touch()
    time.sleep(600)
    raise AssertionError("unreachable")
