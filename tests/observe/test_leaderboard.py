"""The board of finished runs: a line a method and its settings, with how to repeat it."""

import csv
import json
from pathlib import Path

import pytest

from fedbnn.errors import RunDirectoryError
from fedbnn.evaluation import metrics
from fedbnn.report import leaderboard
from fedbnn.report.values import Runs, Table

Grid = list[dict]


def stored(root: Path, run: dict, **settings: object) -> Path:
    """A finished run in a directory."""
    run_dir = root / f"{run['scenario']}-{run['method']}-{run['seed']}-{len(list(root.iterdir()))}"
    run_dir.mkdir()
    (run_dir / "results.json").write_text(json.dumps(run))
    (run_dir / "diagnostics.json").write_text("{}")
    (run_dir / "env.json").write_text('{"commit": "0123456789abcdef-dirty"}')
    config = {"name": run["scenario"], "seed": run["seed"], "run_dir": None, **settings}
    (run_dir / "config.yaml").write_text(json.dumps({**config, "method": {"name": run["method"]}}))
    return run_dir


def command(method: str, runs: Runs) -> str:
    return f"repeat {method} x{len(runs)}"


def boards(root: Path) -> list[Table]:
    return leaderboard.boards(map(leaderboard.card, leaderboard.find([root])), command)


@pytest.fixture
def runs(grid: Grid, tmp_path: Path) -> Path:
    """Three methods by three seeds on one stream, and one run on another."""
    for run in grid:
        stored(tmp_path, run, client={"lr": 0.1})
    stored(tmp_path, {**grid[0], "scenario": "another"})
    return tmp_path


def test_a_stream_is_a_table_and_a_method_a_line_highest_first(runs: Path, grid: Grid) -> None:
    first, second = boards(runs)[::-1]
    assert first.title == "toy, three tasks, in percent"
    assert second.title == "another, in percent"
    assert len(first.rows) == 3
    place = first.heads.index("agnostic @Fin") - 1
    heights = [row.cells[place].value for row in first.rows]
    assert heights == sorted(heights, reverse=True)
    mine = [run["class_agnostic"]["avg_fin"] for run in grid if run["method"] == "fedavg"]
    row = next(row for row in first.rows if row.name == "fedavg")
    assert row.cells[place].value == pytest.approx(sum(mine) / 3)
    assert row.cells[place].spread is not None
    assert row.words == ("0, 1, 2", "0", "no", "0123456*", "`repeat fedavg x3`")
    assert len(row.cells) + len(row.words) == len(first.heads) - 1


def test_a_board_says_how_calibration_is_measured(runs: Path) -> None:
    [said] = [note for note in boards(runs)[0].notes if "calibration" in note]
    assert "over all test images together" in said
    assert f"ECE: {metrics.BINS} equal bins" in said


def test_settings_that_differ_are_lines_of_their_own_and_are_named(
    grid: Grid, tmp_path: Path
) -> None:
    for seed, rate in ((0, 0.1), (1, 0.1), (0, 0.3)):
        stored(tmp_path, grid[3 + seed], client={"lr": rate}, track={"name": f"x{rate}"})
    [board] = boards(tmp_path)
    assert {row.name: row.words[0] for row in board.rows} == {
        "fedavg (lr 0.1)": "0, 1",
        "fedavg (lr 0.3)": "0",
    }


def test_a_head_is_named_and_its_settings_only_where_runs_with_it_differ(
    grid: Grid, tmp_path: Path
) -> None:
    gaussian, exact = {"name": "gaussian", "ridge": 0.1}, {"name": "exact", "filters": 50}
    for head in (gaussian, exact, {**exact, "filters": 300}):
        stored(tmp_path, grid[3], head=head)
    assert {row.name for row in boards(tmp_path)[0].rows} == {
        "fedavg (head gaussian)",
        "fedavg (head exact, filters 50)",
        "fedavg (head exact, filters 300)",
    }


def test_told_boundaries_and_stored_images_are_said(grid: Grid, tmp_path: Path) -> None:
    stored(tmp_path, {**grid[0], "notes": {"consolidation": "at task ends"}})
    stored(tmp_path, grid[-1])
    [board] = boards(tmp_path)
    said = {row.name: row.words[1:3] for row in board.rows}
    assert said == {"fedbnn": ("0", "yes"), "fcil [200]": ("200", "no")}
    assert not any(cell.best for row in board.rows if "fcil" in row.name for cell in row.cells)


