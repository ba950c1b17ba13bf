"""What a configuration says when it is wrong: one line, code 2, and the word that was meant."""

from pathlib import Path

import pytest

from fedbnn.config.parse import parse
from fedbnn.config.schema import Section
from fedbnn.config.yaml import MAX_BYTES
from fedbnn.errors import ConfigError, Exit
from tests.config.sample import SCHEMA, parsed

BOMB = "a: &a [x, x]\n" + "\n".join(
    f"{new}: &{new} [*{old}, *{old}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)

WRONG_FILES = {
    "unknown key": ("sed: 1", "unknown key 'sed'; did you mean 'seed'?"),
    "unknown section": ("clinet: {lr: 1}", "unknown key 'clinet.lr'; did you mean 'client.lr'?"),
    "unknown key in a section": (
        "client: {lrr: 1}",
        "unknown key 'client.lrr'; did you mean 'client.lr'?",
    ),
    "key of another section": ("lr: 1", "unknown key 'lr'; did you mean 'client.lr'?"),
    "option of another name": ("method: {name: fedavg, mu: 1}", "unknown key 'method.mu'"),
    "unknown trainer key": ("trainer: {acelerator: cpu}", "did you mean 'trainer.accelerator'?"),
    "unknown name": ("method: fedagv", "unknown method 'fedagv'; did you mean 'fedavg'?"),
    "name of the wrong type": ("method: {name: 3}", "unknown method 3"),
    "unknown word": (
        "client: {optimizer: adma}",
        "client.optimizer: expected 'adam' or 'sgd', got 'adma'; did you mean 'adam'?",
    ),
    "text for a number": ("client: {lr: fast}", "client.lr: expected float, got 'fast'"),
    "fraction for an integer": ("client: {epochs: 1.5}", "client.epochs: expected int, got '1.5'"),
    "truth value for a number": ("client: {lr: true}", "client.lr: expected float"),
    "nothing for a number": ("client: {lr: null}", "client.lr: expected float, got null"),
    "nothing for a word": ("folder: null", "folder: expected str, got null"),
    "text for an optional number": (
        "client: {clip: x}",
        "client.clip: expected float or null, got 'x'",
    ),
    "number for a word": ("name: 7", "name: expected str or null, got '7'"),
    "wrong number of values": ("client: {betas: [1]}", "client.betas"),
    "value for a section": ("client: 3", "client is a section with keys of its own, not 3"),
    "list for a named section": ("method: [fedavg]", "method is a section"),
    "out of range": ("client: {lr: -1}", "lr must be above 0, not -1.0 (client)"),
    "out of the range of its type": (
        "head: {name: gaussian, decay: 0}",
        "head.decay: expected PositiveFloat, got '0'",
    ),
    "out of the range of an optional type": (
        "head: {name: gaussian, share: 1.5}",
        "head.share: expected a number from 0 to 1 or null, got '1.5'",
    ),
    "text for a number with a range": (
        "head: {name: gaussian, decay: much}",
        "head.decay: expected PositiveFloat, got 'much'",
    ),
    "option of a head that the method does not have": (
        "method: fedavg\nhead: {decay: 0.5}",
        "unknown key 'head.decay'",
    ),
    "an argument that is set elsewhere": (
        "trainer: {max_epochs: 50}",
        "trainer.max_epochs cannot be set; it is client.epochs",
    ),
    "an object of another class": (
        "trainer: {plugins: [{class_path: os.system}]}",
        "trainer.plugins: expected list[tests.config.sample.Plugin] or null",
    ),
    "not a number at all": ("client: {clip: .nan}", "nan is not a setting"),
    "empty file": ("", "the configuration is empty"),
    "only a comment": ("# nothing\n", "the configuration is empty"),
    "a list": ("[1, 2]", "is a list, not a mapping"),
    "a word": ("seed", "is a str, not a mapping"),
    "malformed": ("seed: [1", "not valid YAML"),
    "tab": ("client:\n\tlr: 1", "not valid YAML"),
    "two documents": ("seed: 1\n---\nseed: 2", "not valid YAML"),
    "duplicate key": ("seed: 1\nseed: 2", "the key 'seed' stands twice"),
    "duplicate key deep inside": ("client: {lr: 1, lr: 2}", "the key 'lr' stands twice"),
    "key that is no word": ("1: 2", "the key 1 is not a word"),
    "key that is a list": ("? [a]\n: 1", "is not a word"),
    "alias": ("name: &x a\nseed: *x", "aliases (*name) are not supported"),
    "alias bomb": (BOMB, "aliases (*name) are not supported"),
    "object tag": ("name: !!python/object/apply:os.getcwd []", "not valid YAML"),
    "deep nesting": ("[" * 50_000, "nested too deeply"),
    "integer of a million digits": (f"seed: {'9' * 1_000_000}", "not valid YAML"),
    "control character": ("name: \x07", "not valid YAML"),
    "huge file": ("#" * (MAX_BYTES + 1), "larger than"),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    text, expected = WRONG_FILES[case]
    with pytest.raises(ConfigError) as failure:
        parsed(tmp_path, text)
    assert expected in str(failure.value)
    assert "\n" not in str(failure.value)
    assert len(str(failure.value)) < 500
    assert failure.value.code is Exit.CONFIGURATION


WRONG_FLAGS = {
    ("--client.lrr", "1"): "unknown key 'client.lrr'; did you mean 'client.lr'?",
    ("--lr", "1"): "unknown key 'lr'; did you mean 'client.lr'?",
    ("--sede", "1"): "unknown key 'sede'; did you mean 'seed'?",
    ("--confg", "x.yaml"): "unknown key 'confg'; did you mean 'config'?",
    ("--seed",): "--seed needs a value",
    ("--seed", "--dry_run"): "--seed needs a value",
    ("--dry-runn",): "did you mean 'dry_run'?",
    ("--set", "client.lrr=1"): "unknown key 'client.lrr'; did you mean 'client.lr'?",
    ("--set",): "--set needs KEY=VALUE",
    ("--set", "client.lr"): "--set needs KEY=VALUE",
    ("--config", "quikstart"): "no configuration 'quikstart'; did you mean 'quickstart'?",
    ("--dry_run=yes",): "--dry_run takes no value",
    ("conf/x.yaml",): "did you mean '--config conf/x.yaml'?",
    ("--",): "did not expect '--'",
    ("--client", "3"): "client is a section",
    ("--client.lr", "fast"): "client.lr: expected float, got 'fast'",
    ("--client.lr.deep", "1"): "client.lr: expected float",
    ("--client.lr", "1", "--client.lr.deep", "1"): "client.lr: expected float",
    ("--client.lr", "-1"): "lr must be above 0",
    ("--method", "fedprx"): "unknown method 'fedprx'; did you mean 'fedprox'?",
    ("--method.mu", "1"): "unknown key 'method.mu'",
    ("--trainer.device", "1"): "did you mean 'trainer.devices'?",
    ("--trainer.precision", "[1"): "trainer.precision: expected 16 or 32 or 'bf16' or null",
    ("--trainer.max_epochs", "50"): "trainer.max_epochs cannot be set; it is client.epochs",
    ("--client.clip", "nan"): "client.clip",
    ("--client.betas", "[" * 30_000): "client.betas",
}


@pytest.mark.parametrize("flags", WRONG_FLAGS, ids=lambda flags: " ".join(flags)[:40])
def test_a_wrong_flag_is_refused_in_one_line(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as failure:
        parse(flags, SCHEMA)
    assert WRONG_FLAGS[flags] in str(failure.value)
    assert "\n" not in str(failure.value)
    assert len(str(failure.value)) < 500


def test_a_missing_file_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").touch()
    with pytest.raises(
        ConfigError,
        match=r"no configuration file .*quikstart\.yaml; did you mean '.*quickstart\.yaml'",
    ):
        parse(["--config", str(tmp_path / "quikstart.yaml")], SCHEMA)


def test_a_file_that_is_no_text_or_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "image.yaml").write_bytes(b"\x89PNG\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        parse(["--config", str(tmp_path / "image.yaml")], SCHEMA)
    with pytest.raises(ConfigError, match="no configuration file"):
        parse(["--config", str(tmp_path)], SCHEMA)


def test_a_required_key_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"^part\.size is required$"):
        parse([], {"part": Section(_needs_size)})


def _needs_size(size: int) -> int:
    return size
