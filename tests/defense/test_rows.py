"""Rows of a class by those of its other holders: by class, and in any direction."""

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
