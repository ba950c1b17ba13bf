"""`fedbnn bench engines --deployment` and `--slow_site`, with a network that takes no time."""

import json
from pathlib import Path

import pytest

from tests.cli.command import ROOT, fedbnn

pytest.importorskip("flwr", reason='needs Flower: pip install -c constraints.txt ".[flower]"')

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str
) -> list[dict[str, float]]:
    """The rows of a bench, as its file has them."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert fedbnn("bench", "engines", *words, "--repeats", 1, "--out", tmp_path / "out.json") == 0
    rows: list[dict[str, float]] = json.loads((tmp_path / "out.json").read_text())["rows"]
    return rows


def test_three_sites_are_measured_beside_serial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ("--network", "mlp", "--stream.size", "8")
    serial, sites = measured(tmp_path, monkeypatch, "--deployment", *small)
    assert sites["same_bytes"]
    for way in ("down", "up"):
        assert sites[f"megabytes_{way}"] == serial[f"megabytes_{way}"] > 0
    assert sites["ratio"] == pytest.approx(sites["round_s"] / serial["round_s"])
    assert min(sites[f"{who}_peak_mib"] for who in ("server", "site", "link")) > 50


def test_with_one_slow_site_in_five_folding_late_loses_no_time_and_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, wait, refuse, fold = measured(tmp_path, monkeypatch, "--slow_site")
    assert fold["rounds_per_hour"] > wait["rounds_per_hour"]
    assert 3600 / wait["rounds_per_hour"] > wait["slow_site_s"] > wait["deadline_s"]
    assert 3600 / refuse["rounds_per_hour"] > refuse["deadline_s"]
    assert [row["counted"] for row in (usual, wait, refuse)] == [1, 1, 0]
    assert fold["counted"] == fold["of_these_late"] > 0
