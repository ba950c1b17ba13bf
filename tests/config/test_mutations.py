"""However a configuration is damaged, the answer is one, or one line: never a traceback."""

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedbnn.config.parse import parse
from fedbnn.config.schema import Schema
from fedbnn.config.yaml import dump
from fedbnn.errors import ConfigError
from tests.config.sample import SCHEMA

WHOLE = parse([], SCHEMA).values
WORDS = st.sampled_from(
    [
        "lr",
        "name",
        "client",
        "method",
        "seed",
        "fedprox",
        "",
        "a.b",
        "--",
        "null",
        "class_path",
        "init_args",
    ]
)
JUNK: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(WORDS | st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
MANY = settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def is_answered(argv: list[str], schema: Schema = SCHEMA, *seeded: str) -> bool:
    """Whether the answer is a complete configuration, a text that was asked for, or one line.

    The sections in `seeded` are built, too: they take a seed from the program.
    """
    try:
        config = parse(argv, schema)
        return set(config.values) == set(schema) and all(
            config.build(key, seed=0) for key in seeded
        )
    except ConfigError as error:
        return len(str(error).splitlines()) == 1
    except SystemExit as stop:
        return stop.code == 0


def places(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every key of a nested mapping, as a path."""
    inner = [
        place
        for key, value in tree.items()
        if isinstance(value, dict)
        for place in places(value, (*path, key))
    ]
    return [*((*path, key) for key in tree), *inner]


@MANY
@given(st.data())
def test_a_value_replaced_by_junk(tmp_path: Path, data: st.DataObject) -> None:
    tree = copy.deepcopy(dict(WHOLE))
    *parents, key = data.draw(st.sampled_from(places(WHOLE)))
    inner = tree
    for parent in parents:
        inner = inner[parent]
    if data.draw(st.booleans()):
        inner[key] = data.draw(JUNK)
    else:
        inner[data.draw(WORDS | st.text(max_size=8))] = inner.pop(key)
    file = tmp_path / "config.yaml"
    file.write_text(dump(tree), encoding="utf-8", errors="surrogatepass")
    assert is_answered(["--config", str(file)])


@MANY
@given(st.data())
def test_bytes_replaced_by_junk(tmp_path: Path, data: st.DataObject) -> None:
    text = dump(WHOLE).encode()
    start = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 8))
    file = tmp_path / "config.yaml"
    file.write_bytes(text[:start] + data.draw(st.binary(max_size=8)) + text[start + length :])
    assert is_answered(["--config", str(file)])


KEYS = [f"--{'.'.join(place)}" for place in places(WHOLE)]
FLAGS = st.sampled_from([*KEYS, "--config", "--resume", "--dry_run", "--help", "--x.y", "--"])


@MANY
@given(st.lists(FLAGS | WORDS | st.text(max_size=12), max_size=6))
def test_any_words_on_the_command_line(words: list[str]) -> None:
    assert is_answered(words)


def test_the_mutations_start_from_something_valid() -> None:
    assert len(places(WHOLE)) > 15
    with pytest.raises(ConfigError):
        parse(["--seed", "junk"], SCHEMA)