def test_seconds_of_a_busy_machine_are_left_out(grid: Grid, tmp_path: Path) -> None:
    stored(tmp_path, grid[0])
    stored(tmp_path, {**grid[3], "quiet": False})
    [board] = boards(tmp_path)
    place = board.heads.index("seconds") - 1
    assert {row.name: row.cells[place].text() for row in board.rows} == {
        "fedbnn": "18.0",
        "fedavg": "–",
    }


def test_the_board_is_markdown_and_csv(runs: Path) -> None:
    path = leaderboard.write(leaderboard.find([runs]), runs / "made", command)
    rows = [line for line in path.read_text().splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    assert len(rows) == 2 + 3 + 2 + 1
    with path.with_suffix(".csv").open() as file:
        commands = [row["value"] for row in csv.DictReader(file) if row["column"] == "command"]
    assert "`repeat fcil x3`" in commands


def test_nothing_to_show_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no finished run"):
        leaderboard.find([tmp_path])


def test_a_page_keeps_what_stands_around_its_board(runs: Path) -> None:
    page = runs / "README.md"
    page.write_text(f"# Before\n\n{leaderboard.BEGIN}\nyesterday\n{leaderboard.END}\n\nAfter\n")
    for _ in range(2):  # a second time changes nothing
        assert leaderboard.write(leaderboard.find([runs]), page, command) == page
        text = page.read_text()
        assert text.startswith(f"# Before\n\n{leaderboard.BEGIN}\n")
        assert text.endswith(f"{leaderboard.END}\n\nAfter\n")
        assert text.count("| fedavg |") == 1
        assert "yesterday" not in text
    assert (runs / "leaderboard.csv").is_file()


@pytest.mark.parametrize("text", [None, "no marks", leaderboard.BEGIN, leaderboard.END])
def test_a_page_without_a_place_for_a_board_is_left_as_it_is(
    runs: Path, text: str | None
) -> None:
    page = runs / "README.md"
    if text is not None:
        page.write_text(text)
    with pytest.raises(RunDirectoryError, match="no place for a board"):
        leaderboard.write(leaderboard.find([runs]), page, command)
    assert text == (page.read_text() if page.exists() else None)


def test_a_page_remembers_runs_that_are_gone_until_they_are_made_again(
    grid: Grid, tmp_path: Path
) -> None:
    page, here = tmp_path / "README.md", tmp_path / "here"
    page.write_text(f"{leaderboard.BEGIN}\n{leaderboard.END}\n")

    def lines(run: dict, folder: str) -> list[str]:
        (here / folder).mkdir(parents=True)
        stored(here / folder, run)
        leaderboard.write(leaderboard.find([here / folder]), page, command)
        return [line for line in page.read_text().splitlines() if line.startswith("| fed")]

    first, second = (run for run in grid if run["method"] == "fedavg" and run["seed"] < 2)
    assert "| 0 | 0 |" in lines(first, "monday")[0]
    [both] = lines(second, "tuesday")
    assert "| 0, 1 | 0 |" in both
    better = {**second, "class_agnostic": {**second["class_agnostic"], "avg_fin": 99.0}}
    [again] = lines(better, "wednesday")
    assert "| 0, 1 | 0 |" in again
    assert again != both
    kept = (tmp_path / "leaderboard.jsonl").read_text().splitlines()
    assert [json.loads(line)["seed"] for line in kept] == [0, 1]
    assert not {*leaderboard.PATHS} & json.loads(kept[0])["config"].keys()
    assert len(lines({**first, "scenario": "another"}, "thursday")) == 2


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"seed": 0}'])
def test_a_memory_that_is_none_is_named_and_the_page_stays(runs: Path, text: str) -> None:
    page = runs / "README.md"
    page.write_text(before := f"{leaderboard.BEGIN}\n{leaderboard.END}\n")
    (runs / "leaderboard.jsonl").write_text(text + "\n")
    with pytest.raises(RunDirectoryError, match="not the runs of a board"):
        leaderboard.write(leaderboard.find([runs]), page, command)
    assert page.read_text() == before


def test_a_board_of_remembered_runs_is_that_of_the_runs(runs: Path) -> None:
    """What a line of the memory keeps is all that a board needs."""
    cards = [leaderboard.card(run_dir) for run_dir in leaderboard.find([runs])]
    through = [json.loads(json.dumps(one)) for one in cards]
    assert leaderboard.boards(through, command) == leaderboard.boards(cards, command)
