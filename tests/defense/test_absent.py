"""Clients of SCAFFOLD that were away: their control is a gradient of other weights, so they walk
far, and nobody takes them for forgers; what a forger makes of that is found.

Five clients of linear losses: a gradient g_k is the same wherever the client stands, so

    y_k = x - t_k lr (g_k - c_k + c),   c_k' - c_k = g_k - c_k

It is that of the task, of the client and of the round's images.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedbnn.defense.gate import Candidates
from fedbnn.images import ImageSet
from fedbnn.methods.scaffold import BACKBONE, PROTOTYPES, Scaffold, steps_between
from fedbnn.protocol.messages import Update
from fedbnn.protocol.state import State
from tests.defense.exchanges import Played

CLIENTS, SITES, LR, NEW_TASK, LAST = 5, 400, 0.03, 4, 8
IMAGES = (20, 22, 25, 30, 31)
Forge = Callable[[Update, State], Update]


def steps(images: int) -> int:
    """Five epochs in batches of sixteen."""
    return 5 * math.ceil(images / 16)


@dataclass
class Federation:
    """The server's state, the clients' controls, and their gradients by round."""

    directory: Path
    state: State
    gradients: Tensor
    controls: Tensor = field(default_factory=lambda: torch.zeros(CLIENTS, SITES))

    def answer(self, client: int, round: int) -> Update:
        gradient, server = self.gradients[round, client], self.state[BACKBONE]
        walk = steps(IMAGES[client]) * LR * (gradient - self.controls[client] + server)
        weights = {"backbone": self.state["backbone"] - walk, "buffers": torch.zeros(0)}
        change = {BACKBONE: gradient - self.controls[client]}
        rows = {"prototypes": torch.ones(1, 3), PROTOTYPES: torch.zeros(1, 3)}
        counts = {"cat": IMAGES[client]}
        tensors = weights | change | rows
        return Update("run", round, "train", client, "prior", IMAGES[client], counts, tensors)

    def asked(self, *clients: int, round: int) -> tuple[Played, list[Update]]:
        updates = [self.answer(client, round) for client in clients]
        return Played(Scaffold().aggregator(self.state), self.state, updates), updates

    def judged(self, played: Played, updates: list[Update]) -> Candidates:
        return played.judged(updates, self.directory)

    def play(self, *clients: int, round: int) -> None:
        """One honest round, in which everybody counts in full."""
        played, updates = self.asked(*clients, round=round)
        found = self.judged(played, updates)
        assert (found.refused, found.trust) == ({}, dict.fromkeys(clients, 1.0))
        self.state = played.folded(found)
        for update in updates:
            self.controls[update.client] += update.tensors[BACKBONE]


@pytest.fixture
def away(tmp_path: Path) -> Federation:
    """All were heard in round 1, client 4 not since; the others have learnt a new task."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, SITES, generator=random) / math.sqrt(SITES)

    tasks = normal(2, 1)[[int(number >= NEW_TASK) for number in range(LAST + 1)]]
    gradients = tasks + 0.2 * normal(1, CLIENTS) + 0.1 * normal(LAST + 1, CLIENTS)
    weights = {"backbone": 5 * normal(), "buffers": torch.zeros(0)}
    rows = {"prototypes": torch.ones(1, 3), "prototypes.samples": torch.zeros(1).double()}
    state = Scaffold().start(State(weights | rows, ("cat",)), None, CLIENTS)  # type: ignore[arg-type]
    federation = Federation(tmp_path, state, gradients)
    federation.play(0, 1, 2, 3, 4, round=1)
    for number in range(2, LAST):
        federation.play(0, 1, 2, 3, round=number)
    return federation


def test_who_was_away_walks_farther_than_all_others_and_counts_in_full(away: Federation) -> None:
    played, updates = away.asked(0, 1, 2, 3, 4, round=LAST)
    found = away.judged(played, updates)
    assert (found.refused, found.trust) == ({}, dict.fromkeys(range(CLIENTS), 1.0))
    far = [float((one.tensors["backbone"] - away.state["backbone"]).norm()) for one in updates]
    assert far[4] > 1.7 * max(far[:4])
    never_away = played.judged(updates, away.directory, calm=lambda _client: 0.0)
    assert never_away.trust.get(4, 0.0) < 1


def walks(by: float) -> Forge:
    """Weights so many times as far, and the control that follows from them."""

    def forge(update: Update, start: State) -> Update:
        weights = start["backbone"] + by * (update.tensors["backbone"] - start["backbone"])
        control = by * (update.tensors[BACKBONE] + start[BACKBONE]) - start[BACKBONE]
        return replace(update, tensors=update.tensors | {"backbone": weights, BACKBONE: control})

    return forge


def controls(by: float) -> Forge:
    """Honest weights, with a control so many times as long as follows from them."""

    def forge(update: Update, start: State) -> Update:
        control = by * (update.tensors[BACKBONE] + start[BACKBONE]) - start[BACKBONE]
        return replace(update, tensors=update.tensors | {BACKBONE: control})

    return forge


def stays(update: Update, start: State) -> Update:
    """No step at all, and a control as if there had been one."""
    return replace(update, tensors=update.tensors | {"backbone": start["backbone"]})


FORGERIES = {
    "ten times the walk": walks(10),
    "the walk turned, ten times": walks(-10),
    "six times the control": controls(6),
    "a sixth of the control": controls(1 / 6),
    "no gradient": controls(0),
    "the control turned": controls(-1),
    "a control without a step": stays,
}


@pytest.mark.parametrize("client", [0, 4])
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forger_is_refused_and_nobody_else(forgery: str, client: int, away: Federation) -> None:
    played, updates = away.asked(0, 1, 2, 3, 4, round=LAST)
    updates[client] = FORGERIES[forgery](updates[client], away.state)
    found = away.judged(played, updates)
    assert [*found.refused] == [client]
    assert set(found.trust.values()) == {1.0}


def test_who_was_heard_may_not_walk_as_far_as_who_was_away(away: Federation) -> None:
    played, updates = away.asked(0, 1, 2, 3, 4, round=LAST)
    move = updates[4].tensors["backbone"] - away.state["backbone"]
    far = 1.5 * move, 1.5 * (updates[4].tensors[BACKBONE] + away.state[BACKBONE])
    for client, counts in ((0, False), (4, True)):
        weights = {"backbone": away.state["backbone"] + far[0]}
        control = {BACKBONE: far[1] - away.state[BACKBONE]}
        answers = [*updates]
        answers[client] = replace(
            updates[client], tensors=updates[client].tensors | weights | control
        )
        assert (away.judged(played, answers).trust.get(client) == 1) is counts


def test_what_the_server_remembers_is_not_sent(away: Federation) -> None:
    sent = Scaffold().aggregator(away.state).broadcast(away.state)
    assert sent.notes.keys() == away.state.notes.keys() - {"walks"} == {"registered"}


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 70))
def test_steps_are_between_what_the_images_allow(own: int, other: int, batch: int) -> None:
    """As the loader counts them, which leaves a last batch of a single image out."""

    def batches(images: int) -> int:
        labels = torch.zeros(images, dtype=torch.long)
        shown = ImageSet(torch.zeros(images, 1, 1, 1, dtype=torch.uint8), labels, ("cat",))
        return len(shown.loader(batch, shuffle=True))

    least, most = steps_between(own, other)
    assert least <= batches(own) / batches(other) <= most
