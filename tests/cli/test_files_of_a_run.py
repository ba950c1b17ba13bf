"""What a run leaves is what the documentation says."""

from pathlib import Path

from tests.docs.blocks import ROOT, rows


def test_every_file_a_run_leaves_is_in_the_table(finished: Path) -> None:
    table = rows(ROOT / "docs" / "runs.md", "What a run gives")
    named = {part.strip(" `/") for first, *_ in table for part in first.split(",")}
    assert {path.name for path in finished.iterdir()} == named - {"rejected"}
