"""env.json: what a run was computed with. Versions and hardware only: no variables, names of people or machines, or paths."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    *(
        "fedbnn",
        "torch",
        "torchvision",
        "pytorch-lightning",
        "pyro-ppl",
        "torchmetrics",
        "numpy",
        "scikit-learn",
    ),
    *("safetensors", "jsonargparse", "rich", "matplotlib", "jinja2", "wandb", "flwr"),
)


def environment() -> dict[str, Any]:
    """Everything worth knowing to repeat a run elsewhere."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerators": [
            torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())
        ],
        "packages": _versions(),
        "commit": _commit(),
    }


def _versions() -> dict[str, str]:
    """The installed ones of the packages that matter here."""
    found = {name: _version(name) for name in PACKAGES}
    return {name: version for name, version in found.items() if version}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    """The processor's own name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str | None:
    """The commit of the source tree this package runs from, with `-dirty` when files have changed; None outside one."""
    here = Path(__file__).parent
    if not _git(here, "ls-files", Path(__file__).name):
        return None
    commit = _git(here, "rev-parse", "HEAD")
    changed = _git(here, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changed else commit or None


def _git(where: Path, *arguments: str) -> str:
    """What git answers; nothing when there is no git or no repository."""
    try:
        answer = subprocess.run(
            ["git", *arguments], cwd=where, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()
