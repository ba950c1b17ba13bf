"""What a task is called: by its classes where they are words and few."""

import pytest

from datamodules.collection import spoken_name


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        (("pets/cat", "pets/dog"), "cat, dog"),
        (("pets/guinea_pig",), "guinea pig"),
        (("digits/0", "digits/1"), ""),
        (tuple(f"flowers/kind number {place}" for place in range(9)), ""),
    ],
)
def test_a_task_has_the_names_of_its_classes_if_they_are_words_and_few(
    classes: tuple[str, ...], said: str
) -> None:
    assert spoken_name(classes) == said
