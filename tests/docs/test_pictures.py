"""Pictures and badges of the documentation are those that the present code draws."""

import runpy
from pathlib import Path

from tests.docs.blocks import ROOT


def test_the_pictures_are_those_of_the_command(tmp_path: Path) -> None:
    command = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
    for path in command["draw"](tmp_path):
        kept = ROOT / "docs" / "pictures" / path.relative_to(tmp_path)
        assert kept.read_text() == path.read_text(), f"{path.name}: python docs/pictures.py"
