"""An exchange as it was played: who asked, what was answered, and what a forger makes of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from torch import Tensor

from fedbnn.defense.gate import Candidates, ExpectedUpdate, Gate
from fedbnn.federation import exchange
from fedbnn.protocol.messages import FitResult, Update
from fedbnn.protocol.state import State
from fedbnn.storage.files import Rejected, Spool

Attack = Mapping[str, Callable[[Tensor], Tensor]]
GATE = Gate()


@dataclass(frozen=True)
class Played:
    """One exchange: the aggregator, the state before the fold, and all honest updates."""

    aggregator: Any
    state: State
    updates: Sequence[Update]

    @property
    def name(self) -> str:
        return f"{type(self.aggregator).__name__}/{self.aggregator.exchange}"

    def judged(
        self,
        updates: Sequence[Update],
        directory: Path,
        calm: Callable[[int], float] | None = None,
        settings: Gate = GATE,
    ) -> Candidates:
        """The updates after the gate, which takes the distances for calm that the server does."""
        first, ask = self.updates[0], self.aggregator
        parts = ("expected", "defect", "influence", "known", "apart")
        asked = {name: bound(getattr(ask, name), self.state) for name in parts}
        said = {one.client: dict(one.counts) or {"": one.samples} for one in self.updates}
        where = (first.run, first.round, first.exchange, first.prior)
        usual = exchange._calm(self.aggregator, self.state)
        call = ExpectedUpdate(*where, said, calm=calm or usual, **asked)
        folder = Path(mkdtemp(dir=directory))
        gate = Candidates(settings, call, Spool(folder / "spool"), Rejected(folder, most=0))
        for one in updates:
            gate.admit(FitResult(one.client, one.to_bytes()))
        gate.close()
        return gate

    def folded(self, candidates: Candidates) -> State:
        """The state after those who count."""
        fold = self.aggregator.fold(self.state)
        for update, trust in candidates:
            fold.add(update, trust)
        found: State = fold.close()
        return found

    def forged(self, attack: Attack, client: int = -1) -> list[Update]:
        """All updates, those of one client (the last) with some tensors replaced."""
        updates = [*self.updates]
        tensors = dict(updates[client].tensors)
        tensors |= {name: how(tensors[name]) for name, how in attack.items()}
        updates[client] = replace(updates[client], tensors=tensors)
        return updates


def bound(method: Callable[..., Any], state: State) -> Callable[[Any], Any]:
    return lambda asked: method(state, asked)


def overhear(monkeypatch: pytest.MonkeyPatch) -> list[Played]:
    """Every exchange that is folded from now on."""
    heard: list[Played] = []
    fold = exchange._fold

    def overheard(aggregator: Any, state: State, candidates: Candidates) -> State:
        updates = list(candidates._accepted.values())
        heard.append(Played(aggregator, state, sorted(updates, key=lambda one: one.client)))
        return fold(aggregator, state, candidates)

    monkeypatch.setattr(exchange, "_fold", overheard)
    return heard
