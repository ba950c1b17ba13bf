"""States, the library in them, the wire and the seeds: values that are equal give equal bytes."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbnn.evaluation.metrics import scale_quantiles
from fedbnn.heads import prototypes
from fedbnn.heads.prototypes import Assembly
from fedbnn.protocol.messages import FitInstruction
from fedbnn.protocol.state import Malformed, State, unpack
from fedbnn.seeds import address, forked, generator


def filled(scale: bool = False) -> State:
    tensors = {
        "backbone": torch.zeros(2),
        "buffers": torch.zeros(0),
        "prototypes": torch.ones(1, 4),
        "prototypes.samples": torch.tensor([3.0]).double(),
    }
    if scale:
        tensors |= {"backbone.scale": torch.ones(2), "prototypes.scale": torch.full((1, 4), 0.3)}
    return State(tensors, ("b",))


@pytest.mark.parametrize("scale", [False, True])
def test_new_rows_are_zero_fresh_and_the_same_everywhere(scale: bool) -> None:
    state = filled(scale)
    grown = prototypes.grow(state, ["c", "a", "b"], 0.1)
    assert grown.classes == ("b", "a", "c")
    assert torch.equal(grown["prototypes"], torch.cat([torch.ones(1, 4), torch.zeros(2, 4)]))
    assert grown["prototypes.samples"].tolist() == [3, 0, 0]
    assert prototypes.trained(grown) == ("b",)
    assert Assembly(grown, ("c", "b"), 1).fresh.tolist() == [True, False]
    assert ("prototypes.scale" in grown) == scale
    if scale:
        assert grown["prototypes.scale"][1:].unique().tolist() == pytest.approx([0.1])
        assert torch.equal(grown["prototypes.scale"][:1], state["prototypes.scale"])
    assert (
        prototypes.grow(state, ["a", "c"], 0.1).to_bytes()
        == prototypes.grow(state, ["c", "a"], 0.1).to_bytes()
    )


def test_known_classes_add_nothing() -> None:
    state = filled()
    assert prototypes.grow(state, ["b"], 0.1) is state


def test_a_state_survives_its_bytes_and_is_not_changed_by_having_more() -> None:
    state = filled(True)
    back = State.from_bytes(state.having({}, note=[1, 2]).to_bytes())
    assert back.classes == state.classes
    assert back.notes == {"note": [1, 2]}
    assert back.tensors.keys() == state.tensors.keys()
    assert all(torch.equal(back[name], value) for name, value in state.tensors.items())
    more = state.having({"backbone": torch.ones(2)})
    assert state["backbone"].tolist() == [0, 0]
    assert more["backbone"].tolist() == [1, 1]
    with pytest.raises(TypeError):
        state.tensors["backbone"] = torch.ones(2)  # type: ignore[index]


def test_equal_states_give_equal_bytes_whatever_the_order_of_their_parts() -> None:
    state = filled(True)
    turned = State(dict(reversed(state.tensors.items())), state.classes)
    assert turned.to_bytes() == state.to_bytes()
    assert state.having({"backbone": torch.ones(2)}).to_bytes() != state.to_bytes()


def test_two_names_for_one_memory_can_be_sent() -> None:
    weights = torch.arange(4.0)
    payload = FitInstruction(
        "run",
        1,
        "statistics",
        State({"backbone": weights, "backbone.before": weights, "part": weights[:2]}),
    ).to_bytes()
    back = FitInstruction.from_bytes(payload).state
    assert torch.equal(back["backbone.before"], weights)
    assert torch.equal(back["part"], weights[:2])
    apart = State(
        {"backbone": weights, "backbone.before": weights.clone(), "part": weights[:2].clone()}
    )
    assert FitInstruction("run", 1, "statistics", apart).to_bytes() == payload


def test_a_pickle_is_not_a_message() -> None:
    with pytest.raises(Malformed):
        unpack(pickle.dumps({"backbone": torch.zeros(2)}))


@given(st.integers(0, 2**40), st.integers(0, 999), st.integers(0, 999))
def test_addresses_are_the_same_everywhere_and_differ_from_their_neighbours(
    seed: int, round: int, client: int
) -> None:
    here = address(seed, "train", round, client)
    assert here == address(seed, "train", round, client)
    assert 0 <= here < 2**63
    others = [
        address(seed + 1, "train", round, client),
        address(seed, "train", round + 1, client),
        address(seed, "test", round, client),
    ]
    assert here not in others


def test_addresses_do_not_depend_on_the_machine() -> None:
    assert address(3, "train", 7, 12) == 8481924579108354992


def test_a_fork_leaves_no_trace() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with forked(5):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with forked(5):
        assert torch.equal(torch.rand(3), inside)
    assert torch.equal(
        torch.rand(2, generator=generator(1, "x")), torch.rand(2, generator=generator(1, "x"))
    )


def test_quantiles_of_scales_are_those_of_numpy_and_none_for_points() -> None:
    assert scale_quantiles(filled()) is None
    scales = torch.linspace(0.1, 0.9, 101)
    found = scale_quantiles(filled(True).having({"backbone.scale": scales}))
    assert found is not None
    assert found["scale"]["backbone"] == pytest.approx([0.14, 0.5, 0.86], abs=1e-5)
    assert found["scale"]["prototypes"] == pytest.approx([0.3] * 3)
