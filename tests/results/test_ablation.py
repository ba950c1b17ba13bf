"""Every line of results/ablation.py is a configuration that can be composed."""

import importlib
from pathlib import Path

import pytest

from fedbnn.cli.compose import compose
from fedbnn.cli.train import parse

ROOT = Path(__file__).parents[2]


def test_every_factor_is_a_setting_that_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "results"))
    factors = importlib.import_module("ablation").FACTORS
    assert len(factors) >= 15
    for place, settings in enumerate(factors.values()):
        words = [f"--{key}={value}" for key, value in settings.items() if key != "times"]
        config = f"--config={ROOT / 'conf' / 'quickstart.yaml'}"
        compose(parse([config, f"--stream.data_dir={tmp_path}", *words]), tmp_path / str(place))
