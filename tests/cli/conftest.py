"""One finished tiny run that all tests of a process share."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from fedbnn.report import figures
from fedbnn.report.values import Runs, Varied
from tests.cli.command import TINY, fedbnn


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run of digits: 2 tasks of 2 rounds each."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "tiny.yaml").write_text(TINY, encoding="utf-8")
    assert fedbnn("train", "--config", folder / "tiny.yaml", "--run_dir", folder / "run") == 0
    return folder / "run"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with tiny.yaml in it."""
    (tmp_path / "tiny.yaml").write_text(TINY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without figures, but those of a sweep: they take longer than a tiny run."""
    drawn = figures.every

    def swept(runs: Runs, sweep: Varied | None = None) -> dict[str, Figure]:
        return drawn(runs, sweep) if sweep else {}

    monkeypatch.setattr(figures, "every", swept)
