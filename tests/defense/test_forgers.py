"""Row: one of five forges precision x1e6, flips sign, scales, sends zeros -> with the default gate,
through the real fold, the error stays within twice that of honest clients, and honest clients are
left alone."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from fedbnn.defense.gate import Gate
from fedbnn.methods.fedbnn import FedBNN
from fedbnn.protocol.messages import Update
from tests.defense.worlds import CLIENTS, Attack, World, errors, forged, judged, truth_and_updates

WORLDS = {
    "unit prior": World(),
    "weak prior, far truth": World(distance=5.0, prior_precision=0.01),
    "strong prior, truth within noise": World(distance=0.1, prior_precision=100.0),
    "strong data": World(samples=(6000,) * CLIENTS),
    "unequal clients": World(samples=(30, 60, 120, 60, 21)),
    "the forger is the largest": World(samples=(30, 60, 60, 60, 120)),
    "clients that differ": World(samples=(600,) * CLIENTS, spread=0.3),
    "clients that differ more than they agree": World(
        samples=(300, 600, 1200, 600, 600), spread=1.5
    ),
    "a new class at one client": World(new_class=True),
}
ATTACKS: dict[str, Attack] = {
    "precision x 1e6": lambda precision, info: (precision * 1e6, info),
    "precision x 1e6 at the wrong place": lambda precision, info: (precision * 1e6, -info * 1e6),
    "sign flipped": lambda precision, info: (precision, -info),
    "scaled x 10": lambda precision, info: (precision, info * 10),
    "scaled x 100": lambda precision, info: (precision, info * 100),
    "scaled x -100": lambda precision, info: (precision, info * -100),
    "zeros": lambda precision, info: (precision * 0, info * 0),
}
OF_ROWS = ("precision x 1e6", "precision x 1e6 at the wrong place", "scaled x 100", "scaled x -100")
SEEDS = range(3)


def harm(
    world: World,
    attack: Attack,
    sites: tuple[str, ...],
    fold_by: str,
    directory: Path,
    gate: Gate,
    server_lr: float = 1.0,
) -> float:
    """Error with the last client forged over that with all honest: worst of parts and of draws."""
    method, found = FedBNN(fold_by=fold_by, server_lr=server_lr), []  # type: ignore[arg-type]
    for seed in SEEDS:
        truth, updates = truth_and_updates(world, fold_by, seed)
        updates[-1] = forged(updates[-1], attack, sites)
        spoiled = errors(
            world, method, judged(world, method, updates, directory / str(seed), gate), truth
        )
        honest = honest_errors(world, method, seed, gate)
        found += [spoiled[site] / honest[site] for site in honest]
    return max(found)


@cache
def honest_errors(world: World, method: FedBNN, seed: int, gate: Gate) -> dict[str, float]:
    """The errors where nobody forges."""
    truth, updates = truth_and_updates(world, method.fold_by, seed)
    with TemporaryDirectory() as directory:
        return errors(world, method, judged(world, method, updates, Path(directory), gate), truth)


@pytest.mark.parametrize("world", WORLDS)
def test_honest_clients_are_left_alone(tmp_path: Path, world: str) -> None:
    for seed in range(10):
        _, updates = truth_and_updates(WORLDS[world], "scaled", seed)
        assert judged(
            WORLDS[world], FedBNN(), updates, tmp_path / str(seed), Gate()
        ).trust == dict.fromkeys(range(CLIENTS), 1.0)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("world", WORLDS)
def test_a_forger_stays_within_twice_the_honest_error(
    tmp_path: Path, world: str, attack: str
) -> None:
    assert (
        harm(WORLDS[world], ATTACKS[attack], ("backbone", "prototypes"), "scaled", tmp_path, Gate())
        < 2
    )


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("world", WORLDS)
def test_so_it_does_where_the_server_goes_further(tmp_path: Path, world: str, attack: str) -> None:
    assert (
        harm(
            WORLDS[world],
            ATTACKS[attack],
            ("backbone", "prototypes"),
            "scaled",
            tmp_path,
            Gate(),
            server_lr=2.0,
        )
        < 2
    )


@pytest.mark.parametrize("server_lr", [1.0, 2.0])
@pytest.mark.parametrize("left", [0.9, 0.4, 1e-3])
def test_a_forger_who_takes_certainty_away_stays_within_it(
    tmp_path: Path, left: float, server_lr: float
) -> None:
    """Of the prior's precision only `left` stays, and the mean is pulled the other way."""
    world = WORLDS["unit prior"]

    def attack(precision: torch.Tensor, info: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full_like(precision, (left - 1) * world.prior_precision), -info

    assert (
        harm(world, attack, ("backbone", "prototypes"), "scaled", tmp_path, Gate(), server_lr) < 2
    )


@pytest.mark.parametrize("attack", ["precision x 1e6", "sign flipped", "scaled x 100"])
@pytest.mark.parametrize(
    "world", [name for name, world in WORLDS.items() if len(set(world.samples)) == 1]
)
def test_so_it_does_where_factors_are_multiplied(tmp_path: Path, world: str, attack: str) -> None:
    assert (
        harm(
            WORLDS[world], ATTACKS[attack], ("backbone", "prototypes"), "product", tmp_path, Gate()
        )
        < 2
    )


@pytest.mark.parametrize("attack", OF_ROWS)
@pytest.mark.parametrize("world", WORLDS)
def test_a_forger_of_rows_alone_stays_within_it(tmp_path: Path, world: str, attack: str) -> None:
    assert harm(WORLDS[world], ATTACKS[attack], ("prototypes",), "scaled", tmp_path, Gate()) < 2


@pytest.mark.parametrize("sites", [("backbone",), ("prototypes",)])
def test_without_a_cap_one_forged_precision_ruins_the_mean(
    tmp_path: Path, sites: tuple[str, ...]
) -> None:
    attack = ATTACKS["precision x 1e6"]
    assert (
        harm(
            WORLDS["weak prior, far truth"],
            attack,
            sites,
            "scaled",
            tmp_path,
            Gate(influence_cap=None),
        )
        > 50
    )


@pytest.mark.parametrize("strength", [1.5, 2, 3, 5, 8, 12, 20, 50])
@pytest.mark.parametrize(
    "world",
    ["unit prior", "strong data", "strong prior, truth within noise", "clients that differ"],
)
def test_no_strength_between_honest_and_gross_does_much_more(
    tmp_path: Path, world: str, strength: float
) -> None:
    for name, attack in {
        "precision": lambda precision, info: (precision * strength, info),
        "scaled": lambda precision, info: (precision, info * strength),
        "flipped": lambda precision, info: (precision, info * -strength),
    }.items():
        assert harm(WORLDS[world], attack, ("backbone",), "scaled", tmp_path / name, Gate()) < 2.4


def test_the_owner_of_a_new_class_keeps_its_trust_beside_a_forger(tmp_path: Path) -> None:
    world, method = WORLDS["a new class at one client"], FedBNN()
    _, updates = truth_and_updates(world, "scaled", 0)
    updates[-1] = forged(updates[-1], ATTACKS["precision x 1e6"], ("prototypes",))
    candidates = judged(world, method, updates, tmp_path, Gate())
    assert candidates.trust == dict.fromkeys(range(CLIENTS - 1), 1.0)
    assert (
        candidates.refused[CLIENTS - 1]
        == "its prototypes.precision are 1e+06 times as long as usual"
    )


def test_two_forgers_of_five_do_not_outvote_three(tmp_path: Path) -> None:
    world, method = WORLDS["unit prior"], FedBNN()
    _, updates = truth_and_updates(world, "scaled", 0)
    updates[3:] = [
        forged(update, ATTACKS["precision x 1e6"], ("backbone",)) for update in updates[3:]
    ]
    assert judged(world, method, updates, tmp_path, Gate()).trust == dict.fromkeys(range(3), 1.0)


@pytest.mark.parametrize("idle", [1, 2, 3])
def test_clients_that_learned_nothing_have_no_vote_and_are_not_refused(
    tmp_path: Path, idle: int
) -> None:
    world, method = WORLDS["unit prior"], FedBNN()
    _, updates = truth_and_updates(world, "scaled", 0)
    nearly = {
        "backbone.precision": 1e-7,
        "backbone.info": 1e-11,
        "prototypes.precision": 1e-7,
        "prototypes.info": 1e-11,
    }
    for client in range(idle):
        nothing = {
            name: torch.full_like(tensor, nearly.get(name, 0.0))
            for name, tensor in updates[client].tensors.items()
        }
        updates[client] = type(updates[client])(**{**vars(updates[client]), "tensors": nothing})
    trust = judged(world, method, updates, tmp_path, Gate()).trust
    assert list(trust) == list(range(CLIENTS))
    assert [trust[client] for client in range(idle, CLIENTS)] == [1.0] * (CLIENTS - idle)


@pytest.mark.parametrize("site", ["backbone", "prototypes"])
@pytest.mark.parametrize(("left", "refused"), [(-1.0, True), (0.0, True), (1e-3, False)])
def test_a_factor_must_leave_some_precision(
    tmp_path: Path, site: str, left: float, refused: bool
) -> None:
    world, method = WORLDS["unit prior"], FedBNN()
    _, updates = truth_and_updates(world, "scaled", 0)

    def attack(precision: torch.Tensor, info: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spoiled = precision.clone()
        spoiled.view(-1)[3] = (left - 1) * world.prior_precision
        return spoiled, info * 0

    reasons = judged(
        world, method, [*updates[:-1], forged(updates[-1], attack, (site,))], tmp_path, Gate()
    ).refused
    assert (reasons.get(CLIENTS - 1) == f"the precision of {site} is not positive") == refused


def test_a_row_far_longer_than_those_of_the_library_is_refused_whoever_else_answers(
    tmp_path: Path,
) -> None:
    world, method = WORLDS["unit prior"], FedBNN()
    _, updates = truth_and_updates(world, "scaled", 0)
    longer = forged(updates[0], ATTACKS["scaled x 100"], ("prototypes",))
    reasons = judged(
        world, method, [longer, *updates[1:]], tmp_path, Gate(influence_cap=None)
    ).refused
    assert reasons[0].startswith("a prototype is ")
    assert reasons[0].endswith("times as long as those of the server")


Together = Callable[[torch.Tensor], torch.Tensor]
COLLUSIONS: dict[str, Together] = {
    "a little is enough, z = 1": lambda honest: honest.mean(0) - honest.std(0),
    "inner product, half": lambda honest: -0.5 * honest.mean(0),
    "inner product, whole": lambda honest: -honest.mean(0),
    "all say the same": lambda honest: honest.mean(0) + 3 * honest.std(0),
}


def colluding(updates: list[Update], how: Together, liars: int) -> list[Update]:
    """The last ones know what all others send, and agree on what to say instead."""
    told = {}
    for site in ("backbone", "prototypes"):
        honest = torch.stack([one.tensors[f"{site}.info"] for one in updates[:-liars]])
        told[f"{site}.info"] = how(honest)
    lies = [replace(one, tensors={**one.tensors, **told}) for one in updates[-liars:]]
    return [*updates[:-liars], *lies]


@pytest.mark.parametrize("how", COLLUSIONS)
@pytest.mark.parametrize("liars", [1, 2])
def test_liars_who_agree_do_bounded_harm(tmp_path: Path, how: str, liars: int) -> None:
    """They pass where they stay among the others: one does as little as any forger, two do more."""
    world, method = WORLDS["unit prior"], FedBNN()
    truth, updates = truth_and_updates(world, "scaled", 0)
    honest = errors(world, method, judged(world, method, updates, tmp_path / "0", Gate()), truth)
    lies = colluding(updates, COLLUSIONS[how], liars)
    found = errors(world, method, judged(world, method, lies, tmp_path / "1", Gate()), truth)
    assert max(found[site] / honest[site] for site in found) < {1: 2.0, 2: 3.5}[liars]
