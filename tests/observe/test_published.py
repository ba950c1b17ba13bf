"""The paper's numbers: copied without a slip, and beside ours where the scenario is the paper's."""

import statistics
from typing import Any

import pytest

from fedbnn.report import tables

Runs = list[dict[str, Any]]


def beside(grid: Runs, scenario: str) -> Runs:
    """The made-up runs of three tasks, as runs of a scenario."""
    return [{**run, "scenario": scenario} for run in grid]


def test_every_printed_average_is_the_mean_of_its_tasks() -> None:
    lines = tables.published()
    for line in lines:
        *tasks, average = line[3]
        assert average.value == pytest.approx(
            statistics.mean(task.value for task in tasks), abs=0.011
        ), line
    assert len({line[:3] for line in lines}) == len(lines) == 64


def test_what_does_not_change_after_its_task_is_printed_twice_with_the_same_number() -> None:
    """The last task ends with the run, so its @TS is its @Fin."""
    lines = [line for line in tables.published() if not line[0].startswith("gradual")]
    last = {
        moment: [cells[-2] for *_, when, cells in lines if when == moment]
        for moment in ("ts", "fin")
    }
    assert len(last["ts"]) == 26
    assert last["ts"] == last["fin"]


def test_our_line_is_under_the_papers(grid: Runs) -> None:
    made = tables.beside_the_paper(beside(grid, "small_ti"))
    assert [table.title.split()[2] for table in made] == ["@TS", "@Fin"]
    names = [row.name for row in made[1].rows]
    assert names[names.index("paper: fedavg") + 1] == "fedavg"
    assert names[names.index("paper: fedbnn") + 1] == "fedbnn"
    assert "fcil" not in names  # the paper has no such line on this scenario
    printed, ours = (
        next(row for row in made[1].rows if row.name == name).cells
        for name in ("paper: fedbnn", "fedbnn")
    )
    assert (printed[0].value, printed[0].spread, printed[-1].value) == (22.23, 1.24, 14.59)
    mine = [run["task_aware"] for run in grid if run["method"] == "fedbnn"]
    assert ours[0].value == pytest.approx(statistics.mean(part["fin"][0] for part in mine))
    assert ours[-1].spread == pytest.approx(statistics.stdev(part["avg_fin"] for part in mine))


def test_both_heads_of_a_method_stand_under_its_line(grid: Runs) -> None:
    both = [
        {
            **run,
            "linear": {
                name: run[name] for name in ("task_aware", "class_agnostic", "fon", "novelty")
            },
        }
        for run in grid
    ]
    titles = {table.title: table for table in tables.every(beside(both, "gradual_ti"))}
    names = [
        row.name for row in titles["task-aware accuracy @Fin beside the paper, in percent"].rows
    ]
    assert names[-3:] == ["paper: fedbnn", "fedbnn", "fedbnn, linear head"]
    assert (
        "task-aware accuracy @TS beside the paper, in percent" not in titles
    )  # the paper gives no @TS of gradual streams


def test_the_presets_that_follow_the_paper_stand_under_its_line(grid: Runs) -> None:
    renamed = [
        {**run, "method": run["method"].replace("fedavg", "fedbnn_authors")}
        for run in beside(grid, "small_ti")
    ]
    names = [row.name for row in tables.beside_the_paper(renamed)[0].rows]
    assert names[-3:] == ["paper: fedbnn", "fedbnn", "fedbnn_authors"]


def test_runs_of_two_scenarios_have_nothing_beside_them(grid: Runs) -> None:
    assert (
        tables.beside_the_paper([*beside(grid[:1], "small_ti"), *beside(grid[1:], "large_ti")])
        == []
    )


@pytest.mark.parametrize("scenario", ["toy, three tasks", "cifar100_ci"])
def test_another_scenario_or_other_tasks_have_nothing_beside_them(
    grid: Runs, scenario: str
) -> None:
    assert tables.beside_the_paper(beside(grid, scenario)) == []
