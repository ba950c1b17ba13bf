"""A run without what is made of it, for scripts that play many: its last state, and its records."""

import json
from typing import Any

from fedbnn.evaluation.evaluate import Evaluator
from fedbnn.federation import server
from fedbnn.federation.experiment import Experiment, budget
from fedbnn.federation.parts import Federation
from fedbnn.state import State
from fedbnn.storage.files import Rejected
from fedbnn.storage.ledger import Ledger


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
