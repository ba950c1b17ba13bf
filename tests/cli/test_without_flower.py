"""`--engine flower` where Flower may be missing: one line says what to install."""

from importlib import util
from pathlib import Path

import pytest

from fedbnn.cli.main import main

INSTALL = 'install it: pip install -c constraints.txt ".[flower]"'


def test_without_flower_its_engine_says_what_to_install(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = util.find_spec
    monkeypatch.setattr(
        "fedbnn.federation.engines.flower.simulation.find_spec",
        lambda name: None if name == "flwr" else found(name),
    )
    assert main(["train", "--config", "tiny.yaml", "--engine", "flower"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: the engine flower needs Flower and Ray (engine.name); {INSTALL}"
    ]
    assert not (home / "runs").exists()


def test_its_settings_are_listed_and_checked_without_flower(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--config", "tiny.yaml", "--engine", "flower", "--engine.clients_at_once"]
    assert main([*words, "0"]) == 2
    assert "engine.clients_at_once: expected a whole number above 0" in capsys.readouterr().err
