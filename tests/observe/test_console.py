"""What a person sees: live bars in a terminal, plain lines elsewhere."""

import io
import logging
import re
from pathlib import Path

import pytest

from fedbnn.tracking.console import Console, logging_to, rows

CARD = {
    "scenario": "digits, 5 tasks of 2 classes",
    "method": "fedbnn: q = p · Π f_k",
    "seed": "0",
    "run directory": "runs/[x]",
}


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_wishes(monkeypatch) -> None:
    """Forget what the surroundings wish for colours and width."""
    for name in (
        "NO_COLOR",
        "FORCE_COLOR",
        "TTY_COMPATIBLE",
        "TTY_INTERACTIVE",
        "COLUMNS",
        "COLORTERM",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")


def shown(file, lines, run, rounds: int = 12) -> str:
    with Console(rounds, file=file) as console:
        console.card(CARD)
        for line in lines:
            console.round_started(line["round"], line["clients"])
            for client in line["clients"]:
                console.client_done(client)
            console.round_done(line)
        console.finished(run, Path("runs/x"))
    return file.getvalue()


def test_a_pipe_gets_plain_lines_without_control_characters(lines, run) -> None:
    text = shown(io.StringIO(), lines, run)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    rounds = [line for line in text.splitlines() if line.startswith("round")]
    assert len(rounds) == 12
    assert "now 90.3 % task-aware, 70.3 % class-agnostic" in rounds[3]
    assert text.splitlines()[3].split() == ["run", "directory", "runs/[x]"]


def test_every_client_that_did_not_count_is_named_with_the_reason(lines, run) -> None:
    for file in (io.StringIO(), Terminal()):
        text = shown(file, lines, run)
        assert "client 4 failed: diverged: the loss is not finite" in text
        assert "client 7 was refused: influence 1e6 times the median" in text


def test_a_client_that_counted_late_is_named(lines, run) -> None:
    late = [{**line, "late": {"5": 2}} if line["round"] == 3 else line for line in lines]
    assert "client 5 counted 2 round(s) late" in shown(io.StringIO(), late, run)


def test_updates_that_counted_less_are_shown_with_their_trust_and_counted_at_the_end(
    lines, run
) -> None:
    for file in (io.StringIO(), Terminal()):
        text = shown(file, lines, run)
        assert "2 down-weighted: 1 (0.25), 4 (0.50)" in text
        assert "Counted with less weight: 2 updates." in text
    many = [{**lines[8], "round": number} for number in range(1, 1001)]
    assert shown(io.StringIO(), many, run, rounds=1000).count("down-weighted") <= 110


def test_the_end_is_the_table_and_the_place_of_the_report(lines, run) -> None:
    text = shown(io.StringIO(), lines, run)
    assert "average" in text
    assert f"{run['class_agnostic']['avg_fin']:.1f}" in text
    assert text.rstrip().endswith("report  not drawn; to draw it: fedbnn report runs/x")


def test_a_page_that_was_drawn_is_named(run, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("<html>", encoding="utf-8")
    Console(rounds=1, file=(file := io.StringIO())).finished(run, tmp_path)
    said = file.getvalue().replace("\n", "")
    assert said.endswith(f"report  {tmp_path / 'report.html'}")


def test_a_long_run_prints_about_a_hundred_lines_and_always_the_last(lines, run) -> None:
    many = [{**lines[0], "round": number} for number in range(1, 1001)]
    rounds = [
        line
        for line in shown(io.StringIO(), many, run, rounds=1000).splitlines()
        if line.startswith("round")
    ]
    assert 90 <= len(rounds) <= 110
    assert rounds[-1].startswith("round 1000/1000")


def test_a_terminal_gets_a_card_in_a_frame_and_moving_bars(lines, run) -> None:
    text = shown(Terminal(), lines, run)
    assert "╭─" in text
    assert "digits, 5 tasks of 2 classes" in text
    assert "\x1b[" in text
    assert "rounds" in text
    assert "12/12" in text


def test_no_color_is_respected(lines, run, monkeypatch) -> None:
    coloured = re.compile(r"\x1b\[[0-9;]*3[0-9](;|m)")
    assert coloured.search(shown(Terminal(), lines, run))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not coloured.search(shown(Terminal(), lines, run))


def test_a_dumb_terminal_gets_plain_lines(lines, run, monkeypatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in shown(Terminal(), lines, run)


def test_the_bars_are_taken_away_when_a_run_is_stopped() -> None:
    file, interrupted = Terminal(), KeyboardInterrupt()
    with Console(5, file=file) as console:
        console.round_started(1, [1, 2])
        console.__exit__(type(interrupted), interrupted, None)
    assert file.getvalue().rstrip("\r").endswith(("\x1b[?25h", "\x1b[2K", "\x1b[1A"))
    assert "\x1b[?25h" in file.getvalue()


def test_a_line_is_never_broken_or_read_as_markup() -> None:
    file = io.StringIO()
    Console(1, file=file).say("[bold]" + "word " * 60 + "end")
    assert file.getvalue().count("\n") == 1
    assert file.getvalue().startswith("[bold]word")


def test_the_schedule_of_a_dry_run_is_a_table() -> None:
    file = io.StringIO()
    row = {"task": "one", "rounds": "1-4", "share_of_clients": 0.25, "classes": ["a", "b"]}
    rows("Schedule", [row], file)
    assert "share of clients" in file.getvalue()
    assert re.search(r"one .* 1-4 .* 0\.25 .* a, b", file.getvalue())
    assert "\x1b" not in file.getvalue()


def test_the_log_goes_to_the_run_directory_and_not_to_the_console(tmp_path, capsys) -> None:
    lightning = logging.getLogger("pytorch_lightning")
    with logging_to(tmp_path):
        logging.getLogger("fedbnn.federation.server").info("round 1 committed")
        lightning.info("GPU available: False")
        lightning.warning("something odd")
    text = (tmp_path / "log.txt").read_text()
    assert "INFO    fedbnn.federation.server: round 1 committed" in text
    assert "GPU available" not in text
    assert "something odd" in text
    assert capsys.readouterr() == ("", "")


def test_the_loggers_are_left_as_they_were_found(tmp_path) -> None:
    names = ("fedbnn", "pytorch_lightning", "wandb")
    before = [
        (logging.getLogger(name).handlers[:], logging.getLogger(name).level) for name in names
    ]
    with logging_to(tmp_path):
        assert logging.getLogger("wandb").handlers != before[2][0]
    assert [
        (logging.getLogger(name).handlers[:], logging.getLogger(name).level) for name in names
    ] == before


def test_the_log_has_every_round_and_names_every_client_that_did_not_count_or_counted_less(
    lines, run, caplog
) -> None:
    with caplog.at_level("INFO", logger="fedbnn"):
        shown(Terminal(), lines, run)
    said = [record.getMessage() for record in caplog.records]
    assert [text[6:8].strip() for text in said] == [str(number) for number in range(1, 13)]
    assert "client 4 failed: diverged" in said[4]
    assert "client 7 was refused: influence" in said[6]
    assert "2 down-weighted: 1 (0.25), 4 (0.50)" in said[8]
    assert [one.levelname for one in caplog.records].count("WARNING") == 2
