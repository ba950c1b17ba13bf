"""What no fold may do, whatever its rule."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbnn.methods.posterior_fold import FOLDS
from fedbnn.protocol.messages import Update
from fedbnn.protocol.state import State
from tests.core.posteriors import (
    COUNTS,
    assert_same,
    folded,
    moments,
    prior_state,
    random_update,
    update,
)


@pytest.mark.parametrize("rule", FOLDS)
def test_one_client_alone_is_the_next_posterior(rule: str) -> None:
    state = prior_state(6)
    alone = random_update(state, {"a": 4, "b": 1, "c": 2}, 1)
    found, source = folded(state, [alone], rule), torch.Generator().manual_seed(1)
    (backbone, scale), (rows, row_scale) = moments(source, 5), moments(source, 3, 3)
    for name, expected in {
        "backbone.scale": scale,
        "prototypes": rows,
        "prototypes.scale": row_scale,
    }.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found["backbone"], backbone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rule", FOLDS)
@given(order=st.permutations(range(4)))
def test_the_order_of_clients_changes_nothing(rule: str, order: list[int]) -> None:
    state = prior_state()
    updates = [random_update(state, counts, k) for k, counts in enumerate(COUNTS)]
    assert_same(
        folded(state, [updates[k] for k in order], rule, 0.2), folded(state, updates, rule, 0.2)
    )


@pytest.mark.parametrize("rule", ["scaled", "moments"])
def test_splitting_a_client_in_two_changes_nothing(rule: str) -> None:
    state = prior_state()
    whole, other = random_update(state, {"a": 4, "b": 2}, 1), random_update(state, {"a": 3}, 2)
    halves = [Update("run", 1, "train", k, "", 3, {"a": 2, "b": 1}, whole.tensors) for k in (1, 3)]
    assert_same(folded(state, [*halves, other], rule), folded(state, [whole, other], rule))


@pytest.mark.parametrize("rule", FOLDS)
def test_rows_of_absent_classes_stay_bit_for_bit(rule: str) -> None:
    state = prior_state()
    found = folded(
        state, [random_update(state, {"a": 3}, 1), random_update(state, {"a": 1}, 2)], rule, 0.5
    )
    for name in ("prototypes", "prototypes.scale"):
        assert torch.equal(found[name][1:], state[name][1:])
        assert not torch.equal(found[name][0], state[name][0])
    assert found["prototypes.samples"].tolist() == [4, 0, 0]


@pytest.mark.parametrize("rule", FOLDS)
def test_nobody_changes_nothing_bit_for_bit(rule: str) -> None:
    state = prior_state()
    for updates in (
        [],
        [Update("run", 1, "train", 0, "", 0, {}, random_update(state, {}, 0).tensors)],
    ):
        found = folded(state, updates, rule)
        assert all(torch.equal(value, found[name]) for name, value in state.tensors.items())


@pytest.mark.parametrize("rule", FOLDS)
def test_a_client_without_data_is_neutral_beside_others(rule: str) -> None:
    state = prior_state()
    others = [random_update(state, counts, k) for k, counts in enumerate(COUNTS)]
    absent = Update("run", 1, "train", 9, "", 0, {}, random_update(state, {"a": 1}, 9).tensors)
    assert_same(
        folded(state, [*others, absent], rule, 0.2), folded(state, others, rule, 0.2), rtol=0
    )


@pytest.mark.parametrize("rule", FOLDS)
def test_rows_without_images_behind_them_do_not_count(rule: str) -> None:
    state = prior_state()
    found = folded(state, [random_update(state, {"a": 3, "b": 0}, 1)], rule, 0.5)
    assert torch.equal(found["prototypes"][1], state["prototypes"][1])
    assert torch.equal(found["prototypes.scale"][1], state["prototypes.scale"][1])


@pytest.mark.parametrize("rule", ["scaled", "product"])
def test_a_neutral_factor_leaves_the_prior(rule: str) -> None:
    state = prior_state()
    neutral = update(
        state,
        (state["backbone"], state["backbone.scale"]),
        (state["prototypes"][:1], state["prototypes.scale"][:1]),
        {"a": 2},
    )
    found = folded(state, [neutral], rule)
    torch.testing.assert_close(found["backbone"], state["backbone"], rtol=1e-14, atol=0)
    torch.testing.assert_close(found["backbone.scale"], state["backbone.scale"], rtol=1e-14, atol=0)


@pytest.mark.parametrize("rule", FOLDS)
def test_a_fold_in_float32_stays_in_float32_and_close_to_float64(rule: str) -> None:
    exact = prior_state()
    single = State(
        {name: value.float() for name, value in exact.tensors.items()}, exact.classes
    ).having({"prototypes.samples": torch.zeros(3).double()})
    updates = [random_update(exact, counts, k) for k, counts in enumerate(COUNTS)]
    sent = [
        Update(
            u.run,
            1,
            "train",
            u.client,
            "",
            u.samples,
            u.counts,
            {n: t.float() for n, t in u.tensors.items()},
        )
        for u in updates
    ]
    found = folded(single, sent, rule, 0.2)
    assert {
        found[name].dtype
        for name in ("backbone", "backbone.scale", "prototypes", "prototypes.scale", "buffers")
    } == {torch.float32}
    reference = folded(exact, updates, rule, 0.2)
    torch.testing.assert_close(
        found["backbone"].double(), reference["backbone"], rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        found["backbone.scale"].double(), reference["backbone.scale"], rtol=1e-4, atol=1e-5
    )
