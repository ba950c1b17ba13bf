"""Rows that need the whole command: what `python train.py` says and leaves when things go wrong."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import train
from fedbnn.federation.engines import SerialEngine
from fedbnn.protocol.messages import Failure, FitResult, read_update
from fedbnn.protocol.state import digest
from fedbnn.storage.files import as_json
from fedbnn.storage.ledger import Ledger
from tests.faults.command import TINY, Method
from tests.faults.test_disk import no_file_above

SUBJECT = Method("scaffold")


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take longer than these runs."""
    monkeypatch.setattr("fedbnn.report.figures.every", lambda *_: {})


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a method whose clients keep state."""
    run_dir = tmp_path_factory.mktemp("unbroken") / "run"
    assert train.main([*TINY, "--method", SUBJECT.name, "--run_dir", str(run_dir)]) == 0
    return run_dir


@pytest.fixture
def run_dir(unbroken: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to be spoiled."""
    shutil.copytree(unbroken, tmp_path / "run")
    return tmp_path / "run"


Spoken = Callable[..., tuple[int, str]]


@pytest.fixture
def resumed(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> Spoken:
    """Resume the copy; the exit code, and all it said."""

    def resume(*flags: str) -> tuple[int, str]:
        capsys.readouterr()
        code = train.main(["--resume", str(run_dir), *flags])
        said = capsys.readouterr()
        assert said.err.count("\n") == (1 if code else 0)
        return code, " ".join((said.out + said.err).split())

    return resume


def flip(run_dir: Path, round: int) -> None:
    path = run_dir / "state" / f"round-00000{round}" / "state.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)


def test_a_damaged_newest_round_is_played_again_to_the_same_bytes(
    run_dir: Path, unbroken: Path, resumed: Spoken
) -> None:
    flip(run_dir, 4)
    code, said = resumed()
    assert code == 0
    assert (
        "warning: round 4 is damaged (the digest of state.safetensors does not match); falling back"
        in said
    )
    assert SUBJECT.fingerprint(run_dir) == SUBJECT.fingerprint(unbroken)


def test_all_rounds_damaged_is_exit_4_and_nothing_starts_again(
    run_dir: Path, resumed: Spoken
) -> None:
    for round in (2, 3, 4):
        flip(run_dir, round)
    code, said = resumed()
    assert (code, "every kept round is damaged" in said) == (4, True)
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 4


def test_another_configuration_is_exit_4_naming_the_key(run_dir: Path, resumed: Spoken) -> None:
    code, said = resumed("--client.lr", "0.5")
    assert code == 4
    assert "client.lr was 0.001, now it is 0.5" in said


def test_a_directory_in_use_is_exit_4_naming_the_process(run_dir: Path, resumed: Spoken) -> None:
    with Ledger(run_dir):
        code, said = resumed()
    assert code == 4
    assert re.search(r"in use by pid \d+", said)


def test_a_newer_format_is_exit_4(run_dir: Path, resumed: Spoken) -> None:
    path = run_dir / "state" / "round-000004" / "manifest.json"
    content = {**json.loads(path.read_bytes()), "format": 9}
    del content["sha256"]
    path.write_bytes(as_json({**content, "sha256": digest(as_json(content))}))
    code, said = resumed()
    assert (code, "in format 9" in said) == (4, True)


def test_a_full_disk_is_exit_4_and_the_run_goes_on_when_there_is_room(
    run_dir: Path, unbroken: Path, resumed: Spoken
) -> None:
    for round in (4, 3):
        flip(run_dir, round)
    size = (run_dir / "state" / "round-000002" / "state.safetensors").stat().st_size
    with no_file_above(size // 2):
        code, said = resumed()
    assert (code, "File too large" in said) == (4, True)
    assert resumed()[0] == 0
    assert SUBJECT.fingerprint(run_dir) == SUBJECT.fingerprint(unbroken)


def test_a_file_in_the_place_of_the_run_directory_is_exit_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").write_text("in the way")
    assert train.main([*TINY, "--run_dir", str(tmp_path / "run")]) == 4
    assert "cannot write" in capsys.readouterr().err
    assert (tmp_path / "run").read_text() == "in the way"


@pytest.mark.slow
def test_workers_give_the_bytes_of_one_process_also_when_they_take_over(
    run_dir: Path, unbroken: Path, resumed: Spoken
) -> None:
    for round in (4, 3):
        flip(run_dir, round)
    assert resumed("--engine", "processes")[0] == 0
    assert SUBJECT.fingerprint(run_dir) == SUBJECT.fingerprint(unbroken)


Spoil = Callable[[FitResult], FitResult | Failure]


def with_one_spoiled(
    monkeypatch: pytest.MonkeyPatch, spoil: Spoil, round: int, client: int | None
) -> None:
    """Let one client of one round (or all of them) answer something else."""
    honest = SerialEngine._ask

    def ask(
        self: SerialEngine, payload: bytes, asked: int, private: bytes | None
    ) -> FitResult | Failure:
        answer = honest(self, payload, asked, private)
        hit = (
            isinstance(answer, FitResult)
            and read_update(answer.update).round == round
            and client in (None, asked)
        )
        return spoil(answer) if hit and isinstance(answer, FitResult) else answer

    monkeypatch.setattr(SerialEngine, "_ask", ask)


def not_finite(reply: FitResult) -> FitResult:
    update = read_update(reply.update)
    spoiled = {name: torch.full_like(tensor, torch.nan) for name, tensor in update.tensors.items()}
    return FitResult(
        reply.client, type(update)(**{**vars(update), "tensors": spoiled}).to_bytes(), reply.private
    )


def records_of(run_dir: Path) -> list[dict[str, dict[str, str]]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_bad_client_is_named_kept_and_not_folded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unbroken: Path
) -> None:
    clients = records_of(unbroken)[1]["clients"]
    with_one_spoiled(monkeypatch, not_finite, round=2, client=clients[0])
    assert train.main([*TINY, "--run_dir", str(tmp_path / "run")]) == 0
    records = records_of(tmp_path / "run")
    assert [list(record["refused"]) for record in records] == [[], [str(clients[0])], [], []]
    assert "is not finite" in next(iter(records[1]["refused"].values()))
    assert len(list((tmp_path / "run" / "rejected").glob("r000002-*.bin"))) == 1
    with Ledger(tmp_path / "run") as ledger:
        latest = ledger.latest()
    assert latest is not None
    assert all(bool(tensor.isfinite().all()) for tensor in latest.state.tensors.values())


def test_a_lost_quorum_is_exit_5_and_the_run_goes_on_to_the_same_bytes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unbroken: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        with_one_spoiled(patch, lambda reply: Failure(reply.client, "gone"), round=3, client=None)
        assert train.main([*TINY, "--method", SUBJECT.name, "--run_dir", str(run_dir)]) == 5
    assert "round 3: 0 of 3 clients count, the quorum is 2" in capsys.readouterr().err
    assert len(records_of(run_dir)) == 2
    assert train.main(["--resume", str(run_dir)]) == 0
    assert SUBJECT.fingerprint(run_dir) == SUBJECT.fingerprint(unbroken)


def test_a_run_goes_on_with_a_lower_quorum_as_its_last_words_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    words = [*TINY, "--method", SUBJECT.name, "--run_dir", str(run_dir), "--gate.quorum", "1.0"]
    with_one_spoiled(monkeypatch, lambda reply: Failure(reply.client, "gone"), round=2, client=3)
    assert train.main(words) == 5
    assert "or lower gate.quorum" in capsys.readouterr().err
    assert len(records_of(run_dir)) == 1
    assert train.main(["--resume", str(run_dir), "--gate.quorum", "0.5"]) == 0
    assert len(records_of(run_dir)) > 2


def test_a_learning_rate_that_explodes_sends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([*TINY, "--client.lr", "1e6", "--run_dir", str(tmp_path / "run")]) in (5, 6)
    assert "diverged" in capsys.readouterr().err
    assert not list((tmp_path / "run" / "state").glob("round-*"))
