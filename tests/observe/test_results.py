"""From lines to results: every number is read at the right round."""

import json

import pytest

from fedbnn.evaluation.results import (
    Facts,
    average,
    backward_transfer,
    diagnostics,
    forgetting_by_task,
    results,
)


def test_ts_is_read_at_each_task_end_and_fin_at_the_last_round(lines, facts) -> None:
    found = results(lines, facts)
    for regime in ("task_aware", "class_agnostic"):
        assert found[regime]["ts"] == [
            lines[end - 1]["tasks"][task][regime]["accuracy"] for task, end in enumerate((4, 8, 12))
        ]
        assert found[regime]["fin"] == [task[regime]["accuracy"] for task in lines[-1]["tasks"]]
        assert found[regime]["matrix"][0][1:] == [None, None]
        assert found[regime]["avg_fin"] == pytest.approx(sum(found[regime]["fin"]) / 3)


def test_further_evaluations_between_task_ends_do_not_move_ts(lines, facts) -> None:
    between = {**lines[5], "tasks": [None, None, None]}
    between["tasks"][0] = {
        **lines[3]["tasks"][0],
        "task_aware": {"accuracy": 0.0, "nll": 9.0, "brier": 1.0, "ece": 1.0},
    }
    changed = [*lines[:5], between, *lines[6:]]
    assert results(changed, facts)["task_aware"] == results(lines, facts)["task_aware"]


def test_forgetting_is_the_fall_of_the_first_two_tasks(lines, facts) -> None:
    part = results(lines, facts)["class_agnostic"]
    first = max(part["matrix"][0][0], part["matrix"][1][0]) - part["fin"][0]
    second = part["matrix"][1][1] - part["fin"][1]
    assert part["forgetting"] == pytest.approx((first + second) / 2)
    assert part["backward_transfer"] == pytest.approx(-(first + second) / 2)


def test_a_last_round_after_the_last_task_end_gives_fin(lines, facts) -> None:
    late = Facts(**{**vars(facts), "task_ends": (4, 8, 8)})
    found = results(lines, late)
    assert found["task_aware"]["fin"][2] == lines[-1]["tasks"][2]["task_aware"]["accuracy"]
    assert found["task_aware"]["ts"][2] is None


def test_chance_stands_beside_each_number(lines, facts) -> None:
    chance = results(lines, facts)["chance"]["class_agnostic"]
    assert chance["ts"] == pytest.approx([50, 25, 100 / 6])
    assert chance["fin"] == pytest.approx([100 / 6] * 3)


def test_focus_on_now_has_one_value_per_round(lines, facts) -> None:
    curve = results(lines, facts)["fon"]["task_aware"]
    assert len(curve) == 12
    assert curve[2] is None
    assert curve[3] == lines[3]["fon"]["task_aware"]


def test_costs_are_sums_and_incidents_are_listed(lines, facts) -> None:
    found = results(lines, facts)
    assert found["seconds"] == pytest.approx(18.0)
    assert found["bytes_up"] == 12 * 120_000
    assert found["bytes_by_exchange"]["down"] == {"statistics": 240_000, "train": 960_000}
    assert found["bytes_by_round"]["down"] == [100_000] * 12
    assert found["failed"] == [
        {"round": 5, "client": 4, "reason": "diverged: the loss is not finite"}
    ]
    assert found["refused"] == [
        {"round": 7, "client": 7, "reason": "influence 1e6 times the median"}
    ]


def test_every_update_that_was_folded_with_less_than_full_trust_is_on_record(lines, facts) -> None:
    assert results(lines, facts)["down_weighted"] == [
        {"round": 9, "client": 1, "trust": 0.25},
        {"round": 9, "client": 4, "trust": 0.5},
    ]
    plain = [{key: value for key, value in line.items() if key != "trust"} for line in lines]
    assert results(plain, facts)["down_weighted"] == []


def test_an_unfinished_run_has_what_it_has(lines, facts) -> None:
    found = results(lines[:5], facts)
    assert found["rounds_done"] == 5
    assert found["task_aware"]["ts"][1:] == [None, None]
    assert found["task_aware"]["avg_ts"] == found["task_aware"]["ts"][0]
    assert found["nll"] is None
    assert results(lines[:8], facts)["task_aware"]["fin"] == [None] * 3
    assert results([], facts)["fon"]["class_agnostic"] == [None] * 12


