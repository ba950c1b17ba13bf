"""Three sites that the tests of a file share, and the bytes of the same run on one box."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import final, process
from tests.deployment.machines import SMALL, Machines


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final bytes of the same run with the engine `serial`."""
    home = tmp_path_factory.mktemp("serial")
    (home / "small.yaml").write_text(SMALL, encoding="utf-8")
    assert process(home, "--config", "small.yaml", "--run_dir", "run").returncode == 0
    return final(home / "run")


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """A SuperLink that keeps its state in a file, and three sites of one client each."""
    home: Path = tmp_path_factory.mktemp("federation")
    made = Machines(home, link=["--insecure", "--database", str(home / "link.db")])
    try:
        made.superlink()
        for number in range(3):
            made.site(f"site{number}", str(number))
        yield made
    finally:
        made.close()
