"""A whole small federation: ledger, gate, serial engine, records and a conjugate Gaussian whose
clients keep state."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fedbnn.defense.gate import Candidates, ExpectedUpdate, Gate
from fedbnn.federation.engines import Engine, SerialEngine
from fedbnn.methods.aggregation import influence_of_factor
from fedbnn.protocol.messages import FitInstruction, FitResult, Update
from fedbnn.protocol.state import State, content_digest
from fedbnn.seeds import generator
from fedbnn.storage import run_dir as directory
from fedbnn.storage.files import Rejected, append_line
from fedbnn.storage.ledger import METRICS, Ledger

SITES, CLIENTS, SAMPLES = 30, 5, 20
CONFIG = {"name": "toy"}
SPEC = {"precision": ((SITES,), torch.float64), "info": ((SITES,), torch.float64)}
INITIAL = State(
    {
        "precision": torch.ones(SITES, dtype=torch.float64),
        "info": torch.zeros(SITES, dtype=torch.float64),
    }
)


NOTHING = State({"visits": torch.zeros(()), "last": INITIAL["info"]})
KEPT = {"visits": ((), torch.float32), "last": ((SITES,), torch.float64)}


def participants(round: int) -> list[int]:
    return torch.randperm(CLIENTS, generator=generator(0, "who", round))[:3].sort().values.tolist()


class Client:
    """Sends the factor of its own noisy data; remembers how often it was asked and what it sent."""

    def perform(self, payload: bytes, client: int, private: bytes | None) -> FitResult:
        instruction = FitInstruction.from_bytes(payload)
        memory = State.from_bytes(private) if private else NOTHING
        noise = torch.randn(
            SITES, generator=generator(0, "data", instruction.round, client), dtype=torch.float64
        )
        info = SAMPLES * (1 + memory["visits"] / 100) + SAMPLES**0.5 * noise + memory["last"] / 1000
        tensors = {
            "precision": torch.full((SITES,), float(SAMPLES), dtype=torch.float64),
            "info": info,
        }
        update = Update(
            instruction.run,
            instruction.round,
            instruction.exchange,
            client,
            content_digest(payload),
            SAMPLES,
            {"all": SAMPLES},
            tensors,
        )
        kept = State({"visits": memory["visits"] + 1, "last": info})
        return FitResult(client, update.to_bytes(), kept.to_bytes())


def point(state: State) -> Callable[[Update], Iterator[Tensor]]:
    loc, scale = (state["info"] / state["precision"]).float(), state["precision"].rsqrt().float()
    return lambda update: influence_of_factor(
        loc, scale, update.tensors["precision"].float(), update.tensors["info"].float()
    )


def folded(state: State, candidates: Candidates) -> State:
    """Product of factors, in client order."""
    precision, info = state["precision"].clone(), state["info"].clone()
    for update, trust in candidates:
        precision += trust * update.tensors["precision"]
        info += trust * update.tensors["info"]
    return State({"precision": precision, "info": info})


def play(ledger: Ledger, engine: Engine, state: State, round: int, gate: Gate) -> State:
    """One round."""
    payload = FitInstruction("toy", round, "train", state).to_bytes()
    sample_counts: Mapping[int, Mapping[str, int]] = {
        client: {"all": SAMPLES} for client in participants(round)
    }
    free = (lambda classes: SPEC, lambda update: None, point(state), lambda update: {})
    asked = ("toy", round, "train", content_digest(payload), sample_counts, *free)
    call = ExpectedUpdate(*asked, kept=lambda own, announced: KEPT)
    with ledger.spool(round, "train") as spool:
        candidates = Candidates(gate, call, spool, Rejected(ledger.run_dir / "rejected"))
        privates: dict[int, bytes] = {}
        for answer in engine.gather(payload, sorted(sample_counts), ledger.private):
            if (
                candidates.admit(answer)
                and isinstance(answer, FitResult)
                and answer.private is not None
            ):
                privates[answer.client] = answer.private
        candidates.close()
        state = folded(state, candidates)
        record = {
            "round": round,
            "clients": sorted(sample_counts),
            "accepted": list(candidates.trust),
            "bytes_up": candidates.bytes_up,
        }
        ledger.commit(round, state, privates, record)
    append_line(ledger.run_dir / METRICS, record)
    return state


def run(
    run_dir: Path, rounds: int = 2, engine: Engine | None = None, gate: Gate | None = None
) -> None:
    """Start the run, or go on with it."""
    with Ledger(run_dir, keep=1) as ledger:
        resumed = (run_dir / "state" / "config.json").exists()
        directory.resume(ledger, CONFIG) if resumed else directory.start(ledger, CONFIG)
        latest = ledger.latest()
        directory.reconcile(ledger)
        state = latest.state if latest else INITIAL
        for round in range(ledger.round + 1, rounds + 1):
            state = play(ledger, engine or SerialEngine(Client()), state, round, gate or Gate())
        directory.finish(ledger)


def fingerprint(run_dir: Path) -> str:
    """sha256 of all that a finished run leaves: every file but the lock, which holds a pid."""
    total = hashlib.sha256()
    for path in sorted(run_dir.rglob("*")):
        if path.is_file() and path.name != "lock":
            total.update(os.fsencode(path.relative_to(run_dir)) + path.read_bytes())
    return total.hexdigest()