def test_results_are_json_with_the_promised_keys(lines, facts) -> None:
    found = json.loads(json.dumps(results(lines, facts), allow_nan=False))
    promised = "method scenario seed rounds task_names chance task_aware class_agnostic fon nll"
    promised += " brier ece novelty seconds bytes_up bytes_down"
    assert set(promised.split()) | {"replay_images", "notes"} <= set(found)
    assert {
        "ts",
        "fin",
        "avg_ts",
        "avg_fin",
        "forgetting",
        "backward_transfer",
        "matrix",
        "nll",
    } <= set(found["task_aware"])
    assert found["nll"] == found["class_agnostic"]["nll"]


def test_calibration_is_that_of_all_images_together_at_the_end(lines, facts) -> None:
    found = results(lines, facts)
    assert found["task_aware"]["ece"] == lines[-1]["pooled"]["task_aware"]["ece"] == 0.05
    assert found["nll"] == lines[-1]["pooled"]["class_agnostic"]["nll"]


def test_a_run_is_quiet_if_nobody_else_keeps_the_machine_busy(lines, facts) -> None:
    def quiet(machine: float, own: float) -> bool:
        load = {"machine": machine, "own": own}
        return results([{**line, "load": load} for line in lines], facts)["quiet"]

    assert quiet(1.2, 1.0)
    assert quiet(2.1, 1.9)  # two threads of its own
    assert not quiet(2.0, 1.0)
    assert not results([{**line, "load": {}} for line in lines], facts)["quiet"]


def test_loss_and_kl_are_kept_by_round(lines, facts) -> None:
    assert results(lines, facts)["train"][3] == {"round": 4, "loss": 0.5, "kl": 0.04}


def test_diagnostics_take_calibration_from_the_end_and_uncertainty_from_when_classes_were_unseen(
    lines,
) -> None:
    found = diagnostics(lines)
    assert found["reliability"]["round"] == 12
    assert found["uncertainty"]["round"] == 8
    assert diagnostics(lines[:3]) == {"reliability": None, "uncertainty": None}


def test_the_second_head_has_the_same_measures_and_its_own_values(lines, facts) -> None:
    second = [{key: line[key] for key in ("fon", "tasks", "novelty")} for line in reversed(lines)]
    both = results(
        [{**line, "linear": other} for line, other in zip(lines, second, strict=True)], facts
    )
    turned = results([{**line, **other} for line, other in zip(lines, second, strict=True)], facts)
    assert {name: turned[name] for name in both["linear"]} == both["linear"]
    assert {name: both[name] for name in both["linear"]} == {
        name: results(lines, facts)[name] for name in both["linear"]
    }
    assert "linear" not in results(lines, facts)


MATRIX = [[80.0, None, None], [60.0, 90.0, None], [50.0, 70.0, 85.0]]


def test_the_accuracy_matrix_by_hand() -> None:
    final = MATRIX[-1]
    assert average(final) == pytest.approx(205 / 3)
    assert forgetting_by_task(MATRIX, final) == [30.0, 20.0, None]
    assert backward_transfer(MATRIX, final) == pytest.approx(-25.0)


def test_forgetting_measures_from_the_best_evaluation_and_transfer_from_the_own_end() -> None:
    matrix = [[50.0, None], [70.0, 60.0]]
    better = [[50.0, None, None], [70.0, 60.0, None], [65.0, 61.0, 90.0]]
    assert forgetting_by_task(matrix, [70.0, 60.0]) == [-20.0, None]
    assert forgetting_by_task(better, better[-1]) == [5.0, -1.0, None]
    assert backward_transfer(better, better[-1]) == pytest.approx((15 + 1) / 2)


def test_one_task_alone_has_no_forgetting() -> None:
    assert forgetting_by_task([[80.0]], [80.0]) == [None]
    assert backward_transfer([[80.0]], [80.0]) is None
    assert average([None]) is None
