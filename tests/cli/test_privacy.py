"""`--privacy...` as a user meets it: epsilon by round, and a run that stops before too much."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedbnn.defense.budget import epsilon
from fedbnn.errors import FederationError
from fedbnn.federation import server
from fedbnn.storage.run_dir import records
from tests.cli.command import fedbnn

WORDS = ("--head", "linear", "--gate.influence_cap", "null", "--evaluate.every", "0")
NOISE = ("--privacy.clip", "5", "--privacy.noise", "2")


@pytest.mark.usefixtures("undrawn")
def test_a_run_says_what_it_spent_and_stops_before_it_exceeds_its_budget(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", "--config", "tiny.yaml", "--run_dir", "run", *WORDS, *NOISE)
    most = epsilon(2.0, 1, 1e-5) + 0.1
    assert fedbnn(*words, "--stream.clients_per_round", 4, "--privacy.epsilon", most) == 7
    said = capsys.readouterr()
    assert f"epsilon {epsilon(2.0, 1, 1e-5):.3g}" in said.out
    assert said.err.startswith("error: round 2 would spend epsilon ")
    assert said.err.count("\n") == 1
    (line,) = (home / "run/state/records").iterdir()
    assert json.loads(line.read_text())["privacy"] == {
        "epsilon": epsilon(2.0, 1, 1e-5),
        "delta": 1e-5,
        "begun": 1,
    }
    assert (home / "run/metrics.jsonl").read_text() == line.read_text()
    assert fedbnn("train", "--resume", "run") == 7
    capsys.readouterr()
    account = home / "run/state/privacy.json"
    account.write_text('{"key": 1}')
    assert fedbnn("train", "--resume", "run") == 4
    account.unlink()
    assert fedbnn("train", "--resume", "run") == 4
    none, gone = capsys.readouterr().err.splitlines()
    assert none.startswith("error: the account of privacy is none of ours")
    assert gone.startswith("error: the account of privacy is gone, but 1 rounds were played")


@pytest.mark.usefixtures("undrawn")
def test_an_older_copy_of_the_account_forgets_no_attempt_at_the_next_round(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, account = server.exchange, home / "run/state/privacy.json"
    older: list[bytes] = []

    def ends_in_the_second(*parts: Any) -> Any:
        if parts[-1].round == 2:
            raise FederationError("nobody is there", "round 2", "try again")
        older[:] = [account.read_bytes()]
        return exchange(*parts)

    with monkeypatch.context() as patched:
        patched.setattr(server, "exchange", ends_in_the_second)
        words = ("train", "--config", "tiny.yaml", "--run_dir", "run", *WORDS, *NOISE)
        assert fedbnn(*words) != 0
        assert fedbnn("train", "--resume", "run") != 0
    newest = account.read_bytes()
    account.write_bytes(*older)
    capsys.readouterr()
    assert fedbnn("train", "--resume", "run") == 4
    said = "error: round 2 was begun 2 times, the account of privacy has 0"
    assert capsys.readouterr().err.startswith(said)
    account.write_bytes(newest)
    assert fedbnn("train", "--resume", "run") == 0


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("anew", [(), ("--anew",)], ids=["from the ledger", "anew"])
def test_a_run_without_a_client_goes_on_with_what_the_other_spent(
    home: Path, anew: tuple[str, ...]
) -> None:
    words = ("--config", "tiny.yaml", "--run_dir", "run", "--stream.clients_per_round", 4)
    assert fedbnn("train", *words, *WORDS, *NOISE) == 0
    rounds = len(records(home / "run"))
    last = ("--client", 0, "--from_round", rounds, "--out", "out", *anew)
    assert fedbnn("expel", "run", *last) == 0
    again = rounds if anew else 1
    assert [one["privacy"]["epsilon"] for one in records(home / "out")][-again:] == [
        epsilon(2.0, rounds + number, 1e-5) for number in range(1, again + 1)
    ]
    account = home / "run/state/privacy.json"
    kept = json.loads(account.read_text())
    account.write_text(json.dumps({**kept, "begun": {**kept["begun"], "99": 1}}))
    assert fedbnn("expel", "run", *last[: -1 - len(anew)], "other") == 4
    account.unlink()
    assert fedbnn("expel", "run", *last[: -1 - len(anew)], "more") == 4
    assert not (home / "more/metrics.jsonl").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("--gate.influence_cap", "1.7"),
        ("--method", "scaffold"),
        ("--head", "gaussian"),
        ("--federation.late", "fold"),
    ],
)
def test_what_would_leak_is_refused_before_there_is_a_run_directory(
    words: tuple[str, ...], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ("train", "--config", "tiny.yaml", "--run_dir", "run", *WORDS, *NOISE, *words)
    assert fedbnn(*said) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (home / "run").exists()
