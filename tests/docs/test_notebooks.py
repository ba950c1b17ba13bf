"""The notebooks run from top to bottom; they are kept without outputs."""

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

from tests.docs.blocks import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells
    assert not any(cell.outputs or cell.execution_count for cell in cells)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[KernelManager, Path]]:
    """One kernel in an empty folder for all of them: torch is imported once."""
    folder = tmp_path_factory.mktemp("notebooks")
    manager = KernelManager(kernel_name="python3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
        manager.start_kernel(cwd=str(folder))
    yield manager, folder
    manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, kernel: tuple[KernelManager, Path]) -> None:
    manager, folder = kernel
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, km=manager, timeout=240)
    client.resources = {"metadata": {"path": str(folder)}}
    try:
        client.execute()
    finally:
        client.kc.stop_channels()
    shown = [cell for cell in notebook.cells if cell.get("outputs")]
    assert len(shown) >= 3
    outputs = [output for cell in shown for output in cell.outputs]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]
    pages = [output.data.get("text/html", "") for output in outputs if "data" in output]
    [bar] = [page for page in pages if page.startswith("<progress")]
    assert re.search(r"max='(\d+)' value='\1'", bar)


def test_what_a_compared_run_says_is_in_its_log(kernel: tuple[KernelManager, Path]) -> None:
    logs = [*kernel[1].glob("runs/both/logs/*.txt")]
    assert len(logs) == 2
    assert all("round 4/4" in log.read_text() for log in logs)
