"""FCIL: compensation, relations, exemplars, transitions and the proxy's choice."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, normalize

from fedbnn.bayes.flatten import layout_of
from fedbnn.heads.prototypes import grow
from fedbnn.images import ImageSet
from fedbnn.methods.aggregation import MEAN_ITSELF
from fedbnn.methods.base import Assignment, Replay
from fedbnn.methods.glfc import (
    BEST,
    FCIL,
    GIVEN,
    OLD,
    SIGNALS,
    Compensated,
    ProxyFold,
    compensation,
    herding,
    memorise,
    normalised_entropy,
    prototypes,
    relation_target,
)
from fedbnn.methods.lwf import remember
from fedbnn.networks import MLP, Classifier
from fedbnn.protocol.messages import FitInstruction, Update
from fedbnn.protocol.state import State
from fedbnn.seeds import forked
from lightning_modules.client_trainer import LocalTraining

QUICK = LocalTraining(lr=0.03, epochs=5, batch_size=6)


def test_compensation_weights_average_to_one_over_new_and_over_old() -> None:
    with forked(0):
        probability = torch.rand(50, dtype=torch.float64)
    old = torch.arange(50) % 3 == 0
    weights = compensation(probability, old)
    assert torch.allclose(weights[old].mean(), torch.tensor(1.0, dtype=torch.float64), rtol=1e-12)
    assert torch.allclose(weights[~old].mean(), torch.tensor(1.0, dtype=torch.float64), rtol=1e-12)
    assert weights[~old][probability[~old].argmin()] == weights[~old].max()


def test_compensation_of_perfect_answers_is_one() -> None:
    assert torch.equal(
        compensation(torch.ones(4), torch.tensor([True, False, False, False])), torch.ones(4)
    )


def test_relations_replace_old_columns_and_follow_outside() -> None:
    target, answers = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0.3, 0.7]])
    assert relation_target(target, answers, torch.tensor([2])).tolist() == [
        pytest.approx([1.0, 0.0, 0.3, 0.7])
    ]


def test_herding_follows_its_definition() -> None:
    with forked(0):
        features = torch.randn(12, 4)
    chosen, unit = herding(features, 5).tolist(), normalize(features, dim=1)
    assert len(set(chosen)) == 5
    for step in range(1, 6):
        taken, mean = chosen[: step - 1], unit.mean(0)
        scores = {
            i: float((mean - unit[[*taken, i]].mean(0)).norm()) for i in range(12) if i not in taken
        }
        assert scores[chosen[step - 1]] == pytest.approx(min(scores.values()), abs=1e-6)


def pictures(labels: list[int]) -> ImageSet:
    pixels = torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1)
    return ImageSet(pixels, torch.tensor(labels), ("a", "b", "c"))


def test_memory_is_shared_evenly_and_kept_as_bytes() -> None:
    with forked(0):
        kept = memorise(pictures([0, 0, 0, 0, 1, 1, 1]), torch.randn(7, 3), 5)
    assert Replay().counts({}, kept) == {"a": 2, "b": 2}
    assert Replay().stored(kept) == 4
    assert kept["pixels"].dtype == torch.uint8
    assert set(kept["pixels"].flatten()[kept["labels"] == 1].tolist()) <= {4, 5, 6}


def test_replay_adds_absent_classes_at_the_end_and_is_what_was_announced() -> None:
    pixels = torch.tensor([90, 91, 92], dtype=torch.uint8).view(3, 1, 1, 1)
    memory = State({"pixels": pixels, "labels": torch.tensor([0, 1, 1])}, ("c", "a"))
    images = Replay().images(pictures([0, 1]), memory)
    assert images.pixels.flatten().tolist() == [0, 1, 90]
    assert images.labels.tolist() == [0, 1, 2]
    assert images.counts() == Replay().counts({"a": 1, "b": 1}, memory)
    assert Replay().counts({"a": 1}, None) == {"a": 1}
    assert Replay().images(images, None) is images


def test_normalised_entropy_is_one_for_ignorance_and_zero_for_certainty() -> None:
    assert normalised_entropy(torch.zeros(3, 7).log_softmax(1)) == pytest.approx(1)
    assert normalised_entropy(torch.tensor([[0.0, -200.0]]).log_softmax(1)) == pytest.approx(0)
    assert normalised_entropy(torch.zeros(3, 1).log_softmax(1)) == 0


def test_prototypes_are_nearest_to_their_class_mean() -> None:
    features = torch.tensor([[0.0], [1.0], [5.0], [10.0], [11.0], [12.0]])
    assert prototypes(features, torch.tensor([0, 0, 0, 1, 1, 1])).tolist() == [1, 4]


def folded(state: State, *signals: list[float], images: int = 4, held: str = "a") -> State:
    """What clients of a class say who agree on all else; the last one has so many images."""
    fold = ProxyFold(state, MEAN_ITSELF, FCIL().threshold)
    weights = {"backbone": state["backbone"] + 1}
    rows = state["prototypes"][state.index((held,))]
    weights |= {"buffers": state["buffers"], "prototypes": rows}
    for client, said in enumerate(signals, 1 - len(signals)):
        count = 4 if client else images
        tensors = weights | {SIGNALS: torch.tensor(said)}
        fold.add(Update("r", 1, "train", client, "", count, {held: count}, tensors))
    return fold.close()


@pytest.fixture
def fresh() -> State:
    tensors = {"backbone": torch.zeros(2), "buffers": torch.zeros(0)}
    tensors |= {"prototypes": torch.zeros(1, 3)}
    return State(tensors | {"prototypes.samples": torch.ones(1, dtype=torch.float64)}, ("a",))


def test_the_proxy_keeps_the_best_model_and_retires_it_at_a_transition(fresh) -> None:
    one = folded(fresh, [0.9, 2.0])
    two = folded(one, [0.8, 1.0])
    three = folded(two, [0.7, 1.5])
    assert [float(state[f"{BEST}.backbone"][0]) for state in (one, two, three)] == [0, 1, 1]
    assert float(three["fcil.entropy"]) == pytest.approx(0.7)
    after = folded(three, [1.0, 9.0])
    assert float(after[f"{OLD}.backbone"][0]) == 1
    assert f"{BEST}.backbone" not in after
    assert float(folded(after, [0.9, 5.0])[f"{BEST}.backbone"][0]) == 4


@pytest.mark.parametrize("lie", [[0.0, 1e4], [1.0, 1e4], [1.0, 0.0], [0.0, 0.0]])
def test_one_client_of_five_decides_nothing_however_many_images_it_has(fresh, lie) -> None:
    calm, sudden = ([[e + rise, 2.0] for e in (0.5, 0.6, 0.6, 0.7)] for rise in (0.0, 0.4))
    before = folded(fresh, *calm)
    after = folded(before, *calm, lie, images=1000)
    assert float(after["fcil.entropy"]) == pytest.approx(0.6)
    assert float(after["fcil.loss"]) == 2.0
    assert (BEST in after.notes, OLD in after.notes) == (True, False)
    moved = folded(before, *sudden, lie, images=1000)
    assert (BEST in moved.notes, OLD in moved.notes) == (False, True)


@pytest.mark.parametrize("lie", [[0.001, 0.0], [1.0, 0.0], [1.0, 1e4], [0.0, 0.0]])
def test_a_class_that_is_new_is_a_transition_whatever_one_client_says(fresh, lie) -> None:
    """Where all were unsure before, of a task half learnt, entropies cannot rise enough."""
    unsure = [[e, 1.0] for e in (0.8, 0.85, 0.9, 0.95)]
    before = folded(fresh, *unsure, [0.9, 1.0])
    met = grow(before, ("new",), None)
    for last in ([1.0, 0.7], lie):
        told = folded(before, *unsure, last)
        assert (BEST in told.notes, OLD in told.notes) == (True, False)
        after = folded(met, *([1.0, 0.7] for _ in unsure), last, held="new")
        assert (BEST in after.notes, OLD in after.notes) == (False, True)


def test_the_first_classes_are_no_transition(fresh) -> None:
    nothing = fresh.having({"prototypes.samples": torch.zeros(1, dtype=torch.float64)})
    after = folded(nothing, [1.0, 0.7])
    assert (BEST in after.notes, OLD in after.notes) == (True, False)


def test_clients_of_a_single_class_have_no_vote(fresh) -> None:
    before, sure = folded(fresh, [0.5, 2.0]), [0.0, 0.0]
    after = folded(before, sure, sure, sure, [0.9, 3.0])
    assert (BEST in after.notes, OLD in after.notes) == (False, True)
    assert float(after["fcil.entropy"]) == pytest.approx(0.9)


def test_a_round_without_images_leaves_the_proxy_as_it_was(fresh) -> None:
    before = folded(fresh, [0.9, 2.0])
    after = folded(before, [1.0, 0.0], images=0)
    assert after.notes == before.notes
    assert torch.equal(after["fcil.entropy"], before["fcil.entropy"])


@pytest.mark.parametrize("signals", [[1.1, 0], [-0.1, 0], [0.5, 2e4], [0.5, -1]])
def test_signals_out_of_range_are_a_defect(signals) -> None:
    update = Update("r", 1, "train", 0, "", 1, {}, {SIGNALS: torch.tensor(signals)})
    assert FCIL().aggregator(State({})).defect(State({}), update) is not None


def test_signals_in_range_are_no_defect() -> None:
    update = Update("r", 1, "train", 0, "", 1, {}, {SIGNALS: torch.tensor([1.0, 7.0])})
    assert FCIL().aggregator(State({})).defect(State({}), update) is None


def test_it_finds_the_transition_by_itself_and_replays(toy, played) -> None:
    run = played(FCIL(memory=0.5, threshold=0.01), toy(rounds=6), QUICK)
    assert [OLD in state.notes for state in run.states] == [False, False, False, True, True, True]
    assert run.last.notes[OLD] == ["toy/0", "toy/1"]
    assert [run.records[number]["samples"] for number in (3, 4)] == [48, 48 + 4 * 6]
    for own in run.privates.values():
        assert own.notes[GIVEN] == dict.fromkeys(run.last.classes, 6)
        assert len(own["pixels"]) == 0.5 * 24
        assert set(own.classes) == set(run.last.classes)
    old = run.last.index(("toy/0", "toy/1"))
    assert not torch.equal(run.states[3]["prototypes"][old], run.states[2]["prototypes"][old])


def test_exemplars_survive_an_interruption(toy, played) -> None:
    stream = toy(rounds=4, num_clients=5, per_round=3)
    whole = played(FCIL(memory=0.3), stream)
    with pytest.raises(RuntimeError, match="power"):
        played(FCIL(memory=0.3), _Unplugged(stream, 3), name="cut")
    rest = played(FCIL(memory=0.3), stream, name="cut")
    assert len(rest.states) == 2
    assert all(torch.equal(tensor, rest.last[name]) for name, tensor in whole.last.tensors.items())
    assert all(
        torch.equal(own["pixels"], rest.privates[client]["pixels"])
        for client, own in whole.privates.items()
    )


class _Unplugged:
    """A stream whose machine loses power in a round."""

    def __init__(self, stream, when: int) -> None:
        self.stream, self.when = stream, when

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def participants(self, round: int) -> tuple[int, ...]:
        if round == self.when:
            raise RuntimeError("power lost")
        return self.stream.participants(round)


def test_it_says_that_it_replays() -> None:
    assert FCIL().replay is not None
    assert FCIL(memory=0.1).facts()["memory"] == "10% of the images of a client"
    assert FCIL().memory < 1


def test_it_trains_over_all_classes_seen() -> None:
    samples = torch.tensor([3.0, 3.0, 0.0], dtype=torch.float64)
    state = State({"prototypes.samples": samples}, ("a", "b", "c"))
    assert FCIL().softmax(state, ("c",)) == ("c", "a", "b")


def test_a_client_keeps_at_least_one_image_of_each_class() -> None:
    with forked(0):
        kept = memorise(pictures([0, 0, 0, 1, 1, 2]), torch.randn(6, 3), 1)
    assert Replay().counts({}, kept) == {"a": 1, "b": 1, "c": 1}


def compensated_loss(
    replayed: int, distil: float = 0.5, teacher: Any = None
) -> tuple[float, float, float]:
    """The loss of six images of which the last are replayed; with weights, and without any."""
    images = pictures([0, 1, 0, 1, 2, 2])
    with forked(0):
        network, batch = Classifier(MLP((1, 1, 1), (4,)), 3), torch.randn(6, 1, 1, 1)
    instruction, layout = FitInstruction("r", 1, "train", State({})), layout_of(network.backbone)
    assignment = Assignment(instruction, layout, 0, images.classes, images, None, replayed)
    parts = (assignment, network.backbone, images.classes, teacher, torch.zeros(2))
    terms = Compensated(FCIL(distil=distil), *parts)
    features, logits = network.outputs(batch)
    logits = logits.detach()
    shifted, target = logits - math.log(2), torch.nn.functional.one_hot(images.labels, 3).float()
    each = binary_cross_entropy_with_logits(shifted, target, reduction="none").sum(1)
    own = shifted.sigmoid()[torch.arange(6), images.labels]
    weights = compensation(own, torch.tensor([False] * 4 + [True] * 2))
    found = terms.loss(batch, features.detach(), logits, images.labels)
    return float(found), float((weights * each).mean()), float(each.mean())


def test_gradients_are_compensated_only_where_there_are_old_classes() -> None:
    alone, weighted, plain = compensated_loss(0)
    assert alone == pytest.approx(plain, rel=1e-5)
    assert alone != pytest.approx(weighted, rel=1e-4)
    assert compensated_loss(2)[0] == pytest.approx(weighted, rel=1e-5)


def test_relations_count_a_and_compensated_gradients_the_rest() -> None:
    """Of an old model that gives the third class one in three, whatever it sees."""
    known = {"inside": torch.tensor([2]), "outside": torch.zeros(0, 5)}
    teacher = SimpleNamespace(**known, logits=lambda images: torch.zeros(len(images), 1))
    gradients, relations = compensated_loss(2)[1], compensated_loss(2, 1.0, teacher)[0]
    assert relations != pytest.approx(gradients, rel=1e-2)
    found = compensated_loss(2, 0.25, teacher)[0]
    assert found == pytest.approx(0.75 * gradients + 0.25 * relations, rel=1e-5)


@pytest.mark.parametrize(("met", "kept"), [(False, BEST), (True, OLD)])
def test_who_meets_a_new_class_learns_from_the_best_model_and_others_from_the_old(
    met: bool, kept: str, toy
) -> None:
    images, backbone = toy().train(1, 0), MLP((1, 4, 4), (8,))
    layout, rows = layout_of(backbone), torch.randn(4, 9)
    weights, buffers = layout.read(backbone)
    samples = torch.tensor([float(met), 1, 1, 1], dtype=torch.float64)
    parts = {"backbone": weights, "buffers": buffers, "prototypes": rows}
    state, models = State({**parts, "prototypes.samples": samples}, images.classes), {}
    for name in (BEST, OLD):
        models[name] = torch.randn_like(weights)
        state = remember(state, name, state.having({"backbone": models[name]}))
    instruction = FitInstruction("r", 1, "train", state)
    assignment = Assignment(instruction, layout, 0, tuple(images.counts()), images, None)
    terms = FCIL().objective(assignment, layout.classifier(backbone, rows))
    assert torch.equal(layout.read(terms.teacher.backbone)[0], models[kept])


def test_a_row_of_zeros_begins_at_one_in_c(toy) -> None:
    images = toy().train(1, 0)
    network = Classifier(MLP(images.pixels.shape[1:], (8,)), 4)
    torch.nn.init.zeros_(network.head.weight)
    torch.nn.init.zeros_(network.head.bias)
    instruction = FitInstruction("r", 1, "train", State({}))
    layout = layout_of(network.backbone)
    assignment = Assignment(instruction, layout, 0, images.classes, images, None)
    method = FCIL()
    parts = (method, assignment, network.backbone, images.classes, None, torch.zeros(2))
    batch, labels = next(iter(images.loader(12, shuffle=False)))
    loss = Compensated(*parts).loss(batch, *network.outputs(batch), labels).detach()
    assert float(loss) == pytest.approx(math.log(4) + 3 * math.log(4 / 3))
