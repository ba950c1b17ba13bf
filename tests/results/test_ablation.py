"""Every line of results/ablation.py is a configuration that can be composed."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedbnn.cli.compose import compose
from fedbnn.cli.train import parse

ROOT = Path(__file__).parents[2]
TAKEN_APART = "anchor, memory, transport, fixed features, prior mean, curvature, server step"
TAKEN_APART += ", function prior, SNN initialisation, temperature, aggregation"


@pytest.fixture
def ablation(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "results"))
    return importlib.import_module("ablation")


@pytest.fixture
def factors(ablation: ModuleType) -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = ablation.FACTORS
    return found


def words(config: str, settings: Mapping[str, Any]) -> list[str]:
    """As a command is told them; `times` is no setting but the script's."""
    said = [f"--{key}={value}" for key, value in settings.items() if key != "times"]
    return [f"--config={ROOT / 'conf' / config}", *said]


def test_every_factor_is_a_setting_that_there_is(factors, tmp_path: Path) -> None:
    assert {name.partition(":")[0] for name in factors} >= set(TAKEN_APART.split(", "))
    for place, settings in enumerate(factors.values()):
        parsed = parse([*words("quickstart.yaml", settings), f"--stream.data_dir={tmp_path}"])
        compose(parsed, tmp_path / str(place))


def test_every_factor_goes_with_what_another_configuration_has_on(factors) -> None:
    """A server step and the function prior, which the digits leave off."""
    told = {name: parse(words("cifar100_ci_fast.yaml", one)) for name, one in factors.items()}
    steps = {name: one["method"]["server_lr"] for name, one in told.items()}
    assert steps["as configured"] == 2
    assert steps["aggregation: moments"] == 1


def test_what_a_configuration_has_already_is_no_line(ablation: ModuleType) -> None:
    """The digits have a server step of one, CIFAR-100 one of two: each is compared with others."""
    some = {name: ablation.FACTORS[name] for name in ("server step: 1", "server step: 2")}
    some["temperature: a third"] = {"times": 1 / 3}
    told = {"quickstart": "server step: 2", "cifar100_ci_fast": "server step: 1"}
    for config, other in told.items():
        expected = [ablation.AS_IT_IS, other, "temperature: a third"]
        assert ablation.telling(str(ROOT / f"conf/{config}.yaml"), [], some) == expected
    swapped = ablation.telling(str(ROOT / "conf/quickstart.yaml"), ["method.server_lr=2"], some)
    assert swapped == [ablation.AS_IT_IS, "server step: 1", "temperature: a third"]
