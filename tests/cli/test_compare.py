"""`fedbnn compare`: a grid of runs that can be stopped, continued, and has tables at its end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from fedbnn.cli.compare import PLAIN_SECONDS, Cell, GridProgress, Sweep, options
from fedbnn.cli.compare import grid as cells
from fedbnn.cli.compose import SCHEMA
from fedbnn.config.parse import parse
from fedbnn.errors import ConfigError
from fedbnn.storage import run_dir
from tests.cli.command import environment, fedbnn, files, started


@pytest.fixture
def stand_ins(finished: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each run copies a finished one, in its own process and under its own name.

    It fails where a name in this list is part of its own.
    """
    failing: list[str] = []

    def copied(words: Sequence[str]) -> int:
        said = dict(zip(words[1::2], words[2::2], strict=True))
        directory = Path(said["--run_dir"])
        if any(name in directory.name for name in failing):
            raise ConfigError("a client sat on the cable", "cable", "lift it")
        shutil.copytree(finished, directory)
        results = json.loads((directory / "results.json").read_text())
        results |= {"method": said["--method"], "seed": int(said["--seed"])}
        (directory / "results.json").write_text(json.dumps(results))
        run_dir.sealed_again(directory, [directory / "results.json"])
        return 0

    monkeypatch.setattr("fedbnn.cli.train.main", copied)
    monkeypatch.setattr("fedbnn.cli.compare.LOOK_SECONDS", 0.05)
    return failing


def compare(asked: str, *more: object) -> int:
    """`fedbnn compare --config tiny.yaml ASKED`, split at blanks."""
    return fedbnn("compare", "--config", "tiny.yaml", *asked.split(), *more)


def test_a_grid_ends_in_tables_of_every_format(
    home: Path, stand_ins: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare("--methods fedbnn,fedavg --seeds 0,1 --jobs 3") == 0
    shown = capsys.readouterr().out
    assert all(line.isprintable() for line in shown.split("\n"))
    assert shown.rstrip().endswith("report  runs/compare-tiny/report.html")
    assert all(
        title in shown for title in ("Averages over the tasks", "Paired differences against fedbnn")
    )
    per_task = [
        f"{regime} accuracy {moment}"
        for regime in ("task-aware", "class-agnostic")
        for moment in ("@TS", "@Fin")
    ]
    assert all(title in shown for title in per_task)
    assert not any(
        title in shown for title in ("Calibration", "Focus-on-Now", "AUROC", "Cost of a run")
    )
    written = files(home / "runs" / "compare-tiny")
    assert written.keys() >= {
        "report.html",
        "tables.md",
        "tables.tex",
        "tables.csv",
        "figures/focus_on_now.png",
    }
    assert written.keys() >= {
        f"{method}-s{seed}/results.json" for method in ("fedbnn", "fedavg") for seed in (0, 1)
    }
    for name in ("tables.md", "tables.tex", "tables.csv"):
        text = written[name].decode()
        assert all(word in text for word in ("fedbnn", "fedavg", "chance", "@TS", "@Fin"))
    assert "±" in written["tables.md"].decode()


@pytest.mark.usefixtures("undrawn")
def test_one_failed_run_is_reported_and_does_not_sink_the_others(
    home: Path, stand_ins: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    stand_ins.append("fedavg-s1")
    assert compare("--methods fedbnn,fedavg --seeds 0,1 --out grid") == 2
    shown = capsys.readouterr().out
    assert (
        "fedavg-s1 failed with exit code 2: error: a client sat on the cable (cable); lift it\n"
        in shown
    )
    assert shown.count(" failed ") == 1
    assert (home / "grid" / "tables.md").is_file()
    assert "a client sat on the cable" in (home / "grid" / "logs" / "fedavg-s1.txt").read_text()
    assert sorted(path.parent.name for path in (home / "grid").glob("*/results.json")) == [
        "fedavg-s0",
        "fedbnn-s0",
        "fedbnn-s1",
    ]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("fedavg-s0", 4),
        ("logs", 4),
        ("logs/fedavg-s0.txt", 4),
        ("figures", 4),
        ("figures/focus_on_now.png", 0),
        ("figures/focus_on_now.pdf", 0),
    ],
)
def test_nothing_is_written_where_a_link_in_the_directory_of_a_stranger_leads(
    home: Path, place: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "precious").mkdir()
    target = home / "precious" / "file" if Path(place).suffix else home / "precious"
    link = home / "grid" / place
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    assert compare("--methods fedavg --seeds 0 --out grid") == code
    assert not list((home / "precious").iterdir())
    assert capsys.readouterr().err.count("\n") == bool(code)


