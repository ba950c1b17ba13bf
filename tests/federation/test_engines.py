"""Every engine gives the same bytes; what happens to one client costs that client only."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser

from fedbnn.errors import FederationError
from fedbnn.federation.engines import SerialEngine, one_thread, worker
from fedbnn.federation.engines.process import ProcessEngine, environment
from fedbnn.protocol.messages import Failure, FitResult
from tests.federation import clients

ENTRY = "tests.federation.clients:"


WAYS = "behave fail raise_defect behave die be_killed spin hang_up eat train behave sleep"
TROUBLE = {str(client): way for client, way in enumerate(WAYS.split())}
RAISED = {0: None, 1: "it has no images", 2: "ZeroDivisionError: a defect", 3: None}


def nothing(client: int) -> bytes | None:
    return None


def by_client(answers: Iterator[FitResult | Failure]) -> dict[int, FitResult | Failure]:
    found = list(answers)
    assert len({answer.client for answer in found}) == len(found)
    return {answer.client: answer for answer in found}


def reasons(engine: Any, asked: list[int]) -> dict[int, str | None]:
    answers = by_client(engine.gather(b"order", asked, nothing))
    return {
        client: answers[client].reason if isinstance(answers[client], Failure) else None
        for client in asked
    }  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine") / "log.txt"


@pytest.fixture(scope="module")
def engine(log: Path) -> Iterator[ProcessEngine]:
    """Two workers for all tests; those that lose one get another."""
    with closing(
        ProcessEngine(f"{ENTRY}trouble", TROUBLE, workers=2, deadline=8, memory=1000, log=log)
    ) as engine:
        yield engine


def test_processes_answer_as_serial_does(engine: ProcessEngine) -> None:
    serial, private = SerialEngine(clients.trouble(TROUBLE)), {2: b"two", 3: b""}.get
    for payload in (b"first", b"second" * 100_000):
        assert by_client(engine.gather(payload, range(4), private)) == by_client(
            serial.gather(payload, range(4), private)
        )


def test_trained_weights_are_the_same_bytes_in_every_engine(engine: ProcessEngine) -> None:
    (serial,) = SerialEngine(clients.trouble(TROUBLE)).gather(b"", [9], nothing)
    (apart,) = engine.gather(b"", [9], nothing)
    assert apart == serial
    assert isinstance(serial, FitResult)
    with one_thread():
        assert clients.trained_weights().encode() in serial.update


def test_the_answers_hold_what_the_client_said(engine: ProcessEngine) -> None:
    (answer,) = engine.gather(b"order", [10], lambda client: b"kept")
    assert isinstance(answer, FitResult)
    assert answer.update.startswith(b"order|10|")
    assert (answer.private, answer.seconds, answer.inner) == (b"kept+", 1.5, 0.5)


def test_nobody_asked_nobody_answers(engine: ProcessEngine) -> None:
    assert list(engine.gather(b"order", [], nothing)) == []


def test_private_state_is_fetched_only_for_the_clients_asked(engine: ProcessEngine) -> None:
    fetched: list[int] = []
    list(engine.gather(b"order", [17, 13, 15], lambda client: fetched.append(client)))
    assert fetched == [17, 13, 15]


def test_what_workers_print_goes_to_the_log(engine: ProcessEngine, log: Path) -> None:
    list(engine.gather(b"order", [10], nothing))
    assert "a library that prints" in log.read_text()


def test_what_happens_to_a_worker_costs_its_client_only(engine: ProcessEngine) -> None:
    assert reasons(engine, list(range(10))) == RAISED | {
        4: "its worker died: exit code 7",
        5: "its worker died: SIGKILL",
        6: "no answer within 8 s",
        7: "its worker died: exit code 0",
        8: "its worker used more than 1000 MB",
        9: None,
    }
    assert reasons(engine, [0, 3]) == {0: None, 3: None}


def test_an_abandoned_exchange_does_not_answer_the_next_one(engine: ProcessEngine) -> None:
    answers = engine.gather(b"old", [0, 6, 3], nothing)
    next(answers)
    answers.close()  # type: ignore[attr-defined]
    fresh = list(engine.gather(b"new", [0, 3], nothing))
    assert [
        isinstance(answer, FitResult) and answer.update.startswith(b"new") for answer in fresh
    ] == [True, True]


def test_serial_uses_one_thread_and_gives_the_others_back() -> None:
    seen: list[int] = []

    class Preprocess:
        def perform(self, payload: bytes, client: int, private: bytes | None) -> FitResult:
            seen.append(torch.get_num_threads())
            return FitResult(client, b"")

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        list(SerialEngine(Preprocess()).gather(b"", [0], nothing))
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_a_client_that_raises_costs_itself_in_serial() -> None:
    assert reasons(SerialEngine(clients.trouble(TROUBLE), deadline=60), [0, 1, 2, 3]) == RAISED


@pytest.mark.parametrize("client", [6, 11])
def test_a_client_that_never_answers_costs_itself_in_serial(client: int) -> None:
    start = time.monotonic()
    engine = SerialEngine(clients.trouble(TROUBLE), deadline=0.3)
    assert reasons(engine, [0, client, 3]) == {0: None, client: "no answer within 0.3 s", 3: None}
    assert time.monotonic() - start < 5


def test_an_alarm_at_any_moment_leaves_no_alarm_behind() -> None:
    """Deadlines that end around the moment the client does: before, at, and after it."""

    class Brief:
        def perform(self, payload: bytes, client: int, private: bytes | None) -> FitResult:
            time.sleep(0.001)
            return FitResult(client, b"")

    before = signal.getsignal(signal.SIGALRM)
    for step in range(300):
        (answer,) = SerialEngine(Brief(), deadline=1e-5 * (step + 1)).gather(b"", [0], nothing)
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        assert signal.getsignal(signal.SIGALRM) == before
        assert answer.client == 0


def test_serial_in_another_thread_has_no_deadline_but_answers() -> None:
    found: list[dict[int, str | None]] = []
    thread = threading.Thread(
        target=lambda: found.append(reasons(SerialEngine(clients.trouble({}), deadline=5), [0]))
    )
    thread.start()
    thread.join()
    assert found == [{0: None}]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("broken", "no such data set"),
        ("stillborn", "workers do not start: its worker died: exit code 3"),
    ],
)
def test_workers_that_cannot_start_are_an_error_with_its_reason(
    entry: str, message: str, log: Path
) -> None:
    with (
        closing(ProcessEngine(ENTRY + entry, {}, workers=1, log=log)) as engine,
        pytest.raises(FederationError, match=message),
    ):
        list(engine.gather(b"order", [0, 1], nothing))


def test_there_is_at_least_one_worker() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(ProcessEngine, "engine", skip={"entry", "config", "log"})
    with pytest.raises(ArgumentError, match="workers"):
        parser.parse_args(["--engine.workers", "0"])


SECRETS = {
    **dict.fromkeys(("WANDB_API_KEY", "HF_TOKEN", "AWS_SESSION_TOKEN", "AWS_PROFILE"), "canary"),
    **dict.fromkeys(("GOOGLE_APPLICATION_CREDENTIALS", "PGPASSWORD", "my_secret"), "canary"),
    **dict.fromkeys(("SSH_AUTH_SOCK", "NETRC_COOKIE", "AZURE_CLIENT_ID"), "canary"),
    "HTTPS_PROXY": "http://user:canary@proxy:3128",
    "CERTIFICATE": "-----BEGIN EC PRIVATE canary",
    **dict.fromkeys(("MYSQL_PWD", "GH_PAT", "SENTRY_DSN", "CI_JWT", "SLACK_WEBHOOK_URL"), "canary"),
    "MIRROR": "https://canary@mirror.example/simple",
    "STORAGE": "Protocol=https;AccountKey=canary",
    "SHARED": "https://files.example/a?sv=1&sig=canary",
    "HEADER": f"bearer ghp_canary{'x' * 30}",
    "MODELS": f"hf_canary{'x' * 28}",
    "SESSION": "eyJhbGciOiJub25l.eyJjYW5hcnkiOjF9.canary",
}
HARMLESS = {
    "LD_LIBRARY_PATH": "/lib/canary",
    "HTTP_PROXY": "http://canary:3128",
    "LANG": "canary",
    "PWD": "/canary",
    "PATH": "/bin:/canary",
    "HF_HOME": "/data/hf_cache_of_all_models_canary",
}


def test_workers_see_no_secret_and_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SECRETS, **HARMLESS}.items():
        monkeypatch.setenv(name, value)
    found = environment()
    assert {name for name, value in found.items() if "canary" in value} == {*HARMLESS}
    assert found["OMP_NUM_THREADS"] == "1"
    assert os.environ["WANDB_API_KEY"] == "canary"


def test_a_worker_process_really_has_none(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    """What the kernel says of the process, not what we meant to give it."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    with closing(ProcessEngine(f"{ENTRY}trouble", TROUBLE, workers=1, log=log)) as engine:
        assert reasons(engine, [0]) == {0: None}
        seen = Path(f"/proc/{engine._peers[0]._process.pid}/environ").read_bytes()
    assert b"PYTHONPATH=" in seen
    assert b"canary" not in seen


