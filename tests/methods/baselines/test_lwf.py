"""LwF: the loss is zero where student and teacher agree, and about old columns only.

It leaves the teacher alone.
"""

import pytest
import torch

from fedbnn.bayes.flatten import layout_of
from fedbnn.methods.lwf import Distilled, LwF, Teacher, remember, rename
from fedbnn.networks import MLP, CifarResNet18, Classifier
from fedbnn.protocol.state import State
from fedbnn.seeds import forked

OLD, NEW = ("a", "b"), ("b", "c", "d")
SHAPE = (1, 2, 2)


def a_state(backbone, layout) -> State:
    """Four classes in the library; `d` has never been trained."""
    weights, buffers = layout.read(backbone)
    with forked(1):
        rows = torch.randn(4, backbone.width + 1)
    samples = torch.tensor([5.0, 5.0, 5.0, 0.0], dtype=torch.float64)
    tensors = {"backbone": weights, "buffers": buffers, "prototypes": rows}
    return State({**tensors, "prototypes.samples": samples}, ("a", "b", "c", "d"))


def student_of(backbone, state: State) -> Classifier:
    return layout_of(backbone).classifier(backbone, state["prototypes"][state.index(NEW)])


def distilled(backbone, prior_mean=None) -> tuple[Classifier, Distilled, State]:
    layout = layout_of(backbone)
    state = a_state(backbone, layout)
    state, student = remember(state, "teacher", state), student_of(backbone, state)
    student.prior_mean = prior_mean
    teacher = Teacher(state, "teacher", NEW, student, layout)
    return student, Distilled(teacher, 3.0, 2.0), state


@pytest.fixture
def images() -> torch.Tensor:
    with forked(2):
        return torch.randn(6, *SHAPE)


def test_the_teacher_knows_trained_classes_only() -> None:
    _, terms, _ = distilled(MLP(SHAPE, (3,)))
    assert set(terms.teacher.classes) == {"a", "b", "c"}


@pytest.mark.parametrize("beside", [None, lambda images, _: images.flatten(1)[:, :3].exp()])
def test_the_distillation_is_zero_where_student_and_teacher_agree(beside, images) -> None:
    """Also where both stand on scores that somebody else gives: there is nothing to unlearn."""
    network, terms, _ = distilled(MLP(SHAPE, (3,)), beside)
    outputs = network.outputs(images)
    student = terms.teacher.student(*outputs)
    assert torch.equal(student.detach(), terms.teacher.logits(images))
    assert float(terms.distillation(images, *outputs).detach()) == 0


def test_the_distillation_is_a_scaled_divergence_over_the_old_columns(images) -> None:
    network, terms, _ = distilled(MLP(SHAPE, (3,)))
    with torch.no_grad():
        for weight in network.parameters():
            weight += 0.3
    outputs = network.outputs(images)
    student = terms.teacher.student(*outputs)
    want = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=terms.teacher.logits(images) / 2),
        torch.distributions.Categorical(logits=student.detach() / 2),
    )
    found = terms.distillation(images, *outputs).detach()
    assert torch.allclose(found, 4 * want.mean(), rtol=1e-4)
    assert want.mean() > 0


def test_its_gradient_reaches_old_rows_and_the_backbone_but_no_new_row(images) -> None:
    network, terms, _ = distilled(MLP(SHAPE, (3,)))
    with torch.no_grad():
        for weight in network.parameters():
            weight += 0.3
    terms.distillation(images, *network.outputs(images)).backward()
    touched = network.head.weight.grad.abs().sum(1) > 0
    assert dict(zip(NEW, touched.tolist(), strict=True)) == {"b": True, "c": True, "d": False}
    assert all(weight.grad.abs().sum() > 0 for weight in network.backbone.parameters())


def test_the_teacher_is_frozen_and_in_eval_mode() -> None:
    network, terms, state = distilled(CifarResNet18((3, 8, 8)))
    with forked(0):
        network.train()
        images, labels = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
        terms.loss(images, *network.outputs(images), labels).backward()
    teacher = terms.teacher.backbone
    assert not teacher.training
    assert all(weight.grad is None and not weight.requires_grad for weight in teacher.parameters())
    weights, buffers = layout_of(teacher).read(teacher)
    assert torch.equal(weights, state["teacher.backbone"])
    assert torch.equal(buffers, state["teacher.buffers"])


def test_the_teacher_changes_at_consolidations_only(toy, played) -> None:
    states = played(LwF(), toy()).states
    assert "teacher.backbone" not in states[0]
    assert torch.equal(states[1]["teacher.backbone"], states[1]["backbone"])
    assert torch.equal(states[2]["teacher.backbone"], states[1]["backbone"])
    assert states[2].notes["teacher"] == ["toy/0", "toy/1"]
    assert len(states[3]["teacher.prototypes"]) == 4


def test_every_round_means_every_round(toy, played) -> None:
    states = played(LwF(every=1), toy()).states
    assert all(torch.equal(state["teacher.backbone"], state["backbone"]) for state in states)


def test_a_kept_model_can_be_renamed() -> None:
    backbone = MLP(SHAPE, (3,))
    layout = layout_of(backbone)
    state = a_state(backbone, layout)
    both = remember(
        remember(state, "x.old", state), "x.best", state.having({"backbone": state["backbone"] + 1})
    )
    moved = rename(both, "x.best", "x.old")
    assert torch.equal(moved["x.old.backbone"], state["backbone"] + 1)
    assert moved.notes["x.old"] == ["a", "b", "c"]
    assert "x.best" not in moved.notes
    assert "x.best.backbone" not in moved
    assert set(state.tensors) <= set(moved.tensors)
