"""The first minute: conf/quickstart.yaml as it is, in a process of its own."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.cli.command import ROOT, command, environment

MOST_CPU_SECONDS = 70
MOST_TIMES = 2.5
"""CPU of the whole command for each second of CPU in its rounds: imports, settings, pages."""


@pytest.mark.timeout(600)
def test_the_quickstart_fits_into_its_time_and_shows_what_a_newcomer_needs(tmp_path: Path) -> None:
    said, wrong = tmp_path / "out.txt", tmp_path / "err.txt"
    asked = command("--config", str(ROOT / "conf" / "quickstart.yaml"))
    with said.open("w") as out, wrong.open("w") as err:
        running = subprocess.Popen(asked, cwd=tmp_path, env=environment(), stdout=out, stderr=err)
        _, status, used = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
    shown = said.read_text()
    assert (running.returncode, wrong.read_text()) == (0, "")
    assert (spent := used.ru_utime + used.ru_stime) < MOST_CPU_SECONDS
    assert spent < MOST_TIMES * in_rounds(tmp_path / "runs")
    for words in (
        "class-incremental digits, 5 tasks",
        "20 registered, 5 a round, 20 rounds, dirichlet",
        "q = q_0 * prod_k",
    ):
        assert words in shown
    assert shown.count("\nround 20/20  5 clients  now ") == 4
    for name in ("quickstart", "quickstart-fedavg", "quickstart-fedprox", "quickstart-exact"):
        beside = json.loads((tmp_path / "runs" / name / "results.json").read_text())
        assert beside["class_agnostic"]["avg_ts"] > 60
        assert not (tmp_path / "runs" / name / "report.html").exists()
    assert (tmp_path / "runs" / "quickstart" / "beside" / "report.html").exists()
    assert all(line.isprintable() for line in shown.split("\n"))
    for name in (
        "classes 0-1",
        "classes 8-9",
        "@TS",
        "@Fin",
        "chance",
        "report  not drawn; to draw it: fedbnn report runs/quickstart\n",
    ):
        assert name in shown
    assert "side by side  runs/quickstart/beside/report.html" in shown
    results = json.loads((tmp_path / "runs" / "quickstart" / "results.json").read_text())
    assert results["task_aware"]["avg_fin"] > results["chance"]["task_aware"]["avg_fin"] + 20


def in_rounds(runs: Path) -> float:
    """CPU seconds of all rounds: training, checks, aggregation, evaluation, commits."""
    files = [path.read_text(encoding="utf-8") for path in runs.glob("*/metrics.jsonl")]
    records = [json.loads(line) for text in files for line in text.splitlines()]
    return float(sum(one["load"]["own"] * one["seconds"]["round"] for one in records))
