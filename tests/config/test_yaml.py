"""YAML as people expect it."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbnn.config.yaml import dump, parse

SCALARS = {
    "1e-3": 0.001,
    "1E5": 1e5,
    "-2.5e+3": -2500.0,
    ".5": 0.5,
    "5.": 5.0,
    "3": 3,
    "-3": -3,
    "007": 7,
    "0x1f": 31,
    ".inf": math.inf,
    "true": True,
    "False": False,
    "null": None,
    "~": None,
    "": None,
    "yes": "yes",
    "off": "off",
    "on": "on",
    "1:30": "1:30",
    "2026-01-01": "2026-01-01",
    "'1e-3'": "1e-3",
    "1e": "1e",
    "e3": "e3",
    "a b": "a b",
    "1_000": "1_000",
    "=": "=",
    "<<": "<<",
}


@pytest.mark.parametrize("text", SCALARS)
def test_scalars_are_read_as_they_look(text: str) -> None:
    value = parse(text, "test")
    assert value == SCALARS[text]
    assert type(value) is type(SCALARS[text])


PLAIN: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), PLAIN))
def test_what_is_written_is_read_back(values: dict[str, Any]) -> None:
    assert parse(dump(values), "test") == values


def test_a_value_that_occurs_twice_is_written_twice() -> None:
    shared = [1, 2]
    assert parse(dump({"a": shared, "b": shared}), "test") == {"a": [1, 2], "b": [1, 2]}
