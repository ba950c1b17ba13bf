"""Tables: the numbers are right, the best is marked, and each format says the same."""

import csv
import io
import statistics

import pytest
from rich.console import Console

from fedbnn.report import page, tables
from fedbnn.report.values import Cell, Table, task_names
from fedbnn.tracking.console import terminal


def cell(table: Table, row: str, column: str) -> Cell:
    place = table.heads.index(column) - 1
    return next(line for line in table.rows if line.name == row).cells[place]


def test_the_table_of_a_run_holds_ts_fin_and_chance_of_both_regimes(run) -> None:
    table = tables.of_run(run)
    assert cell(table, "two", "aware @TS").value == run["task_aware"]["ts"][1]
    assert cell(table, "two", "agnostic @Fin").value == run["class_agnostic"]["fin"][1]
    assert cell(table, "two", "chance @TS").value == 25.0
    assert cell(table, "average", "agnostic @Fin").value == run["class_agnostic"]["avg_fin"]


def test_means_and_deviations_are_over_the_seeds(grid) -> None:
    summary = tables.every(grid)[0]
    values = [run["task_aware"]["avg_ts"] for run in grid if run["method"] == "fedavg"]
    found = cell(summary, "fedavg", "aware @TS")
    assert found.value == pytest.approx(statistics.mean(values))
    assert found.spread == pytest.approx(statistics.stdev(values))


def test_the_best_is_the_highest_accuracy_and_the_lowest_error_of_methods_that_store_nothing(
    grid,
) -> None:
    grid[-1]["task_aware"]["avg_ts"] = 1000.0
    summary = tables.every(grid)[0]
    column = {row.name: cell(summary, row.name, "aware @TS") for row in summary.rows[:-1]}
    assert not column["fcil [200]"].best
    rivals = {name: found for name, found in column.items() if "[" not in name}
    winner = max(rivals, key=lambda name: rivals[name].value)
    assert [name for name, found in column.items() if found.best] == [winner]
    forgetting = {name: cell(summary, name, "aware forgetting") for name in rivals}
    assert forgetting[min(forgetting, key=lambda name: forgetting[name].value)].best


def test_who_prints_the_same_number_shares_the_crown(grid) -> None:
    for run in grid:
        run["task_aware"]["avg_ts"] = {"fedbnn": 90.02, "fedavg": 89.96, "fcil": 95.0}[
            run["method"]
        ]
    summary = tables.averages(grid)
    assert [row.name for row in summary.rows if row.cells[0].best] == ["fedbnn", "fedavg"]


def test_a_bound_wins_nothing(grid) -> None:
    bound = [
        {**run, "notes": {"bound": "upper"}} if run["method"] == "fedavg" else run for run in grid
    ]
    for run in bound:
        if run["method"] == "fedavg":
            run["task_aware"]["avg_ts"] = 2000.0
    summary = tables.every(bound)[0]
    assert not cell(summary, "fedavg", "aware @TS").best
    assert "no bound" in summary.notes[0]
    alone = tables.averages([run for run in bound if run["method"] == "fedavg"] + [
        {**run, "method": "other"} for run in bound if run["method"] == "fedavg"
    ])
    assert not any(cell.best for row in alone.rows for cell in row.cells)


def test_who_trains_nothing_wins_no_forgetting(grid) -> None:
    for run in grid:
        if run["method"] == "fedavg":
            run["notes"] = {**run["notes"], "training": "none"}
            run["class_agnostic"]["forgetting"] = -5.0
    assert not cell(tables.averages(grid), "fedavg", "agnostic forgetting").best


def test_who_has_learnt_nothing_wins_no_forgetting(grid) -> None:
    for run in grid:
        if run["method"] == "fedavg":
            part = run["class_agnostic"]
            part["forgetting"], part["avg_ts"] = 0.5, run["chance"]["class_agnostic"]["avg_ts"] + 2
    summary = tables.averages(grid)
    assert not cell(summary, "fedavg", "agnostic forgetting").best
    for run in grid:
        run["class_agnostic"]["avg_ts"] = 80.0
    assert cell(tables.averages(grid), "fedavg", "agnostic forgetting").best


def test_a_point_model_does_not_compete_in_mutual_information(grid) -> None:
    table = next(one for one in tables.every(grid) if one.title.startswith("AUROC"))
    assert cell(table, "fedavg", "mutual information").text() == "–"
    assert not cell(table, "fedbnn", "mutual information").best
    assert cell(table, "fedavg", "entropy").value is not None


def test_megabytes_stand_by_exchange_and_add_up(grid) -> None:
    parts, costs = tables.every(grid)[-2:]
    assert parts.heads[1:] == ("statistics up", "train up", "statistics down", "train down")
    for way in ("up", "down"):
        whole = cell(costs, "fedavg", f"MB {way}").value
        assert whole == pytest.approx(
            sum(cell(parts, "fedavg", f"{name} {way}").value for name in ("train", "statistics"))
        )
    old = [{k: v for k, v in run.items() if k != "bytes_by_exchange"} for run in grid]
    assert "Megabytes by exchange" not in [table.title for table in tables.every(old)]


def test_seconds_are_left_out_and_that_is_said_where_runs_were_not_alone(grid) -> None:
    assert "seconds" in tables.every(grid)[-1].heads
    busy = tables.every([{**grid[0], "quiet": False}, *grid[1:]])[-1]
    assert "seconds" not in busy.heads
    assert any("seconds are left out" in note for note in busy.notes)


def test_the_moments_and_the_bins_are_explained_where_they_stand(run, grid) -> None:
    for table in (tables.of_run(run), *tables.main(grid)):
        heads = " ".join((*table.heads, table.title))
        if "@" in heads and "Paired" not in table.title:
            assert any(note.startswith("@TS: each task at its own end") for note in table.notes)
    calibrations = [one for one in tables.every(grid) if one.title.startswith("Calibration")]
    assert all("15 equal bins" in one.notes[-1] for one in calibrations)


