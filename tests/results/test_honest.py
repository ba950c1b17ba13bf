"""Where nobody lies nobody is refused and everybody counts in full, in runs of the quickstart."""

import importlib
from argparse import Namespace
from pathlib import Path

import pytest

from tests.results.test_ablation import ROOT

METHODS = ("fedbnn", "exact", "fedavg", "fedprox", "scaffold", "ewc", "mas", "lwf", "fcil")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", METHODS)
def test_honest_clients_of_the_quickstart_count_in_full(
    method: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "results"))
    honest = importlib.import_module("honest")
    options = Namespace(config=ROOT / "conf/quickstart.yaml", out=tmp_path, set=[])
    found = honest.counted(method, seed, options)
    assert found.pop("answers") >= 90
    assert found == {"refused": [], "less": []}
