"""Who may import whom: the contracts hold, and each of them can be broken."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("fedbnn", "lightning_modules", "datamodules")
BREACHES = {
    "fedbnn/breach.py": [
        ("import datamodules.stream", "fedbnn imports none of ours"),
        ("import lightning_modules.client_runner", "fedbnn imports none of ours"),
        ("import fedbnn.cli.main", "only the command line imports the commands"),
        ("import wandb", "wandb has one door"),
        ("import flwr", "flwr has one door"),
        ("import opacus", "opacus has one door"),
        ("from torchvision import datasets", "torchvision has one door"),
        ("import pyro.distributions", "pyro has one door"),
        ("def f():\n    import pytorch_lightning", "fedbnn does without pytorch_lightning"),
    ],
    "fedbnn/bayes/breach.py": [
        ("import fedbnn.methods.base", "the rooms of fedbnn"),
        ("from fedbnn.heads import HEADS", "the rooms of fedbnn"),
    ],
    "fedbnn/storage/breach.py": [
        ("import fedbnn.federation.server", "the rooms of fedbnn"),
        ("def f():\n    from fedbnn.report import page", "the rooms of fedbnn"),
    ],
    "fedbnn/newcomer.py": [("import fedbnn.seeds", "the rooms of fedbnn")],
    "datamodules/breach.py": [
        ("import lightning_modules.client_runner", "never import each other"),
        ("import wandb", "wandb has one door"),
        ("import fedbnn.cli.main", "only the command line imports the commands"),
    ],
    "lightning_modules/breach.py": [
        ("import datamodules.stream", "never import each other"),
        ("import torchvision", "torchvision has one door"),
    ],
}
CASES = [(file, *breach) for file, breaches in BREACHES.items() for breach in breaches]


def verdicts(folder: Path) -> dict[str, str]:
    """KEPT or BROKEN for each contract, as import-linter sees the code in this folder."""
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    lines = [
        line
        for line in done.stdout.splitlines()
        if " KEPT" in line or line.endswith("BROKEN") or " BROKEN (" in line
    ]
    assert lines, done.stdout + done.stderr
    return {
        line.split(" KEPT")[0].split(" BROKEN")[0]: "KEPT" if " KEPT" in line else "BROKEN"
        for line in lines
    }


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages and their contracts, where they can be broken."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    return folder


def test_all_contracts_hold(copied: Path) -> None:
    assert set(verdicts(copied).values()) == {"KEPT"}


@pytest.mark.parametrize(
    ("file", "code", "contract"), CASES, ids=[f"{file}: {code}" for file, code, _ in CASES]
)
def test_a_breach_is_noticed(copied: Path, file: str, code: str, contract: str) -> None:
    breach = copied / file
    breach.write_text(f"{code}\n")
    try:
        broken = [name for name, verdict in verdicts(copied).items() if verdict == "BROKEN"]
    finally:
        breach.unlink()
    assert any(contract in name for name in broken)
