"""The list of wrong formulas in tests/mutations.py is alive, and every one of them is noticed."""

import shutil
from pathlib import Path

import pytest

from tests import mutations
from tests.mutations import MUTATIONS, Mutation


def named(mutation: Mutation) -> str:
    return mutation.name.replace(" ", "-")


def test_there_are_a_dozen() -> None:
    assert len(MUTATIONS) >= 12
    assert len({one.name for one in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_the_right_line_stands_where_it_is_said_to(mutation: Mutation, tmp_path: Path) -> None:
    file = tmp_path / mutation.file
    file.parent.mkdir(parents=True)
    shutil.copy(mutations.ROOT / mutation.file, file)
    mutations.broken(mutation, tmp_path)
    compile(file.read_text(), mutation.file, "exec")
    assert all((mutations.ROOT / test).exists() for test in mutation.tests)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_the_tests_notice(mutation: Mutation) -> None:
    assert mutations.noticed(mutation)
