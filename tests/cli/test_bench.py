"""`fedbnn bench`: what things cost, side by side, as a table and as JSON; and `fedbnn report`."""

import json
from pathlib import Path

import pytest

from fedbnn.cli import bench
from tests.cli.command import fedbnn, files


def test_a_step_is_measured_against_the_standard_one(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(bench, "CASES", {"paper_resnet": (2, 3)})
    assert fedbnn("bench", "--repeats", 1, "--out", "deep/step.json") == 0
    shown = capsys.readouterr().out
    assert "fedbnn bench step" in shown
    assert "written  deep/step.json" in shown
    measured = json.loads((home / "deep" / "step.json").read_text())
    ratios = {row["name"]: row["ratio"] for row in measured["rows"]}
    assert ratios[bench.REFERENCE] == 1.0
    assert ratios.keys() >= {"SNN, fused Adam", "FedBNN (Pyro)", "FedBNN, feature distillation"}
    assert all(ratio > 0 for ratio in ratios.values())
    assert measured["environment"]["packages"]["torch"]
    assert all(
        low <= row["median_ms"] <= high
        for row in measured["rows"]
        for low, high in [row["quartiles_ms"]]
    )


@pytest.mark.slow
def test_engines_do_the_same_work_to_the_byte_also_past_the_last_round(home: Path, capsys) -> None:
    assert (
        fedbnn(
            "bench",
            "engines",
            "--config",
            "tiny.yaml",
            "--repeats",
            5,
            "--workers",
            2,
            "--out",
            "engines.json",
        )
        == 0
    )
    rows = json.loads((home / "engines.json").read_text())["rows"]
    assert [(row["name"], row["same_bytes"]) for row in rows] == [
        ("serial", True),
        ("processes", True),
    ]
    assert rows[0]["ratio"] == 1.0
    assert "same bytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("method", "exchanged"),
    [("fedbnn", True), pytest.param("fedavg", False, marks=pytest.mark.slow)],
)
def test_overhead_is_a_share_of_the_round_and_so_are_statistics(
    home: Path, method: str, exchanged: bool
) -> None:
    assert (
        fedbnn(
            "bench",
            "overhead",
            "--config",
            "tiny.yaml",
            "--method",
            method,
            "--repeats",
            1,
            "--out",
            "overhead.json",
        )
        == 0
    )
    (row,) = json.loads((home / "overhead.json").read_text())["rows"]
    assert 0 < row["making_batches"] < row["outside_compute"] < 1
    assert row["overhead"] == pytest.approx(row["outside_compute"] - row["making_batches"])
    assert (0 < row["statistics_exchange"] < 1) == exchanged


def test_rounds_have_a_row_a_task_with_its_seconds_and_its_accuracy(home: Path) -> None:
    words = ("--config", "tiny.yaml", "--repeats", 1, "--stream.samples_per_round", 60)
    assert fedbnn("bench", "rounds", *words, "--out", "rounds.json") == 0
    rows = json.loads((home / "rounds.json").read_text())["rows"]
    assert [(row["task"], row["rounds"], row["images"]) for row in rows] == [(1, 1, 60), (2, 1, 60)]
    for row in rows:
        assert row["round_s"] > 0
        assert 0 <= row["class_agnostic_ts"] <= row["task_aware_ts"] <= 100


@pytest.mark.slow
def test_overhead_shortens_tasks_that_are_given_by_their_ends(home: Path) -> None:
    text = (home / "tiny.yaml").read_text()
    assert "rounds_per_task: 2" in text
    (home / "ends.yaml").write_text(text.replace("rounds_per_task: 2", "boundaries: [30, 70]"))
    assert (
        fedbnn(
            "bench", "overhead", "--config", "ends.yaml", "--repeats", 1, "--out", "overhead.json"
        )
        == 0
    )
    assert json.loads((home / "overhead.json").read_text())["rows"][0]["rounds"] == 1


@pytest.mark.slow
def test_memory_is_read_after_each_round_of_a_run_of_its_own(home: Path, capsys) -> None:
    asked = ("--config", "tiny.yaml", "--repeats", 4, "--out", "memory.json")
    assert fedbnn("bench", "memory", *asked) == 0
    (row,) = json.loads((home / "memory.json").read_text())["rows"]
    assert row["rounds"] == 8
    assert 50 < row["after_5_mib"] < 4000
    assert row["ratio"] == pytest.approx(row["last_mib"] / row["after_5_mib"])
    assert row["last_mib"] == row["by_round_mib"][-1]
    assert "by_round_mib" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ("stepp",),
        ("step", "--repeats", "0"),
        ("memory", "--workers", "many"),
        ("engines", "--deployment"),
        ("engines", "--slow_site"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_measured_is_one_line(words: tuple[str, ...], home: Path, capsys) -> None:
    assert fedbnn("bench", *words) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(files(home)) == ["tiny.yaml"]


def test_a_report_is_written_again_and_several_runs_together(
    finished: Path, home: Path, capsys
) -> None:
    page = finished / "report.html"
    before = page.read_bytes()
    page.unlink()
    assert fedbnn("report", finished) == 0
    assert capsys.readouterr().out == f"report  {page}\n"
    assert page.read_bytes() == before
    assert fedbnn("report", finished, finished, "--out", "both") == 0
    assert capsys.readouterr().out == "report  both/report.html\n"
    assert files(home / "both").keys() >= {"report.html", "tables.md", "figures/focus_on_now.png"}


def test_a_run_without_results_has_no_report(home: Path, capsys) -> None:
    (home / "empty").mkdir()
    assert fedbnn("report", "empty") == 4
    assert "no results: results.json cannot be read (empty)" in capsys.readouterr().err
