"""Rows of a class by those of its other holders: by class, and in any direction."""

import math

import pytest
import torch
from torch import Tensor

from fedbnn.heads import checks

WIDTH, CLIENTS = 20, 5
HELD = {client: {"cat": 10, "dog": 5 + client} for client in range(CLIENTS)}


def rows(noise: float = 0.1) -> dict[int, dict[str, Tensor]]:
    """Rows of two classes that point away from each other, and scatter a little by client."""
    source = torch.Generator().manual_seed(0)
    way = torch.randn(WIDTH, generator=source)
    found = {}
    for client in HELD:
        cat, dog = noise * torch.randn(2, WIDTH, generator=source)
        found[client] = {"cat": way + cat, "dog": dog - way}
    return found


def apart(found: dict[int, dict[str, Tensor]], held: checks.Counts = HELD) -> dict[int, float]:
    return {client: far for client, (far, _) in checks.apart_in_rows(found, held, "rows").items()}


@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.1, 1.0])
def test_honest_rows_count_in_full(noise: float) -> None:
    assert max(apart(rows(noise)).values()) < 1


@pytest.mark.parametrize("by", [-20.0, -1.0, 20.0])
def test_a_row_of_another_direction_or_length_is_far_out_and_nobody_else(by: float) -> None:
    found = rows()
    found[2]["cat"] = by * found[2]["cat"]
    far = apart(found)
    assert far.pop(2) > 2
    assert max(far.values()) < 1


def test_rows_under_the_names_of_other_classes_are_far_out() -> None:
    found = rows()
    found[0] = {"cat": found[0]["dog"], "dog": found[0]["cat"]}
    assert apart(found)[0] > 2


def test_two_holders_judge_nobody_and_who_holds_nothing_is_not_asked() -> None:
    found = {client: own for client, own in rows().items() if client < 2}
    assert not apart(found)
    nothing = {**HELD, 4: {"cat": 0, "dog": 0}}
    assert 4 not in apart(rows(), nothing)


def test_few_images_are_allowed_to_scatter() -> None:
    found = rows()
    found[0]["cat"] = found[0]["cat"] + 0.3 * torch.randn(WIDTH, generator=torch.Generator())
    few = {**HELD, 0: {"cat": 1, "dog": 5}}
    assert apart(found, few)[0] < apart(found)[0]


def turned(found: dict[int, dict[str, Tensor]], held: checks.Counts = HELD) -> dict[int, float]:
    return {client: far for client, (far, _) in checks.apart_in_contrasts(found, held).items()}


def led_astray(found: dict[int, dict[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
    """Rows of a first round: each client's images lead all of its rows some way of their own."""
    source = torch.Generator().manual_seed(1)
    ways = {client: 5 * torch.randn(WIDTH, generator=source) for client in found}
    return {k: {one: row + ways[k] for one, row in own.items()} for k, own in found.items()}


@pytest.mark.parametrize("noise", [0.0, 0.1, 1.0])
def test_what_all_rows_of_a_client_share_tells_no_classes_apart(noise: float) -> None:
    found = rows(noise)
    assert turned(led_astray(found)) == pytest.approx(turned(found), abs=1e-6)
    assert max(turned(found).values()) < 1


@pytest.mark.parametrize("by", [-1.0, -20.0])
def test_a_new_class_told_the_other_way_round_is_found_where_no_row_can_be_compared(
    by: float,
) -> None:
    found = led_astray(rows())
    assert max(apart(found).values()) < 1
    found[3] = {one: by * row for one, row in rows()[3].items()}
    far = turned(found)
    assert far.pop(3) > 2
    assert max(far.values()) < 1


def test_swapping_two_of_three_classes_is_turning_them() -> None:
    """With the third row in the middle the cosine is that of two classes: -1."""
    found = {k: {**own, "owl": (own["cat"] + own["dog"]) / 2} for k, own in rows(0.0).items()}
    held = {client: {"cat": 10, "dog": 5, "owl": 3} for client in HELD}
    found[1]["cat"], found[1]["dog"] = found[1]["dog"], found[1]["cat"]
    assert turned(found, held)[1] == pytest.approx(1 / checks.TURNED)


@pytest.mark.parametrize("images", [2, 10])
def test_contrasts_of_learnt_rows_weigh_by_the_images_behind_them(images: int) -> None:
    """u_k = 10 n_k / median_j n_j where everybody tells cats and dogs apart the other way."""
    found, whole = rows(0.0), {"cat": 10, "dog": 10}
    found[0] = {"cat": found[0]["dog"], "dog": found[0]["cat"]}
    held = dict.fromkeys(range(1, CLIENTS), whole) | {0: {"cat": images // 2, "dog": images // 2}}
    assert turned(found, held)[0] == pytest.approx(images / 20 / checks.TURNED)


@pytest.mark.parametrize(("images", "far"), [(1, 1 / 16), (4, 0.25), (16, 1.0)])
def test_contrasts_of_means_count_by_how_much_farther_than_by_chance_they_are(
    images: int, far: float
) -> None:
    """Of |2 x|^2 = 4 apart, 16 S (1 - 1 / 2) (2 / n + 2 / n) = 64 / n are allowed for at S = 2."""
    half = torch.zeros(WIDTH)
    half[0] = 1 / math.sqrt(2)
    found = {k: {"cat": half, "dog": -half} for k in range(1, CLIENTS)}
    found[0] = {"cat": -half, "dog": half}
    held = {k: {"cat": images, "dog": images} for k in range(CLIENTS)}
    judged = checks.apart_in_contrasts(found, held, "class means", variance=2.0)
    assert judged[0] == (pytest.approx(far / checks.TURNED), "class means")


def test_two_others_with_the_same_two_classes_are_needed_to_see_a_turn() -> None:
    found = rows()
    found[0] = {"cat": found[0]["dog"], "dog": found[0]["cat"]}
    assert not turned({client: found[client] for client in (0, 1)})
    cats = {client: {"cat": 10, "dog": 0} for client in (2, 3, 4)}
    assert not turned(found, {**HELD, **cats})
    assert turned(found, {**HELD, 3: cats[3], 4: cats[4]})[0] > 2


def test_who_leans_to_other_classes_than_everybody_is_not_judged_by_them() -> None:
    """First steps lead the rows of a client to the classes it has most images of."""
    found = rows()
    found[0] = {"cat": found[0]["dog"], "dog": found[0]["cat"]}
    cats, dogs = {"cat": 31, "dog": 8}, {"cat": 7, "dog": 37}
    held = dict.fromkeys(range(1, CLIENTS), dogs) | {0: cats}
    assert 0 not in turned(found, held)
    assert turned(found, {**held, 1: cats, 2: cats})[0] > 2
    assert turned(found, {**held, 1: {"cat": 5, "dog": 5}, 2: cats})[0] > 2


def test_rows_that_do_not_differ_are_turned_nowhere() -> None:
    same = {client: dict.fromkeys(own, own["cat"]) for client, own in rows().items()}
    assert set(turned(same).values()) == {0.0}