PARENT = """
import sys
from fedbnn.federation.engines.process import ProcessEngine
entry = "tests.federation.clients:" + sys.argv[1]
engine = ProcessEngine(entry, {"pids": sys.argv[2]}, workers=1)
list(engine.gather(b"", [0], lambda client: None))
"""


@pytest.mark.parametrize("entry", ["slow", "never_composed"])
def test_a_worker_dies_with_its_parent_also_before_it_has_begun(tmp_path: Path, entry: str) -> None:
    root = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, "-c", PARENT, entry, str(tmp_path)], cwd=root)
    try:
        end = time.monotonic() + 60
        while not (pids := list(tmp_path.iterdir())) and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    (pid,) = pids
    end = time.monotonic() + 10
    while Path("/proc", pid.name).exists():
        assert time.monotonic() < end, "it outlives its parent"
        time.sleep(0.05)


def test_the_worker_module_is_bound_to_its_parent_before_it_imports_anything_large() -> None:
    code = "import sys, runpy; runpy.run_path(sys.argv[1]); print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-P", "-c", code, worker.__file__], capture_output=True, check=True
    )
    assert found.stdout == b"False\n"


class Finalised:
    """Something whose end takes longer than the deadline."""

    def __del__(self) -> None:
        time.sleep(0.1)


class Forgetful:
    """A client that is past its deadline while something it made is finalised."""

    def perform(self, payload: bytes, client: int, private: bytes | None) -> FitResult:
        del payload, private
        Finalised()
        time.sleep(5)
        return FitResult(client, b"")


def test_an_alarm_that_rings_in_a_finaliser_is_not_lost() -> None:
    began = time.monotonic()
    [answer] = SerialEngine(Forgetful(), deadline=0.02).gather(b"", [3], lambda _: None)
    assert answer == Failure(3, "no answer within 0.02 s")
    assert time.monotonic() - began < 3
