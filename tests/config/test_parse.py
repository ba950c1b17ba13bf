"""What a configuration gives when it is right."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fedbnn.config.parse import _names, _parser, parse, restored
from fedbnn.config.schema import Section
from fedbnn.config.yaml import dump
from fedbnn.errors import ConfigError
from tests.config.sample import (
    SCHEMA,
    Average,
    Client,
    Linear,
    Plugin,
    Posteriors,
    Proximal,
    parsed,
)

FULL = """
name: first
seed: 7
stream: {sources: [a, b], clients: 50, once: true}
client: {lr: 1e-3, optimizer: sgd, betas: [0.5, 0.6], clip: 2}
method: {name: fedprox, mu: 2}
trainer: {accelerator: cpu, devices: 2}
"""


def test_running_the_written_configuration_again_gives_the_same_one(tmp_path: Path) -> None:
    once = parsed(tmp_path, FULL, "--track.wandb", "off")
    twice = parsed(tmp_path, dump(once.values))
    assert twice.values == once.values
    assert dump(twice.values) == dump(once.values)


@pytest.mark.parametrize(
    "name", ["1e-3", "off", "007", "1_000", "true", "a: b", "2026-01-01", "ä\n", " x", "0x1F"]
)
def test_words_that_look_like_something_else_survive_writing_and_reading(
    tmp_path: Path, name: str
) -> None:
    once = parsed(tmp_path, yaml.safe_dump({"name": "x"}))
    values = {**once.values, "name": name}
    file = tmp_path / "again.yaml"
    file.write_text(dump(values), encoding="utf-8")
    assert parse(["--config", str(file)], SCHEMA)["name"] == name


def test_of_a_free_section_only_what_is_asked_for_becomes_an_argument() -> None:
    parser = _parser(SCHEMA, _names({}, SCHEMA), {"trainer.precision", "trainer.max_epochs"})
    named = {name for action in parser._actions for name in action.option_strings}
    assert {name for name in named if "trainer" in name} == {"--trainer.precision"}


def test_the_complete_configuration_names_every_key(tmp_path: Path) -> None:
    values = parsed(tmp_path, "seed: 1").values
    assert list(values) == list(SCHEMA)
    assert values["client"] == {
        "lr": 0.1,
        "epochs": 2,
        "optimizer": "adam",
        "betas": [0.9, 0.999],
        "clip": None,
    }
    assert values["stream"] == {"sources": "digits", "clients": 10, "once": False}
    assert values["method"] == {"name": "fedavg"}
    assert values["trainer"] == {}


def test_sections_build_typed_objects(tmp_path: Path) -> None:
    config = parsed(tmp_path, FULL)
    assert config.build("client") == Client(1e-3, 2, "sgd", (0.5, 0.6), 2.0)
    assert config.build("method") == Proximal(2.0)
    assert config.build("engine") == "serial"
    stream = config.build("stream", seed=config["seed"])
    assert (stream.seed, stream.sources, stream.clients, stream.once) == (7, ["a", "b"], 50, True)


def test_flags_set_any_key_and_win_over_the_file(tmp_path: Path) -> None:
    flags = (
        "--client.lr",
        "0.01",
        "--client.epochs=4",
        "--seed",
        "-3",
        "--name",
        "007",
        "--trainer.precision",
        "16",
    )
    config = parsed(tmp_path, FULL, *flags)
    assert config.build("client").lr == 0.01
    assert config.build("client").epochs == 4
    assert (config["seed"], config["name"]) == (-3, "007")
    assert config["trainer"] == {"accelerator": "cpu", "devices": 2, "precision": 16}


def test_flags_alone_are_enough() -> None:
    config = parse(["--stream.sources", "[a, b]", "--client.clip", "null"], SCHEMA)
    assert config["stream"]["sources"] == ["a", "b"]
    assert config["client"]["clip"] is None


@pytest.mark.parametrize("text", ["method: strong", "method: {name: strong}"])
def test_a_name_is_short_for_a_section_with_that_name(tmp_path: Path, text: str) -> None:
    assert parsed(tmp_path, text).build("method") == Proximal(9.0)


@pytest.mark.parametrize(
    "flags", [("--method", "strong"), ("--method=strong",), ("--method.name", "strong")]
)
def test_a_name_can_be_a_flag(flags: tuple[str, ...]) -> None:
    assert parse(flags, SCHEMA)["method"] == {"name": "strong", "mu": 9.0}


def test_a_preset_is_a_default_that_can_be_overridden(tmp_path: Path) -> None:
    assert parsed(tmp_path, "method: strong", "--method.mu", "1").build("method") == Proximal(1.0)


def test_another_name_on_the_command_line_leaves_the_options_of_the_first_behind(
    tmp_path: Path,
) -> None:
    assert parsed(tmp_path, FULL, "--method", "fedavg").build("method") == Average()
    assert parsed(tmp_path, FULL, "--method", "strong").build("method") == Proximal(9.0)
    assert parsed(tmp_path, FULL, "--method", "fedprox").build("method") == Proximal(2.0)


def test_a_name_that_follows_another_section_follows_it_unless_it_is_said(tmp_path: Path) -> None:
    file = "method: strong\nhead: {decay: 0.5}"
    assert parsed(tmp_path, file).build("head") == Posteriors(0.5)
    assert parsed(tmp_path, file, "--method", "fedavg").build("head") == Linear()
    assert parsed(tmp_path, file, "--head", "linear").build("head") == Linear()
    named = "method: strong\nhead: {name: gaussian, decay: 0.5}"
    assert parsed(tmp_path, named, "--method", "fedavg").build("head") == Posteriors(0.5)
    asked = ("--method", "fedavg", "--head", "gaussian")
    for said in (file, named):  # so methods that share a head share its options
        assert parsed(tmp_path, said, *asked).build("head") == Posteriors(0.5)
    assert parsed(tmp_path, file, "--method", "strong").build("head") == Posteriors(0.5)
    assert parsed(tmp_path, "seed: 1", *asked, "--head.decay", "2").build("head") == Posteriors(2.0)


def test_what_somebody_else_makes_holds_only_what_is_set_objects_by_their_class(
    tmp_path: Path,
) -> None:
    plugin = {"class_path": "tests.config.sample.Plugin", "init_args": {"size": 3}}
    config = parsed(tmp_path, dump({"trainer": {"devices": 2, "plugins": [plugin]}}))
    assert config["trainer"] == {"devices": 2, "plugins": [plugin]}
    made = restored(config.values, SCHEMA).build("trainer")
    assert made.keys() == {"devices", "plugins"}
    assert isinstance(made["plugins"][0], Plugin)
    assert made["plugins"][0].size == 3


def test_an_empty_section_is_a_section_of_defaults(tmp_path: Path) -> None:
    assert parsed(tmp_path, "client:\nmethod:\nseed: 1").build("client") == Client()


def test_off_is_a_word(tmp_path: Path) -> None:
    assert parsed(tmp_path, "track: {wandb: off}")["track"] == {"wandb": "off"}
    assert parse(["--track.wandb", "off"], SCHEMA)["track"] == {"wandb": "off"}


def test_a_section_that_the_program_completes_is_not_built_early() -> None:
    config = parse(["--stream.clients", "3"], SCHEMA)
    with pytest.raises(TypeError, match="seed"):
        config.build("stream")


def test_a_value_error_while_building_names_the_section() -> None:
    config = parse([], {"stream": Section(_refuses, given={"seed"})})
    with pytest.raises(ConfigError, match=r"no seed above 3 \(stream\)"):
        config.build("stream", seed=4)


def _refuses(seed: int) -> None:
    if seed > 3:
        raise ValueError("no seed above 3")


def test_resume_reads_the_configuration_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 5")
    config = parse(
        ["--resume", "last"],
        SCHEMA,
        run_directory=lambda which: tmp_path if which == "last" else Path(which),
    )
    assert config["seed"] == 5
    assert config.flags.resume == "last"


def test_of_several_files_the_later_ones_win_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("seed: 1\nclient: {lr: 0.5, epochs: 7}\nmethod: strong")
    (tmp_path / "b.yaml").write_text("client: {lr: 0.25}\nmethod: {mu: 3}\nhead: {decay: 0.5}")
    (tmp_path / "c.yaml").write_text("method: fedprox")

    def merged(*names: str) -> dict[str, Any]:
        files = [word for name in names for word in ("--config", str(tmp_path / f"{name}.yaml"))]
        return dict(parse([*files, "--seed", "2"], SCHEMA).values)

    both, all_three = merged("a", "b"), merged("a", "b", "c")
    assert (both["seed"], both["client"]["lr"], both["client"]["epochs"]) == (2, 0.25, 7)
    assert both["method"] == {"name": "strong", "mu": 3.0}
    assert both["head"] == {"name": "gaussian", "decay": 0.5, "share": None}
    assert all_three["method"] == {"name": "fedprox", "mu": 0.1}
    assert all_three["head"] == {"name": "linear"}
    assert merged("b", "a")["client"]["lr"] == 0.5


def test_a_setting_has_one_meaning_however_it_is_spelt() -> None:
    spelt = (["--client.lr", "2"], ["--client.lr=2"], ["--set", "client.lr=2"])
    assert {parse(words, SCHEMA)["client"]["lr"] for words in spelt} == {2.0}
    assert parse(["--set", "method=strong"], SCHEMA)["method"]["name"] == "strong"
    assert parse(["--dry-run", "--name", "a-b"], SCHEMA).flags.dry_run
    assert parse(["--name=a-b"], SCHEMA)["name"] == "a-b"


def test_switches_are_told_apart_from_keys() -> None:
    flags = parse(["--dry_run", "--seed", "1"], SCHEMA).flags
    assert (flags.dry_run, flags.resume, flags.config) == (True, None, [])
    assert not parse([], SCHEMA).flags.dry_run


def test_print_config_prints_what_can_be_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parsed(tmp_path, FULL, "--print_config")
    assert stop.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out) == parsed(tmp_path, FULL).values


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_has_an_example_and_the_options_of_the_name_chosen(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse([word, "--method", "strong"], SCHEMA)
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert text.count("example:") == 1
    assert "--method.mu MU" in text
    assert "default: 9.0" in text
    assert "learning rate of the weights" in text
    assert "stream.seed" not in text
    assert "--print_config" in text


def test_values_alone_restore_a_configuration(tmp_path: Path) -> None:
    config = parsed(tmp_path, FULL, "--track.wandb", "off")
    again = restored(config.values, SCHEMA)
    assert again.values == config.values
    assert again.build("client") == config.build("client")
