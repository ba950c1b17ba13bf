"""How a command ends."""

from pathlib import Path
from typing import NoReturn

import pytest

from fedbnn.cli.main import ended
from fedbnn.cli.train import UNEXPECTED, traceback_to
from fedbnn.errors import DataError, Exit, FedBNNError, FederationError


def raising(error: BaseException) -> NoReturn:
    raise error


def test_success_passes_through() -> None:
    assert ended(lambda: 0) == 0
    assert ended(lambda: 130) == 130


@pytest.mark.parametrize("kind", [DataError, FederationError, FedBNNError])
def test_a_failure_with_a_name_is_one_line_and_its_code(
    kind: type[FedBNNError], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(lambda: raising(kind("it\nbroke", "here", "mend it"))) == kind.code
    captured = capsys.readouterr()
    assert captured.err == "error: it broke (here); mend it\n"
    assert captured.out == ""


def test_an_interrupt_ends_with_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(lambda: raising(KeyboardInterrupt())) == Exit.INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


def test_an_error_nobody_expected_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        ended(lambda: raising(ZeroDivisionError()))


def test_with_a_run_its_traceback_goes_to_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.txt"
    log.write_text("before\n")
    with pytest.raises(SystemExit) as stop, traceback_to(log):
        raising(ZeroDivisionError("by zero"))
    assert stop.value.code == UNEXPECTED
    assert log.read_text().startswith("before\nTraceback")
    assert "ZeroDivisionError: by zero" in log.read_text()
    assert (
        capsys.readouterr().err
        == f"error: unexpected ZeroDivisionError; the traceback is in {log}; please report it\n"
    )


@pytest.mark.parametrize("error", [DataError("gone"), KeyboardInterrupt(), SystemExit(3)])
def test_expected_ends_leave_the_log_alone(tmp_path: Path, error: BaseException) -> None:
    log = tmp_path / "log.txt"
    with pytest.raises(type(error)), traceback_to(log):
        raise error
    assert not log.exists()


def test_a_block_that_succeeds_leaves_the_log_alone(tmp_path: Path) -> None:
    with traceback_to(tmp_path / "log.txt"):
        pass
    assert not (tmp_path / "log.txt").exists()
