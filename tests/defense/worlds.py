"""Conjugate worlds: five clients learn the mean of unit-variance data, in a backbone and in rows,
and FedBNN folds them.

n images with the mean x give the factor (n, n x), and x ~ N(truth of the client, 1 / n). The truths
of the clients scatter by `spread` about the one the fold is to find.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedbnn.defense.gate import Candidates, ExpectedUpdate, Gate
from fedbnn.methods.fedbnn import FedBNN
from fedbnn.protocol.messages import FitResult, Update
from fedbnn.protocol.state import State
from fedbnn.storage.files import Rejected, Spool

CLIENTS, SITES, WIDTH = 5, 60, 20
RULES = ("trimmed_mean", "median", "krum", "multi_krum", "clipping")
Attack = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class World:
    """Images by client, how far the truth lies from the prior mean, how sure the prior is, and how
    much clients differ.

    Three classes are learned, by all clients; the last by client 0 alone when `new_class` is true.
    A fourth is old.
    """

    samples: tuple[int, ...] = (60,) * CLIENTS
    distance: float = 1.0
    prior_precision: float = 1.0
    spread: float = 0.0
    new_class: bool = False

    @property
    def classes(self) -> tuple[str, ...]:
        return ("a", "b", "c")

    def counts(self, client: int) -> dict[str, int]:
        """Images by class of a client."""
        held = [name for name in self.classes if not self.new_class or name != "c" or client == 0]
        return dict.fromkeys(held, self.samples[client] // len(held))

    def state(self) -> State:
        """The prior: mean 0 for all that is new."""
        scale, count = self.prior_precision**-0.5, len(self.classes) + 1
        rows = torch.zeros(count, WIDTH)
        rows[-1] = self.distance
        tensors = {
            "backbone": torch.zeros(SITES),
            "backbone.scale": torch.full((SITES,), scale),
            "buffers": torch.zeros(0),
            "prototypes": rows,
            "prototypes.scale": torch.full((count, WIDTH), scale),
            "prototypes.samples": torch.tensor([0.0, 0.0, 0.0, 100.0], dtype=torch.float64),
        }
        return State(tensors, (*self.classes, "old"))


def truth_and_updates(
    world: World, fold_by: str, seed: int
) -> tuple[dict[str, Tensor], list[Update]]:
    """What there is to learn, and what every client sends; `scaled` to the round."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    truth = {
        "backbone": world.distance * normal(SITES),
        "prototypes": world.distance * normal(len(world.classes), WIDTH),
    }
    sample_counts = [world.counts(client) for client in range(CLIENTS)]
    totals = {name: sum(counts.get(name, 0) for counts in sample_counts) for name in world.classes}
    updates = []
    for client, counts in enumerate(sample_counts):
        own = {name: value + world.spread * normal(*value.shape) for name, value in truth.items()}
        rows, samples = [world.classes.index(name) for name in counts], sum(counts.values())
        images = torch.tensor(list(counts.values())).float()[:, None].expand(-1, WIDTH)
        backbone = own["backbone"] + normal(SITES) / math.sqrt(samples)
        heads = own["prototypes"][rows] + normal(len(rows), WIDTH) / images.sqrt()
        said = torch.full((SITES,), float(samples)), images
        if fold_by == "scaled":
            round_of = (
                torch.tensor([totals[name] for name in counts]).float()[:, None].expand(-1, WIDTH)
            )
            said = torch.full((SITES,), float(sum(totals.values()))), round_of
        tensors = {
            "backbone.precision": said[0],
            "backbone.info": said[0] * backbone,
            "buffers": torch.zeros(0),
            "prototypes.precision": said[1].contiguous(),
            "prototypes.info": said[1] * heads,
        }
        updates.append(Update("run", 1, "train", client, "prior", samples, counts, tensors))
    return truth, updates


def forged(update: Update, attack: Attack, sites: tuple[str, ...]) -> Update:
    """The same update with the factors of some sites replaced."""
    changed: dict[str, Tensor] = dict(update.tensors)
    for site in sites:
        changed[f"{site}.precision"], changed[f"{site}.info"] = attack(
            changed[f"{site}.precision"], changed[f"{site}.info"]
        )
    return replace(update, tensors=changed)


def judged(
    world: World, method: FedBNN, updates: list[Update], directory: Path, gate: Gate
) -> Candidates:
    """The answers of one round after the gate."""
    state, sample_counts = world.state(), {update.client: dict(update.counts) for update in updates}
    call = ExpectedUpdate(
        "run",
        1,
        "train",
        "prior",
        sample_counts,
        expected=lambda classes: method.aggregator(state).expected(state, classes),
        defect=lambda update: method.aggregator(state).defect(state, update),
        influence=lambda update: method.aggregator(state).influence(state, update),
        known=lambda update: method.aggregator(state).known(state, update),
        centred=lambda update, sign: method.aggregator(state).centred(state, update, sign),
    )
    candidates = Candidates(
        gate, call, Spool(directory / "spool"), Rejected(directory / "rejected", most=0)
    )
    for update in updates:
        candidates.admit(FitResult(update.client, update.to_bytes()))
    candidates.close()
    return candidates


def errors(
    world: World, method: FedBNN, candidates: Candidates, truth: Mapping[str, Tensor]
) -> dict[str, float]:
    """How far the folded means of backbone and rows are from the truth."""
    fold = method.aggregator(world.state()).fold(world.state())
    for update, trust in candidates:
        fold.add(update, trust)
    state = fold.close()
    return {
        site: float((state[site][: len(truth[site])] - truth[site]).norm())
        for site in ("backbone", "prototypes")
    }
