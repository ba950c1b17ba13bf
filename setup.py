"""In a wheel `lightning_modules`, `datamodules` and `conf` live below `fedbnn`, our one name there.

In a clone they stand at the top and are imported by those names, which others have, too. So a wheel
holds the same files one folder down, with `from datamodules...` read as `from fedbnn.datamodules`.
Everything else about the project is in pyproject.toml.
"""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

MOVED = ("lightning_modules", "datamodules")
IMPORT = re.compile(rf"^(\s*from) ({'|'.join(MOVED)})\b", re.MULTILINE)


class BuildBelow(build_py):
    """Builds as ever, then moves; an editable installation is the clone itself."""

    def run(self) -> None:
        """Move packages and configurations below `fedbnn`, and the imports with them."""
        super().run()
        if self.editable_mode:
            return
        built = Path(self.build_lib)
        for name in MOVED:
            shutil.rmtree(built / "fedbnn" / name, ignore_errors=True)
            shutil.move(built / name, built / "fedbnn" / name)
        for file in built.rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            file.write_text(IMPORT.sub(r"\1 fedbnn.\2", text), encoding="utf-8")
        shutil.copytree("conf", built / "fedbnn" / "conf", dirs_exist_ok=True)


class WheelBelow(bdist_wheel):
    """Says what is at the top of the wheel."""

    def egg2dist(self, egginfo_path: str, distinfo_path: str) -> None:
        """The metadata, with our one name."""
        super().egg2dist(egginfo_path, distinfo_path)
        (Path(distinfo_path) / "top_level.txt").write_text("fedbnn\n", encoding="utf-8")


setup(cmdclass={"build_py": BuildBelow, "bdist_wheel": WheelBelow})
