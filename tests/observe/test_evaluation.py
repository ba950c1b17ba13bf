"""What an evaluated round says, with a model whose answers are known."""

import json
from dataclasses import replace

import pytest
import torch

from fedbnn.config import yaml
from fedbnn.config.parse import parse
from fedbnn.config.schema import Section
from fedbnn.errors import ConfigError
from fedbnn.evaluation.evaluate import Evaluation, begun, evaluate_clients, evaluate_round, predict
from fedbnn.images import joined


def confused(truth: str, column: str) -> float:
    """Always answers the last class: right about that class, wrong about all others."""
    return 5.0 * (column == "toy/3")


def test_a_perfect_model_is_right_in_both_regimes(stream, predictor) -> None:
    line = evaluate_round(predictor(stream.classes[:4]), stream, 4, Evaluation())
    assert line["fon"] == {"task_aware": 100.0, "class_agnostic": 100.0}
    assert [
        None if task is None else task["class_agnostic"]["accuracy"] for task in line["tasks"]
    ] == [100.0, 100.0, None]
    assert line["tasks"][0]["chance"] == {"task_aware": 50.0, "class_agnostic": 25.0}
    assert line["tasks"][0]["images"] == 40
    assert line["seen_classes"] == 4


def test_the_regimes_differ_when_a_model_only_knows_the_new_task(stream, predictor) -> None:
    def newest(truth: str, column: str) -> float:
        return 9.0 * (column in stream.tasks[1].classes) + 5.0 * (truth == column)

    old, new, _ = evaluate_round(predictor(stream.classes[:4], newest), stream, 4, Evaluation())[
        "tasks"
    ]
    assert (old["task_aware"]["accuracy"], old["class_agnostic"]["accuracy"]) == (100.0, 0.0)
    assert new["class_agnostic"]["accuracy"] == 100.0


def test_probabilities_are_averaged_and_not_scores(stream, predictor) -> None:
    """Two samples sure of A by 2, one of B by 9: the mean score says B, the mean probability A."""

    class Divided(predictor):
        def scores(self, images):
            one = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 9.0]])
            return one[:, None, :].expand(3, len(images), 2)

    line = evaluate_round(Divided(stream.classes[:2]), stream, 2, Evaluation())
    found = predict(Divided(stream.classes[:2]), stream.test(0), stream.tasks[0], 7)
    expected = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 9.0]]).softmax(-1).mean(0)
    assert torch.allclose(found.class_agnostic, expected.expand(40, 2))
    assert torch.allclose(found.task_aware, expected.expand(40, 2))
    assert line["tasks"][0]["task_aware"]["accuracy"] == 50.0
    assert (found.class_agnostic.argmax(-1) == 0).all()


def test_the_size_of_the_chunks_changes_nothing(stream, predictor) -> None:
    def messy(truth: str, column: str) -> float:
        return float(torch.tensor(float(hash((truth, column)) % 97)).sin())

    lines = [
        evaluate_round(predictor(stream.classes[:4], messy), stream, 4, Evaluation(batch_size=size))
        for size in (3, 500)
    ]
    assert lines[0] == lines[1]


def test_every_image_passes_the_model_once(stream, predictor) -> None:
    model = predictor(stream.classes[:2])
    evaluate_round(model, stream, 2, Evaluation(images=10, novelty_images=5, batch_size=8))
    assert sum(model.calls) == 10 + 10 + 40 + 2 * 5  # now, next, the task, two to come
    assert max(model.calls) <= 8


def test_a_mixture_is_tested_image_by_image_in_its_own_task(gradual_stream, predictor) -> None:
    line = evaluate_round(
        predictor(gradual_stream.classes[:4], confused), gradual_stream, 2, Evaluation()
    )
    assert line["fon"]["class_agnostic"] == pytest.approx(100 * 5 / 40)
    assert line["fon"]["task_aware"] == pytest.approx(100 * (15 + 5) / 40)


def test_the_mixture_is_that_of_the_images_whatever_part_of_the_clients_a_task_has(
    gradual_stream, predictor
) -> None:
    """A quarter of the clients, and half of the images: one class of four is always right."""
    now = gradual_stream.test_now
    gradual_stream.test_now = lambda number, _: joined([now(number - 1, 20), now(number + 1, 20)])
    model = predictor(gradual_stream.classes[:4], confused)
    line = evaluate_round(model, gradual_stream, 2, Evaluation())
    assert line["fon"] == {"task_aware": 50.0, "class_agnostic": 25.0}


def test_an_image_of_a_class_that_two_current_tasks_share_counts_once(
    gradual_stream, predictor
) -> None:
    first, second, third = gradual_stream.tasks
    gradual_stream.tasks = (
        first,
        replace(second, classes=(*second.classes, *first.classes)),
        third,
    )
    line = evaluate_round(predictor(gradual_stream.classes[:4]), gradual_stream, 2, Evaluation())
    assert line["fon"] == {"task_aware": 100.0, "class_agnostic": 100.0}


