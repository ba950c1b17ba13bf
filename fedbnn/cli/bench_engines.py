"""The same round by different engines, in turn; and what a round costs outside forward, backward and optimiser."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any

from fedbnn.cli.interleaved import interleaved, summary
from fedbnn.federation.engines import Engine
from fedbnn.federation.local import LocalTraining
from fedbnn.federation.runner import Plan
from fedbnn.heads.places import EXCHANGE
from fedbnn.messages import FitInstruction, FitResult


def measure(
    plan: Plan, engines: Mapping[str, Callable[[], Engine]], repeats: int
) -> list[dict[str, Any]]:
    """Rounds 1, 2, ... of the plan's stream by each engine; the workers are started before the clock is."""
    running = {name: make() for name, make in engines.items()}
    try:
        turns = {name: _Turns(plan, engine) for name, engine in running.items()}
        seconds = interleaved({name: turn.play for name, turn in turns.items()}, repeats, warm=1)
    finally:
        for engine in running.values():
            engine.close()
    rows = summary(seconds, next(iter(engines)))
    return [
        {**row, "same_bytes": turns[row["name"]].updates == next(iter(turns.values())).updates}
        for row in rows
    ]


class _Turns:
    """Plays one round after the other with one engine, and remembers what came back."""

    def __init__(self, plan: Plan, engine: Engine) -> None:
        self.plan, self.engine, self.number = plan, engine, 0
        self.updates: list[dict[int, bytes]] = []

    def play(self) -> None:
        """The training exchange of the next round (after the last the first again), from the state of the first."""
        self.number = self.number % self.plan.stream.rounds + 1
        clients = self.plan.stream.participants(self.number)
        answers = self.engine.gather(self._order(clients), clients, lambda _: None)
        self.updates.append(
            {one.client: one.update for one in answers if isinstance(one, FitResult)}
        )

    def _order(self, clients: Sequence[int]) -> bytes:
        counts = [self.plan.stream.counts(self.number, client) for client in clients]
        classes = sorted({name for one in counts for name in one})
        state = self.plan.method.prepare(self.plan.initial, self.number, classes, self.plan.layout)
        totals = {name: sum(one.get(name, 0) for one in counts) for name in classes}
        return FitInstruction(
            "bench", self.number, "train", state, sum(totals.values()), totals
        ).to_bytes()


def overhead(
    plan: Plan, local: LocalTraining, lines: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Median shares of a round's time, evaluation left out: all that is not forward, backward or optimiser; making
    batches, measured by making them again; the rest, which is Lightning, assembling, extracting, folding, writing; and the
    exchange of class statistics, forward passes included.
    """
    whole = [line["seconds"]["round"] - line["seconds"]["evaluate"] for line in lines]
    strict = median(
        1 - line["seconds"]["inner"] / time for line, time in zip(lines, whole, strict=True)
    )
    data = median(
        _batches(plan, local, line["round"]) / time for line, time in zip(lines, whole, strict=True)
    )
    exchanged = median(
        line["seconds"].get(EXCHANGE, 0.0) / time for line, time in zip(lines, whole, strict=True)
    )
    shares = {
        "outside_compute": strict,
        "making_batches": data,
        "overhead": strict - data,
        "statistics_exchange": exchanged,
    }
    return {"rounds": len(lines), **shares}


def _batches(plan: Plan, local: LocalTraining, number: int) -> float:
    """Seconds to make all batches of a round once more."""
    start = perf_counter()
    for client in plan.stream.participants(number):
        loader = plan.stream.at(number, client, local.batch_size).train_dataloader()
        for _ in range(local.epochs):
            list(loader)
    return perf_counter() - start
