"""Private clients through the real rounds: what goes up, what is folded, which classes are left."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules.stream import FederatedStream
from fedbnn.bayes.flatten import layout_of
from fedbnn.defense.gate import Gate
from fedbnn.defense.privacy import Privacy, Question
from fedbnn.heads import ExactHead, GaussianHead
from fedbnn.heads.exact import COUNT, MOMENT, SUM
from fedbnn.heads.gaussian import measure
from fedbnn.images import ImageSet, Preprocess
from fedbnn.methods import FedBNN
from fedbnn.methods.bounds import Exact
from fedbnn.networks import MLP
from fedbnn.protocol.messages import FitInstruction, FitResult, read_update
from fedbnn.protocol.state import State
from tests.core.playing import FAST, Federate, Overheard, Short, after

OPEN = Gate(influence_cap=None)


def played(
    federate: Federate, digits: FederatedStream, method: Any, rounds: int = 2, **parts: Any
) -> tuple[Overheard, State, Any]:
    parts = {"gate": OPEN, "local": FAST, **parts}
    federation, initial = federate(method, stream=Short(digits, rounds), **parts)
    engine = Overheard(federation.engine)  # type: ignore[arg-type]
    return engine, after(replace(federation, engine=engine), initial), federation


def test_what_goes_up_is_clipped_and_names_no_count(
    federate: Federate, digits: FederatedStream
) -> None:
    """Of points in the first round, of factors in the second."""
    settings = Privacy(clip=0.5, images=8)
    engine, state, federation = played(federate, digits, FedBNN(r_init=1), privacy=settings)
    told = {one.round: one for one in map(FitInstruction.from_bytes, engine.down)}
    answers = [answer for answer in engine.up if isinstance(answer, FitResult)]
    assert len(answers) == 6
    for update in (read_update(answer.update) for answer in answers):
        assert dict(update.counts) == {"digits/0": 4, "digits/1": 4}
        before = told[update.round].state
        asked = Question(before, update.classes, federation.layout).asked(update)
        length = math.sqrt(sum(float(step.square().sum()) for step in asked.values()))
        assert length == pytest.approx(0.5, rel=1e-3)
    assert told[1].total == 24
    assert all(bool(tensor.isfinite().all()) for tensor in state.tensors.values())


@pytest.mark.parametrize("at", ["server", "client"])
def test_noise_leaves_a_posterior_wherever_it_is_added(
    federate: Federate, digits: FederatedStream, at: Any
) -> None:
    settings = Privacy(clip=5.0, noise=1.0, at=at)
    engine, state, _ = played(federate, digits, FedBNN(r_init=1), privacy=settings)
    assert not [one for one in engine.up if not isinstance(one, FitResult)]
    assert bool((state["backbone.scale"] > 0).all())
    assert bool(state["backbone.scale"].isfinite().all())
    last = read_update(engine.up[-1].update)  # type: ignore[union-attr]
    held = len(digits.counts(2, last.client))
    absent = last.tensors["prototypes.info"].abs().sum(1) == 0
    assert int(absent.sum()) == (2 - held if at == "server" else 0)


def test_exact_sums_of_clients_that_nobody_clips_are_the_sums(
    federate: Federate, digits: FederatedStream
) -> None:
    head, every = ExactHead(filters=2), Privacy(smallest_class=1)
    hidden = replace(every, clip_images=1e9)
    plain, private = (
        played(federate, digits, Exact(), head=head, privacy=settings)[1]
        for settings in (every, hidden)
    )
    for name in (COUNT, SUM, MOMENT):
        assert torch.allclose(plain[name], private[name], rtol=1e-5)


@pytest.mark.parametrize("at", ["server", "client"])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_class_posteriors_in_features_that_move_are_private(
    federate: Federate, digits: FederatedStream, at: Any, noise: float
) -> None:
    """Three rounds: points, then factors, under an anchor that is not the round before."""
    settings = Privacy(clip=5.0, clip_images=30.0, noise=noise, at=at, smallest_class=1)
    parts = {"head": GaussianHead(), "privacy": settings}
    engine, state, _ = played(federate, digits, FedBNN(r_init=1), 3, **parts)
    updates = [read_update(one.update) for one in engine.up if isinstance(one, FitResult)]
    sent = [one for one in updates if one.exchange == "statistics"]
    assert len(sent) == 9
    assert {tuple(one.counts.values()) for one in sent} == {(10, 10)}
    assert all(bool(tensor.isfinite().all()) for tensor in state.tensors.values())
    scatter = torch.linalg.eigvalsh(state["posteriors.scatter"])
    assert float(scatter[0]) > -1e-6 * float(scatter[-1])


def test_classes_with_too_few_images_send_no_sums_but_are_trained(
    federate: Federate, digits: FederatedStream
) -> None:
    least = 5
    engine, _, _ = played(
        federate, digits, FedBNN(), 4, head=GaussianHead(), privacy=Privacy(smallest_class=least)
    )
    updates = [read_update(one.update) for one in engine.up if isinstance(one, FitResult)]
    few = 0
    for update in updates:
        held = digits.counts(update.round, update.client)
        enough = {name: count for name, count in held.items() if count >= least}
        few += update.exchange == "statistics" and enough != held
        assert dict(update.counts) == (held if update.exchange == "train" else enough)
        assert len(update.tensors.get("posteriors.sum", enough)) == len(enough)
    trained = [(one.round, one.client) for one in updates if one.exchange == "train"]
    assert len(trained) == 12
    assert few


def found_from(features: torch.Tensor, backbone: MLP) -> torch.Tensor:
    """The image with these features: units that fire are as many equations, more than pixels."""
    layer = next(one for one in backbone.modules() if isinstance(one, torch.nn.Linear))
    fires = features > 1e-6
    said = (features - layer.bias)[fires]
    solved: torch.Tensor = torch.linalg.lstsq(layer.weight[fires], said).solution
    return solved.detach()


def alike(one: torch.Tensor, other: torch.Tensor) -> float:
    return abs(float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]))


def test_one_image_can_be_found_from_its_sum_and_not_where_it_sends_none(
    digits: FederatedStream, tmp_path: Path
) -> None:
    """A class of one image beside one of many, of a client with `smallest_class` 1 and 2."""
    backbone = MLP((1, 8, 8), (300,))
    layout = layout_of(backbone)
    weights, buffers = layout.read(backbone)
    state = State({"backbone": weights, "buffers": buffers})
    images = digits.train(1, digits.participants(1)[0])
    look = Preprocess(digits.preprocess.mean, digits.preprocess.deviation)
    names, (first, second) = images.classes, images.labels.unique()[:2].tolist()
    chosen = torch.cat(
        [(images.labels == first).nonzero()[:1, 0], (images.labels == second).nonzero()[:, 0]]
    )
    own = replace(images, preprocess=look).subset(chosen)
    secret = look.normalise(own.pixels[:1])
    assert own.counts()[names[first]] == 1

    def best(settings: Privacy) -> float:
        """The best an attacker does with any sum that was sent."""
        sent = own.of(tuple(settings.enough(own.counts())))
        sums = measure(backbone, layout, state, sent)["posteriors.sum"][:, -300:]
        means = sums / torch.tensor(list(sent.counts().values()))[:, None]
        return max(alike(found_from(mean, backbone), secret) for mean in means)

    assert best(Privacy(smallest_class=1)) > 0.99
    assert best(Privacy()) < 0.6


def test_the_images_of_some_classes() -> None:
    images = ImageSet(
        torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 1, 2]), ("a", "b", "c")
    )
    assert images.of(("b",)).counts() == {"b": 2}
    assert images.of(("a", "b", "c")) is images