def test_a_class_without_a_row_can_never_be_right(stream, predictor) -> None:
    line = evaluate_round(predictor(stream.classes[:1]), stream, 2, Evaluation())
    assert line["tasks"][0]["task_aware"]["accuracy"] == 50.0
    assert line["fon"]["class_agnostic"] == 50.0
    assert line["tasks"][0]["chance"]["task_aware"] == 50.0


def test_a_model_without_any_row_still_gets_a_line(stream, predictor) -> None:
    line = evaluate_round(predictor(()), stream, 2, Evaluation())
    assert line["tasks"][0]["class_agnostic"]["accuracy"] == 0.0
    assert line["seen_classes"] == 0
    assert line["novelty"] is None


def test_unseen_classes_are_found_strange_by_a_model_that_is_unsure_of_them(
    stream, predictor
) -> None:
    seen = stream.classes[:2]
    line = evaluate_round(predictor(seen), stream, 2, Evaluation())
    assert line["novelty"]["entropy"] == 1.0
    assert line["novelty"]["mutual_information"] is None  # all its draws agree
    last = evaluate_round(predictor(stream.classes), stream, 6, Evaluation())
    assert last["novelty"] is None


def test_histograms_and_bins_count_every_image(stream, predictor) -> None:
    line = evaluate_round(predictor(stream.classes[:2]), stream, 2, Evaluation(novelty_images=7))
    parts = line["diagnostics"]
    assert sum(parts["uncertainty"]["entropy"]["seen"]) == 40
    assert sum(parts["uncertainty"]["entropy"]["unseen"]) == 2 * 7
    assert len(parts["uncertainty"]["entropy"]["edges"]) == 31
    assert sum(parts["reliability"]["task_aware"]["images"]) == 40


def test_between_evaluations_the_line_is_empty(stream, predictor) -> None:
    line = evaluate_round(predictor(stream.classes[:2]), stream, 1, Evaluation(every=5))
    assert line == {
        "fon": None,
        "surprise": None,
        "tasks": [None] * 3,
        "pooled": None,
        "novelty": None,
        "diagnostics": None,
        "seen_classes": 2,
    }


@pytest.mark.parametrize(
    ("round", "now", "full"),
    [(1, False, False), (2, True, True), (3, True, False), (5, False, False), (6, True, True)],
)
def test_task_ends_and_the_last_round_are_always_evaluated(stream, round, now, full) -> None:
    settings = Evaluation(every=3)
    assert settings.now(round, stream) is now
    assert settings.full(round, stream) is full


def test_a_task_has_begun_once_any_client_had_it(gradual_stream) -> None:
    assert begun(gradual_stream, 1) == [True, False, False]
    assert begun(gradual_stream, 2) == [True, True, False]


def test_a_line_is_json(stream, predictor) -> None:
    line = evaluate_round(predictor(stream.classes[:2]), stream, 2, Evaluation())
    assert json.loads(json.dumps(line, allow_nan=False)) == line


@pytest.mark.parametrize("key", ["every", "images", "batch_size", "samples", "novelty_images"])
def test_impossible_settings_are_named(key) -> None:
    schema = {"evaluate": Section(Evaluation)}
    with pytest.raises(ConfigError, match=rf"evaluate\.{key}: .*-1"):
        parse([f"--evaluate.{key}", "-1"], schema)
    assert isinstance(parse([], schema).build("evaluate"), Evaluation)


def test_what_was_set_comes_back_from_its_own_file_as_plain_numbers() -> None:
    parsed = parse(["--evaluate.every", "3"], {"evaluate": Section(Evaluation)})
    assert type(parsed["evaluate"]["every"]) is int
    assert "every: 3" in yaml.dump(parsed.values)


def test_clients_are_tested_on_the_classes_they_know_and_the_mean_is_taken(
    stream, predictor
) -> None:
    """The first knows one class of the first task, the second both, and is always wrong."""
    right = predictor(stream.classes[:1])
    wrong = predictor(stream.classes[:2], lambda truth, column: 5.0 * (truth != column))
    found = evaluate_clients([right, wrong], stream, 2, Evaluation())
    assert found["fon"] == {"task_aware": 50.0, "class_agnostic": 50.0}
    assert found["tasks"][0]["images"] == (20 + 40) / 2
    assert found["tasks"][1:] == [None, None]
    assert found["novelty"] is None
    nobody = evaluate_clients([predictor(())], stream, 1, Evaluation())
    assert nobody["fon"] is None


def test_surprise_is_one_where_nothing_is_known_and_none_when_nothing_follows(
    stream, predictor
) -> None:
    known = stream.classes[:4]
    blank = evaluate_round(predictor(known, lambda *_: 0.0), stream, 1, Evaluation())
    one = predictor(known, lambda _, column: 50.0 * (column == known[0]))
    sure = evaluate_round(one, stream, 1, Evaluation())
    assert blank["surprise"] == pytest.approx(1.0)
    assert sure["surprise"] == pytest.approx(0.0, abs=1e-6)
    last = evaluate_round(predictor(known), stream, stream.rounds, Evaluation())
    assert last["surprise"] is None
