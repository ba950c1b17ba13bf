"""FedBNN from Python: the same as the commands, wherever it is called."""

import asyncio
import itertools
import signal
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

import fedbnn
from fedbnn import api
from fedbnn.cli import compare as comparing
from fedbnn.config.own import imported
from fedbnn.errors import ConfigError
from tests.cli.command import final
from tests.cli.own_parts import READY, Mine, Tiny

SIGNALS = (signal.SIGINT, signal.SIGTERM)
pytestmark = pytest.mark.usefixtures("undrawn")
INTERRUPTING = {"callbacks": [{"class_path": "tests.cli.own_parts.Interrupting"}]}


@pytest.fixture(autouse=True)
def signals_are_given_back():
    """Whatever a test does."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_run_is_that_of_the_command(home: Path, finished: Path) -> None:
    run = fedbnn.run("tiny.yaml", run_dir=home / "run")
    assert final(run.directory) == final(finished)
    assert run.results["task_names"] == ["classes 0-4", "classes 5-9"]
    assert [line["round"] for line in run.rounds] == [1, 2, 3, 4]
    assert run.report.read_text().startswith("<!")
    assert len(run.model.classes) == 10


def test_the_table_is_tidy_and_a_data_frame_where_pandas_is(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = api.Run(finished)
    assert [(row["regime"], row["task"]) for row in run.rows] == [
        (regime, task)
        for regime in ("task_aware", "class_agnostic")
        for task in ("classes 0-4", "classes 5-9")
    ]
    assert run.rows[3]["fin"] == run.results["class_agnostic"]["fin"][1]
    assert run.rows[3]["chance_fin"] == 10.0
    pandas = SimpleNamespace(DataFrame=lambda rows: ("frame", rows), __spec__=ModuleSpec("x", None))
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    assert run.table == ("frame", run.rows)


def test_settings_are_nested_or_dotted_and_parts_are_objects(home: Path) -> None:
    settings = {"client.lr": 0.01, "network": Tiny, "method": Mine, "stream": {"clients": 3}}
    run = fedbnn.run("tiny.yaml", seed=2, run_dir=home / "run", **settings)
    assert run.results["method"] == "tests.cli.own_parts:Mine"
    assert run.results["seed"] == 2
    text = (run.directory / "config.yaml").read_text()
    assert "lr: 0.01" in text
    assert "clients: 3" in text
    assert "name: tests.cli.own_parts:Tiny" in text


def test_it_runs_in_a_thread_and_in_an_event_loop(home: Path, finished: Path) -> None:
    runs: list[api.Run] = []

    def work(name: str) -> None:
        runs.append(fedbnn.run("tiny.yaml", run_dir=home / name))

    async def loop() -> None:
        work("loop")
        await asyncio.to_thread(work, "beside a loop")

    thread = Thread(target=work, args=("thread",))
    thread.start()
    thread.join()
    asyncio.run(loop())
    assert [final(run.directory) for run in runs] == [final(finished)] * 3


def test_threads_train_one_after_the_other_to_the_same_bytes(home: Path, finished: Path) -> None:
    runs: dict[int, api.Run] = {}

    def work(seed: int) -> None:
        runs[seed] = fedbnn.run("tiny.yaml", seed=seed)

    threads = [Thread(target=work, args=(seed,)) for seed in (0, 1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({run.directory for run in runs.values()}) == 3
    assert final(runs[0].directory) == final(finished)


def test_ctrl_c_is_a_keyboard_interrupt_and_the_run_goes_on_to_the_same_end(
    home: Path, finished: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        fedbnn.run("tiny.yaml", run_dir=home / "run", trainer=INTERRUPTING)
    assert not (home / "run" / "results.json").exists()
    run = fedbnn.run(resume=home / "run", **{"trainer.callbacks": None})
    assert final(run.directory) == final(finished)


def test_a_comparison_has_the_rows_of_all_its_runs_and_a_page(home: Path) -> None:
    found = fedbnn.compare("tiny.yaml", [Mine], [1], out=home / "grid", **{"client.lr": 0.01})
    assert [run.directory.name for run in found.runs] == ["tests.cli.own_parts:Mine-s1"]
    assert found.failures == {}
    assert [one["seed"] for one in found.results] == [1]
    assert [row["run"] for row in found.table] == ["tests.cli.own_parts:Mine-s1"] * 4
    assert found.report == home / "grid" / "report.html"
    assert found.report.is_file()


def test_a_mistake_is_an_exception_of_one_line() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'client\.lr'"):
        fedbnn.run("quickstart", **{"client.lrr": 1})
    with pytest.raises(ConfigError, match="did you mean 'quickstart'"):
        fedbnn.run("quikstart")
    with pytest.raises(ConfigError, match="a Linear has no name that it could be imported by"):
        fedbnn.run("quickstart", network=nn.Linear(3, 3))
    with pytest.raises(ConfigError, match="unknown method 'fedavgg'; did you mean 'fedavg'"):
        fedbnn.compare("quickstart", "fedavgg", seeds=3)
    with pytest.raises(AttributeError, match="no attribute 'ruin'"):
        fedbnn.ruin  # noqa: B018


def test_what_a_module_holds_goes_by_its_name_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not api._path(READY).startswith("__main__")
    assert imported(api._path(READY)) is READY
    main, mine = sys.modules["__main__"], nn.Linear(3, 3)
    monkeypatch.setattr(main, "mine", mine, raising=False)
    with pytest.warns(UserWarning, match="mine is part of this program: no other one"):
        assert api._path(mine) == "__main__:mine"


def test_a_list_may_hold_parts_of_ones_own_too() -> None:
    assert api._text([Tiny, Path("a b"), 1]) == '["tests.cli.own_parts:Tiny", "a b", 1]'
    with pytest.raises(ConfigError, match="a Tiny has no name that it could be imported by"):
        api._text([Tiny((1, 8, 8))])


def test_numbers_and_arrays_of_numpy_are_settings() -> None:
    given = {"seed": np.int64(3), "client": {"lr": np.float32(0.5)}, "network.hidden": np.ones(2)}
    assert [*api._words(given)] == ["--seed=3", "--client.lr=0.5", "--network.hidden=[1.0, 1.0]"]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> type[Tiny]:
    """A network that is part of the running program, as in a notebook."""
    made = type("Sketch", (Tiny,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Sketch", made, raising=False)
    return made


@pytest.mark.filterwarnings("ignore:Sketch is part of this program")
@pytest.mark.parametrize("engine", ["processes", "flower"])
def test_a_part_of_the_program_is_refused_to_workers_before_anything_starts(
    home: Path, program: type[Tiny], engine: str
) -> None:
    with pytest.raises(ConfigError, match="__main__:Sketch is part of this program, which workers"):
        fedbnn.run("tiny.yaml", network=program, engine=engine, run_dir="run")
    assert not (home / "run").exists()


@pytest.mark.filterwarnings("ignore:Sketch is part of this program")
def test_a_part_of_the_program_is_compared_where_a_run_is_a_fork_and_refused_where_not(
    home: Path, program: type[Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fedbnn.compare("tiny.yaml", "fedavg", 1, out=home / "grid", network=program)
    assert not found.failures
    monkeypatch.setattr(comparing, "can_fork", lambda: False)
    with pytest.raises(ConfigError, match="which a run in a process of its own cannot import"):
        fedbnn.compare("tiny.yaml", "fedavg", 1, out=home / "other", network=program)
    assert not (home / "other").exists()


def test_images_look_strange_before_a_task_begins_and_no_label_says_so(home: Path) -> None:
    """Over exact class posteriors: twice as strange as before any other round of the task."""
    head = {"method": "exact", "head.filters": 20, "stream.rounds_per_task": 4}
    results = fedbnn.run("quickstart", run_dir=home / "run", **head).results
    surprise, ends = results["surprise"], results["task_ends"]
    for before, end in itertools.pairwise(ends[:-1]):
        assert surprise[end - 1] > 2 * max(surprise[before : end - 1])
