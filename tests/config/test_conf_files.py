"""Every file in conf/ parses and builds; the real schema keeps the promises of the small one."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pytorch_lightning.callbacks import Timer
from pytorch_lightning.loggers import CSVLogger

from fedbnn.cli.compose import SCHEMA
from fedbnn.cli.main import main
from fedbnn.config.parse import parse
from fedbnn.config.schema import Named, Section
from fedbnn.config.yaml import dump
from fedbnn.errors import Exit
from tests.config.test_mutations import JUNK, is_answered, places

CONF = Path(__file__).parents[2] / "conf"
FILES = sorted(CONF.rglob("*.yaml"))
QUICKSTART = CONF / "quickstart.yaml"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONF)))
def test_a_configuration_parses_builds_and_reads_back(file: Path, tmp_path: Path) -> None:
    config = parse(["--config", str(file)], SCHEMA)
    stream = config.build("stream", seed=config["seed"])
    assert stream.rounds >= 1
    for key, entry in SCHEMA.items():
        if isinstance(entry, Section | Named) and not entry.given:
            assert config.build(key) is not None
    (tmp_path / "again.yaml").write_text(dump(config.values), encoding="utf-8")
    assert parse(["--config", str(tmp_path / "again.yaml")], SCHEMA).values == config.values


@pytest.mark.parametrize("key", [key for key, entry in SCHEMA.items() if isinstance(entry, Named)])
def test_every_name_has_options_that_parse(key: str) -> None:
    for name in SCHEMA[key].choices:
        values = parse(["--config", str(QUICKSTART), f"--{key}", name], SCHEMA)[key]
        assert values["name"] == name
        again = [
            word
            for option, value in values.items()
            for word in (f"--{key}.{option}", dump_scalar(value))
        ]
        assert parse(["--config", str(QUICKSTART), *again], SCHEMA)[key] == values


def test_objects_of_the_trainer_are_named_by_their_class_and_survive_writing(
    tmp_path: Path,
) -> None:
    timer = {"class_path": "pytorch_lightning.callbacks.Timer"}
    logger = {"class_path": "pytorch_lightning.loggers.CSVLogger", "init_args": {"save_dir": "x"}}
    asked = {"trainer": {"callbacks": [timer], "logger": logger, "gradient_clip_val": 0.5}}
    (tmp_path / "asked.yaml").write_text(dump(asked), encoding="utf-8")
    config = parse(["--config", str(tmp_path / "asked.yaml")], SCHEMA)
    (tmp_path / "again.yaml").write_text(dump(config.values), encoding="utf-8")
    again = parse(["--config", str(tmp_path / "again.yaml")], SCHEMA)
    assert again.values == config.values
    made = again.build("trainer")
    assert made.keys() == asked["trainer"].keys()
    assert isinstance(made["callbacks"][0], Timer)
    assert isinstance(made["logger"], CSVLogger)


def dump_scalar(value: Any) -> str:
    """A value as a flag takes it."""
    return dump({"x": value}).removeprefix("x: ").strip().strip("'")


WRONG = {
    ("--client.lrr", "1"): "did you mean 'client.lr'?",
    ("--stream.alpha", "much"): "stream.alpha: expected a number above 0, got 'much'",
    ("--stream.clients", "-1"): "stream.clients",
    ("--stream.schedule", "gradul"): "did you mean 'gradual'?",
    ("--stream.sources", "cifar1000"): "did you mean 'cifar100'?",
    ("--stream.durations", "[[0, 3]]"): "5 tasks, but 1 in the schedule",
    ("--method", "fedavgg"): "did you mean 'fedavg'?",
    ("--network", "lenett"): "did you mean 'lenet'?",
    ("--engine", "serail"): "did you mean 'serial'?",
    ("--methd", "fedavg"): "did you mean 'method'?",
    ("--track.logger", "CSVLogger"): ".CSVLogger: save_dir is required",
    ("--trainer.precison", "16"): "did you mean 'trainer.precision'?",
    ("--client.lr", "0"): "client.lr: expected a number above 0, got '0'",
    ("--trainer.max_epochs", "50"): "trainer.max_epochs cannot be set; client.epochs says",
    ("--trainer.min_epochs", "2"): "trainer.min_epochs cannot be set; client.epochs says",
    ("--trainer.num_nodes", "2"): "trainer.num_nodes cannot be set; a client trains on one machine",
    ("--trainer.gradient_clip_val", "much"): "trainer.gradient_clip_val: expected ",
    ("--head", "gausian"): "did you mean 'gaussian'?",
    ("--head.memory", "2"): "head.memory: expected a number from 0 to 1, got '2'",
    ("--method", "fedavg", "--head.memory", "0.5"): "unknown key 'head.memory'",
    ("--method.head", "gaussian"): "unknown key 'method.head'",
}


@pytest.mark.parametrize("flags", WRONG, ids=" ".join)
def test_a_mistake_ends_in_one_line_code_2_and_no_run_directory(
    flags: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copy(QUICKSTART, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", "quickstart.yaml", *flags]) == Exit.CONFIGURATION
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert WRONG[flags] in captured.err
    assert [path.name for path in tmp_path.iterdir()] == ["quickstart.yaml"]


def test_train_alone_shows_the_three_commands_a_newcomer_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train"]) == Exit.DONE
    assert capsys.readouterr().out.count("  fedbnn train --config quickstart") == 3


def test_the_script_of_a_clone_names_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    assert main(["train"]) == Exit.DONE
    assert capsys.readouterr().out.count("  python train.py --config quickstart") == 3


WHOLE = parse(["--config", str(QUICKSTART)], SCHEMA).values


@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_a_damaged_configuration_never_gives_a_traceback(
    tmp_path: Path, data: st.DataObject
) -> None:
    tree = copy.deepcopy(dict(WHOLE))
    *parents, key = data.draw(st.sampled_from(places(WHOLE)))
    inner = tree
    for parent in parents:
        inner = inner[parent]
    inner[key] = data.draw(JUNK)
    (tmp_path / "config.yaml").write_text(dump(tree), encoding="utf-8", errors="surrogatepass")
    assert is_answered(["--config", str(tmp_path / "config.yaml")], SCHEMA, "stream")
