"""Small worlds for the core: a stream of digits, and a federation on them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from datamodules.stream import FederatedStream
from fedbnn.bayes.flatten import layout_of
from fedbnn.defense.gate import Gate
from fedbnn.federation.engines import SerialEngine
from fedbnn.federation.parts import Federation, check
from fedbnn.heads import LinearHead, prototypes
from fedbnn.methods import Method
from fedbnn.networks import MLP
from fedbnn.protocol.state import State
from fedbnn.seeds import address, forked
from fedbnn.storage.files import Rejected
from fedbnn.storage.ledger import Ledger
from lightning_modules.client_runner import ClientRunner
from lightning_modules.client_trainer import LocalTraining
from tests.core.playing import Federate

LOCAL = LocalTraining(epochs=2, batch_size=16, warmup_epochs=1)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """The same draws in every test, whatever ran before."""
    with forked(20240607):
        yield


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> FederatedStream:
    """Five tasks of two digits, two rounds each; three of eight clients take part in a round."""
    cache = str(tmp_path_factory.mktemp("cache"))
    return FederatedStream(
        sources="digits",
        tasks=5,
        rounds_per_task=2,
        clients=8,
        clients_per_round=3,
        alpha=1.0,
        cache_dir=cache,
        seed=3,
    )


@pytest.fixture
def federate(digits: FederatedStream, tmp_path: Path) -> Iterator[Federate]:
    """A federation of this method on the digits, and the state it begins with.

    Every call has a ledger of its own; `head=GaussianHead()` and other parts replace the usual.
    """
    ledgers: list[Ledger] = []

    def build(
        method: Method,
        seed: int = 3,
        local: LocalTraining = LOCAL,
        stream: Any = digits,
        trainer: Mapping[str, Any] | None = None,
        network: Any = lambda shape: MLP(shape, (16,)),
        **parts: Any,
    ) -> tuple[Federation, State]:
        with forked(address(seed, "network")):
            backbone = network(stream.image_shape)
        layout = layout_of(backbone)
        weights, buffers = layout.read(backbone)
        rows = prototypes.empty(backbone.width) if method.shares_prototypes else {}
        head, settled = parts.get("head", LinearHead()), (local, trainer or {}, seed)
        work = ClientRunner(stream, backbone, layout, method, head, *settled, parts.get("privacy"))
        ledgers.append(Ledger(tmp_path / f"run{len(ledgers)}"))
        settings = {
            "run": "test",
            "stream": stream,
            "method": method,
            "head": LinearHead(),
            "backbone": backbone,
            "layout": layout,
            "engine": SerialEngine(work),
            "gate": Gate(),
            "ledger": ledgers[-1],
            "rejected": Rejected(tmp_path / "rejected"),
            "evaluate": lambda *_: {},
            "watchers": (),
        }
        made = Federation(**{**settings, **parts})
        rules = made.privacy, made.gate, made.late
        check(*rules, made.method, made.head, made.layout, made.stream)
        return made, State({"backbone": weights, "buffers": buffers, **rows})

    yield build
    for ledger in ledgers:
        ledger.close()