@pytest.mark.usefixtures("stand_ins", "undrawn")
def test_nor_where_one_in_the_place_of_a_part_of_a_sweep_leads(home: Path) -> None:
    (home / "precious").mkdir()
    (home / "grid").mkdir()
    (home / "grid" / "client.epochs=1").symlink_to(home / "precious")
    sweep = "--methods fedavg --seeds 0 --out grid --sweep client.epochs=1,2"
    assert compare(sweep) == 4
    assert not list((home / "precious").iterdir())


@pytest.mark.usefixtures("stand_ins", "undrawn")
def test_a_pipe_in_the_place_of_a_log_makes_nobody_wait(home: Path) -> None:
    (home / "grid" / "logs").mkdir(parents=True)
    os.mkfifo(home / "grid" / "logs" / "fedavg-s0.txt")
    assert compare("--methods fedavg --seeds 0 --out grid") == 4


@pytest.mark.usefixtures("undrawn")
def test_a_sweep_over_numbers_has_a_table_for_all_a_folder_for_each_and_a_plot(
    home: Path, stand_ins: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    swept = "--sweep stream.clients_per_round=1,2 --methods fedavg --seeds 0,1 --out sweep"
    assert compare(swept) == 0
    assert capsys.readouterr().out.rstrip().endswith("report  sweep/report.html")
    page = (home / "sweep" / "report.html").read_text()
    assert "tiny, stream.clients_per_round = 1, 2" in page
    assert all(f'<figure id="{name}"' in page for name in ("sweep", "focus_on_now"))
    assert all(
        (home / "sweep" / f"fedavg-s{seed}-{value}").is_dir() for seed in (0, 1) for value in (1, 2)
    )
    assert all(
        (home / "sweep" / f"stream.clients_per_round={value}" / "report.html").is_file()
        for value in (1, 2)
    )
    assert (home / "sweep" / "figures" / "sweep.png").stat().st_size > 1000
    table = (home / "sweep" / "tables.md").read_text()
    assert all(name in table for name in ("fedavg 1", "fedavg 2"))


@pytest.mark.usefixtures("undrawn")
def test_a_sweep_over_words_has_the_table_and_curves_but_no_plot(
    home: Path, stand_ins: list[str]
) -> None:
    swept = "--sweep stream.partition=iid,dirichlet --methods fedavg --seeds 0 --out sweep"
    assert compare(swept, "--set", "client.lr=0.01") == 0
    assert all(
        f"fedavg {value}" in (home / "sweep" / "tables.md").read_text()
        for value in ("iid", "dirichlet")
    )
    assert {path.stem for path in (home / "sweep" / "figures").iterdir()} == {"focus_on_now"}


@pytest.mark.usefixtures("undrawn")
def test_a_sweep_of_one_method_runs_the_others_once_to_compare_with(
    home: Path, stand_ins: list[str]
) -> None:
    swept = "--sweep fedbnn:method.r_init=0,3 --methods fedbnn,fedavg --seeds 0 --out sweep"
    assert compare(swept) == 0
    runs = sorted(path.parent.name for path in (home / "sweep").glob("*/results.json"))
    assert runs == ["fedavg-s0", "fedbnn-s0-0", "fedbnn-s0-3"]
    table = (home / "sweep" / "tables.md").read_text()
    assert all(name in table for name in ("fedbnn 0", "fedbnn 3", "fedavg |"))
    assert "fedavg" in (home / "sweep" / "method.r_init=3" / "tables.md").read_text()


def test_a_setting_for_one_method_wins_over_one_for_all(tmp_path: Path) -> None:
    asked = {"client.lr": "1", "head": "gaussian", "local:head": "linear"}
    mine = {
        cell.method: dict(cell.settings)
        for cell in cells(("fedavg", "local"), (0,), asked, None, tmp_path)
    }
    assert mine["fedavg"] == {"client.lr": "1", "head": "gaussian"}
    assert mine["local"] == {"client.lr": "1", "head": "linear"}


def test_a_setting_may_be_a_flag_and_one_of_a_method_of_ones_own_has_its_path(
    tmp_path: Path,
) -> None:
    mine = "tests.cli.own_parts:Mine"
    words = ["--config", "x", "--methods", f"{mine},fedavg", "--seeds", "0"]
    words += ["--client.lr", "0.01", "--client.epochs=3", "--set", f"{mine}:method.strength=1"]
    asked = options(words)
    found = cells(asked.methods, asked.seeds, dict(asked.set), None, tmp_path)
    both = {"client.lr": "0.01", "client.epochs": "3"}
    assert [dict(cell.settings) for cell in found] == [{**both, "method.strength": "1"}, both]


def test_a_comparison_is_one_group_and_every_run_has_a_name_of_its_own(home: Path) -> None:
    swept = cells(
        ("fedbnn", "fedavg"), (0, 1), {}, Sweep("client.lr", ("1e-3", "10")), home / "grid"
    )
    tracks = [parse(cell.words(["tiny.yaml"]), SCHEMA)["track"] for cell in swept]
    assert {track["group"] for track in tracks} == {"grid"}
    assert [track["name"] for track in tracks] == [cell.name for cell in swept]
    assert len({track["name"] for track in tracks}) == 8


@pytest.mark.parametrize("directory", ["2024", "on: off"])
def test_the_group_is_the_name_of_the_directory_whatever_it_looks_like(
    home: Path, directory: str
) -> None:
    (home / directory).mkdir()
    [cell] = cells(("fedavg",), (0,), {}, None, Path(directory) / "nowhere" / "..")
    assert parse(cell.words(["tiny.yaml"]), SCHEMA)["track"]["group"] == directory


def test_a_group_of_the_users_own_wins(home: Path) -> None:
    [cell] = cells(("fedavg",), (0,), {"track.group": "study"}, None, home / "grid")
    assert parse(cell.words(["tiny.yaml"]), SCHEMA)["track"]["group"] == "study"


WRONG = {
    ("--methods", "fedavg,fedbn"): "did you mean 'fedbnn'?",
    ("--methods", ","): "argument --methods: expected at least one word",
    ("--seeds", "0,x"): "argument --seeds: invalid numbers value: '0,x'",
    ("--jobs", "0"): "argument --jobs: invalid PositiveInt value: '0'",
    ("--set", "client.lr"): "argument --set: expected KEY=VALUE, got 'client.lr'",
    ("--set", "client.lrr=1"): "did you mean 'client.lr'?",
    ("--method", "fedavg"): "one of its own (method); use --methods",
    ("--seed", "3"): "one of its own (seed); use --seeds",
    ("--set", "fedavg:method.name=ewc"): "(fedavg:method.name); use --methods",
    ("--set", "run_dir=here"): "(run_dir); use --out",
    ("--sweep", "seed=1,2"): "one of its own (seed); use --seeds",
    ("--set", "ewc:client.lr=1"): "a setting is for ewc, which is not compared",
    ("--sweep", "ewc:client.lr=1,2"): "a setting is for ewc, which is not compared",
    ("--set", "fedavg:client.lrr=1"): "did you mean 'client.lr'?",
    ("--sweep", "client.lr="): "argument --sweep: expected at least one word",
    ("--sweep", "client.lr=0.1,much"): "client.lr: expected a number above 0, got 'much'",
}


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_a_mistake_is_found_before_anything_starts(
    words: tuple[str, ...], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare("", *words) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ")
    assert line.count("\n") == 1
    assert WRONG[words] in line
    assert list(files(home)) == ["tiny.yaml"]


def test_parts_that_do_not_go_together_are_found_before_anything_starts(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--set", "head=exact", "--set", "head.features=backbone", "--out", "grid")
    assert compare("--methods exact,fedbnn --seeds 0", *words) == 2
    assert "the features of a backbone that is trained move" in capsys.readouterr().err
    assert not (home / "grid").exists()


@pytest.mark.usefixtures("undrawn")
def test_results_of_other_settings_are_not_taken_for_these(
    finished: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "grid").mkdir()
    (home / "grid" / "fedbnn-s0").symlink_to(finished)
    asked = "--methods fedbnn --seeds 0 --out grid"
    assert compare(asked, "--set", "client.epochs=2") == 4
    assert "client.epochs was 1, now it is 2" in capsys.readouterr().err
    assert compare(asked, "--set", "trainer.gradient_clip_val=0.5") == 4
    assert "trainer.gradient_clip_val was absent, now it is 0.5" in capsys.readouterr().err
    assert compare(asked) == 0


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("undrawn")
def test_a_stopped_comparison_goes_on_where_it_was(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = home / "grid"
    words = f"--methods fedbnn,fedavg --seeds 0,1 --out {grid} --jobs=2"
    asked = [sys.executable, "-m", "fedbnn", "compare", "--config", "tiny.yaml", *words.split()]
    caught = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with started(asked, home, env=environment(), **caught) as running:
        while running.poll() is None and not list(grid.glob("*/state/finished.json")):
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
        shown, _ = running.communicate()
    assert running.returncode == 143
    assert shown.endswith("stopped; the same command goes on from here\n")
    assert not left_over(grid)
    done = {path.parent.parent for path in grid.glob("*/state/finished.json")}
    before = {directory: times(directory) for directory in done}
    assert 1 <= len(done) < 4

    assert compare(words) == 0
    assert {directory: times(directory) for directory in done} == before
    assert len(list(grid.glob("*/state/finished.json"))) == 4
    seeds = [json.loads(path.read_text())["seed"] for path in grid.glob("fedavg-*/results.json")]
    assert sorted(seeds) == [0, 1]
    assert "fedbnn" in (grid / "tables.md").read_text()
    assert "failed" not in capsys.readouterr().out


def times(directory: Path) -> dict[str, int]:
    """When each file of a run was last written."""
    return {
        str(path): path.stat().st_mtime_ns
        for path in directory.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def left_over(folder: Path) -> list[str]:
    """Processes that still work on runs in a folder."""
    commands = [path / "cmdline" for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [text for text in map(quietly_read, commands) if str(folder) in text]


def quietly_read(file: Path) -> str:
    """The words of a process, or nothing if it has gone."""
    try:
        return file.read_text().replace("\0", " ")
    except OSError:
        return ""


def test_where_nobody_watches_live_a_line_says_what_is_done_and_how_long_the_rest_takes(
    finished: Path, tmp_path: Path
) -> None:
    cells = [Cell("fedavg", seed, (), tmp_path / str(seed), rounds=4) for seed in range(4)]
    said, clock = StringIO(), [0.0]
    progress = GridProgress(cells, Console(file=said))
    progress.bar.get_time = lambda: clock[-1]
    progress.bar.start_task(progress.bar.task_ids[0])
    for minutes, cell in enumerate(cells[:3]):
        clock.append(60.0 * minutes)
        cell.directory.symlink_to(finished)
        progress._said = -PLAIN_SECONDS
        progress.watch(SimpleNamespace(running={cells[3]: None}))
    lines = said.getvalue().splitlines()
    assert lines[0] == "4/16 rounds, 3 0/4"
    assert lines[2] == "12/16 rounds, 0:01:00 left; 3 0/4"


def test_a_switch_of_another_command_is_named() -> None:
    with pytest.raises(ConfigError, match="--dry_run is no switch of this command"):
        options(["--config", "quickstart", "--dry-run"])
