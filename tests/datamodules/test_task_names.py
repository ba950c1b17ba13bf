"""What a task is called: by its classes where they are words and few."""

from types import SimpleNamespace
from typing import Any

import pytest

from datamodules.collection import spoken, task_labels

MANY = tuple(f"flowers/kind number {place}" for place in range(9))


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([("pets/cat", "pets/dog"), ("pets/guinea_pig",)], ["cat, dog", "guinea pig"]),
        ([("digits/0", "digits/1"), ("digits/2",)], ["first", "second"]),
        ([("digits/2", "digits/0"), ("digits/1",)], ["first", "second"]),
        ([("mine/0", "mine/10"), ("mine/20",)], ["0, 10", "20"]),
        ([("mine/0",), ("mine/one",)], ["0", "one"]),
        ([MANY, ("flowers/rose",)], ["first", "rose"]),
        ([("pets/cat",), ("photos/cat",)], ["first", "second"]),
    ],
    ids=["words", "counted", "counted, shuffled", "numbers", "mixed", "long", "the same twice"],
)
def test_a_task_has_the_names_of_its_classes_if_they_are_few_and_tell_it_apart(
    groups: list[tuple[str, ...]], said: list[str]
) -> None:
    found = spoken(dict(zip(("first", "second"), groups, strict=True)))
    assert list(found) == said
    assert list(found.values()) == groups


def test_a_task_of_one_class_is_that_class() -> None:
    digits: Any = SimpleNamespace(classes=("0", "1", "2"))
    assert [*task_labels("class", [digits], 2, ())] == ["classes 0-1", "class 2"]
