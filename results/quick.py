"""Runs without pages and pictures, for scripts that play many of them.

Runs that differ in a lie or in a defence share all that is the same: an answer is remembered by
what was asked, so the rounds before a lie, or after a refused one, are trained once.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fedbnn
from fedbnn.evaluation.evaluate import Evaluator
from fedbnn.federation import server
from fedbnn.federation.engines import Answer, Engine, Private
from fedbnn.federation.experiment import Experiment, budget
from fedbnn.federation.parts import Federation
from fedbnn.protocol.state import State, digest
from fedbnn.storage.files import Rejected
from fedbnn.storage.ledger import Ledger

Asked = tuple[str, int, str]


@dataclass(frozen=True)
class Remembering:
    """An engine that answers what it was asked before as it did then."""

    engine: Engine
    known: dict[Asked, Answer]

    def gather(self, payload: bytes, clients: Sequence[int], private: Private) -> Iterator[Answer]:
        """One answer for each client, in their order."""
        whole = digest(payload)
        for client in clients:
            asked = (whole, client, digest(private(client) or b""))
            if asked not in self.known:
                [self.known[asked]] = self.engine.gather(payload, [client], private)
            yield self.known[asked]

    def close(self) -> None:
        """Let go of the other engine."""
        self.engine.close()


def results(config: str, out: Path, **settings: Any) -> dict[str, Any]:
    """What a run in this directory achieved; it is begun or gone on with if it has to be."""
    if not (out / "results.json").is_file():
        begun = {"resume": str(out)} if (out / "state" / "config.json").is_file() else {}
        told = {"run_dir": str(out), "report": False, "track.wandb": "off", **settings, **begun}
        fedbnn.run(config, **told)
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


def played(made: Experiment) -> tuple[State, list[dict[str, Any]]]:
    """All rounds, as the command plays them."""
    seed = int(made.config["seed"])
    parts = made.stream, made.method, made.head, made.backbone, made.layout, made.engine
    judge = Evaluator(made.stream, made.backbone, made.layout, made.head, made.evaluation, seed)
    rejected = Rejected(made.run_dir / "rejected", 0)
    with Ledger(made.run_dir) as ledger:
        private = {"privacy": made.privacy, "budget": budget(made, ledger)}
        beside = made.gate, ledger, rejected, judge, ()
        federation = Federation(f"quick-{seed}", *parts, *beside, **private)
        state = server.run(federation, made.initial)
        return state, [json.loads(line) for _, line in ledger.records()]
