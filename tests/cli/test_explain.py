"""Every exit code has a help text."""

import pytest

from fedbnn.errors import HELP, ConfigError, Exit, FedBNNError, explain


def test_every_exit_code_has_a_help_text_and_no_other_has() -> None:
    assert set(HELP) == set(Exit)
    assert len(set(HELP.values())) == len(Exit)


@pytest.mark.parametrize("code", Exit)
def test_the_text_starts_with_the_code_and_stands_on_one_line(code: Exit) -> None:
    text = explain(int(code))
    assert text.startswith(f"{int(code)} (")
    assert len(text) > 40
    assert "\n" not in text


def test_every_error_of_ours_has_a_documented_code() -> None:
    kinds = FedBNNError.__subclasses__()
    assert {kind.code for kind in kinds} >= {
        Exit.CONFIGURATION,
        Exit.DATA,
        Exit.RUN_DIRECTORY,
        Exit.FEDERATION,
        Exit.NUMERICAL,
    }
    assert all(kind.code in HELP for kind in kinds)


def test_an_unknown_code_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no exit code 9; known: 0, 2, 3, 4, 5, 6, 7, 130, 143"):
        explain(9)