def test_paired_differences_are_taken_seed_by_seed(grid) -> None:
    paired = tables.every(list(reversed(grid)))[1]
    by_key = {(run["method"], run["seed"]): run["class_agnostic"]["avg_fin"] for run in grid}
    differences = [by_key["fedbnn", seed] - by_key["fedavg", seed] for seed in range(3)]
    found = cell(paired, "fedbnn − fedavg", "agnostic @Fin")
    assert found.value == pytest.approx(statistics.mean(differences))
    assert found.spread == pytest.approx(statistics.stdev(differences))


def test_a_run_tested_with_both_heads_is_two_lines_of_the_table_and_one_of_the_costs(grid) -> None:
    worse = {name: {**grid[0][name], "avg_fin": 1.0} for name in ("task_aware", "class_agnostic")}
    both = [{**grid[0], "linear": {**worse, "fon": grid[0]["fon"], "novelty": None}}, *grid[1:]]
    made = tables.every(both)
    name = f"{grid[0]['method']}, linear head"
    assert cell(made[0], name, "aware @Fin").value == 1.0
    assert cell(made[0], grid[0]["method"], "aware @Fin") == cell(
        tables.every(grid)[0], grid[0]["method"], "aware @Fin"
    )
    assert made[-1] == tables.every(grid)[-1]


def test_the_main_tables_are_the_accuracies_and_the_others_come_after_them(grid) -> None:
    main = tables.main([{**run, "scenario": "small_ti"} for run in grid])
    assert [table.title.removesuffix(", in percent") for table in main] == [
        "Averages over the tasks",
        "Paired differences against fedbnn",
        "task-aware accuracy @TS beside the paper",
        "task-aware accuracy @Fin beside the paper",
        "task-aware accuracy @TS",
        "task-aware accuracy @Fin",
        "class-agnostic accuracy @TS",
        "class-agnostic accuracy @Fin",
    ]
    made = tables.every(grid)
    assert made[: len(main) - 2] == tables.main(grid)
    assert made[0] == tables.averages(grid)


def test_focus_on_now_is_averaged_over_the_rounds_that_were_evaluated(grid) -> None:
    table = next(one for one in tables.every(grid) if one.title.startswith("Focus-on-Now"))
    mine = [
        [value for value in run["fon"]["task_aware"] if value is not None]
        for run in grid
        if run["method"] == "fedavg"
    ]
    expected = statistics.mean(statistics.mean(values) for values in mine)
    assert cell(table, "fedavg", "task-aware").value == pytest.approx(expected)


def test_a_seed_without_its_partner_is_not_compared(grid) -> None:
    paired = tables.every(
        [run for run in grid if (run["method"], run["seed"]) not in {("fedbnn", 0), ("fedbnn", 1)}]
    )[1]
    assert cell(paired, "fedbnn − fedavg", "aware @TS").spread is None
    assert not [table for table in tables.every(grid[3:]) if table.title.startswith("Paired")]


def test_missing_numbers_are_dashes_and_never_best(grid) -> None:
    for run in grid:
        run["task_aware"]["avg_fin"] = None
        run["novelty"] = None
    summary = tables.every(grid)[0]
    found = cell(summary, "fedbnn", "aware @Fin")
    assert found.text() == "–"
    assert not found.best


def test_a_small_negative_difference_is_not_minus_zero() -> None:
    assert Cell(-0.01, signed=True).text() == "+0.0"
    assert Cell(-1.26, 0.5, signed=True).text() == "-1.3 ± 0.5"


def test_the_terminal_table_fits_eighty_columns_and_marks_the_best(grid) -> None:
    written = io.StringIO()
    for table in tables.every(grid):
        Console(file=written, width=80).print(terminal(table))
    lines = written.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in written.getvalue()
    assert "[n]: stores n images" in written.getvalue()
    assert any(line.strip().startswith("fedbnn") and "*" in line for line in lines)


def test_markdown_is_a_pipe_table_with_bold_winners(grid) -> None:
    summary = tables.every(grid)[0]
    text = page.markdown(summary)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    assert len(rows) == 2 + len(summary.rows)
    assert text.count("**") == 2 * (
        1 + sum(cell.best for row in summary.rows for cell in row.cells)
    )


def test_latex_escapes_and_balances(grid) -> None:
    for run in grid:
        run["method"] = run["method"] + "_x&50%"
    text = page.latex(tables.every(grid, reference="fedbnn_x&50%")[0])
    assert r"fedavg\_x\&50\%" in text
    assert text.count(r"\begin{tabular}{lrrrrrr}") == text.count(r"\end{tabular}") == 1
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {line.replace(r"\&", "").count("&") for line in body} == {6}


def test_csv_has_every_number_unrounded(grid) -> None:
    made = tables.every(grid)
    rows = list(csv.DictReader(io.StringIO(page.comma_separated(made))))
    assert len(rows) == sum(len(row.cells) for table in made for row in table.rows)
    mine = next(row for row in rows if row["row"] == "fedbnn" and row["column"] == "aware @TS")
    assert float(mine["value"]) == cell(made[0], "fedbnn", "aware @TS").value


def test_tasks_are_numbered_where_seeds_have_other_classes_in_them(grid) -> None:
    assert task_names(grid) == ["one", "two", "three"]
    other = [{**grid[0], "task_names": ["cat, dog", "two", "three"]}, *grid[1:]]
    assert task_names(other) == ["task 1", "task 2", "task 3"]
    assert any("task 1" in table.heads for table in tables.main(other))
