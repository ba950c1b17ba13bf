"""report.html: self-contained, escaped, true to the numbers, and clean in a real browser."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fedbnn import report, summary
from fedbnn.environment import environment
from fedbnn.errors import RunDirectoryError

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
QUIET += " --disable-component-update --disable-sync --enable-logging=stderr"


class Shape(HTMLParser):
    """Counts tags, and collects what a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "data")]


def test_the_page_of_a_run_has_its_figures_numbers_and_sources(page, run) -> None:
    text = page.read_text()
    shape = Shape(text)
    assert shape.tags["figure"] == 7
    assert shape.tags["svg"] == 7
    assert f"<td>{run['class_agnostic']['fin'][0]:.1f}</td>" in text
    assert "influence 1e6 times the median" in text
    assert "name: toy" in text
    assert environment()["packages"]["torch"] in text
    assert len(list((page.parent / "figures").glob("*.png"))) == 7


def test_the_pages_load_nothing_and_run_nothing(page, comparison) -> None:
    for path in (page, comparison):
        shape = Shape(path.read_text())
        assert not [link for link in shape.loads if not link.startswith(("#", "data:"))]
        assert "script" not in shape.tags
        assert "alert(&#39;config&#39;)" in path.read_text()
        assert not re.search(r"url\((?!#)", path.read_text())


def test_the_page_of_a_comparison_has_tables_in_every_format(comparison) -> None:
    shape = Shape(comparison.read_text())
    assert shape.tags["figure"] == 7
    assert shape.tags["table"] == 12
    assert "Three &lt;toy&gt; tasks" in comparison.read_text()
    assert 'class="best"' in comparison.read_text()
    tex, md, csv = ((comparison.parent / f"tables.{kind}").read_text() for kind in ("tex", "md", "csv"))
    assert tex.count(r"\begin{tabular}") == len(re.findall(r"^\| ---", md, re.M)) == 11
    assert len({line.rsplit(",", 4)[0] for line in csv.splitlines()[1:]}) == 11


def test_writing_twice_gives_the_same_page(page) -> None:
    before = page.read_bytes()
    assert report.write_run(page.parent).page.read_bytes() == before


def test_a_run_without_results_is_named(tmp_path) -> None:
    with pytest.raises(RunDirectoryError, match=r"no results\.json that can be read"):
        report.write_run(tmp_path)


def test_the_summary_of_a_run_gives_both_regimes_with_their_chance(run) -> None:
    text = summary.of_run(run)
    assert f"{run['task_aware']['avg_fin']:.1f} % of the images (chance: 50.0 %)" in text
    assert f"{run['class_agnostic']['avg_fin']:.1f} % of the images (chance: 16.7 %)" in text
    assert "Not counted: 1 update refused and 1 client without an answer." in text
    assert "5 of 12 rounds" in summary.of_run({**run, "rounds_done": 5})


def shifted(grid: list, method: str, points: list[float]) -> list:
    """The same runs, with the final class-agnostic accuracy of one method moved seed by seed around that of fedavg."""
    base = {run["seed"]: run["class_agnostic"]["avg_fin"] for run in grid if run["method"] == "fedavg"}
    copies = json.loads(json.dumps(grid))
    for run in copies:
        if run["method"] == method:
            run["class_agnostic"]["avg_fin"] = base[run["seed"]] + points[run["seed"]]
    return copies


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([3.0, 3.1, 2.9], "fedbnn is 3.0 points above fedavg."),
        ([-3.0, -3.1, -2.9], "fedbnn is 3.0 points below fedavg."),
        ([3.0, -1.0, -0.5], "fedbnn is 0.5 points above fedavg, which is within the noise of the seeds."),
        ([0.0, 0.0, 0.0], "fedbnn and fedavg end level."),
    ],
)
def test_the_summary_of_a_comparison_is_honest_about_wins_losses_and_noise(grid, points, words) -> None:
    assert words in summary.of_comparison(shifted(grid, "fedbnn", points))


def test_the_summary_names_the_winner_and_its_stored_images(grid) -> None:
    assert "fcil ends highest" in summary.of_comparison(shifted(grid, "fcil", [50.0] * 3))
    assert "with the help of 200 stored images" in summary.of_comparison(shifted(grid, "fcil", [50.0] * 3))
    for run in grid:
        run["class_agnostic"]["avg_fin"] = None
    assert "none has reached its last round" in summary.of_comparison(grid)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("kind", ["page", "comparison"])
def test_a_real_browser_shows_every_figure_and_reports_no_error(kind, request, tmp_path) -> None:
    path, picture = request.getfixturevalue(kind), tmp_path / "screen.png"
    command = [str(CHROMIUM), *QUIET.split(), f"--user-data-dir={tmp_path / 'profile'}", "--window-size=900,4000"]
    subprocess.run([*command, f"--screenshot={picture}", path.as_uri()], capture_output=True, check=True, timeout=120)
    shown = subprocess.run([*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, check=True, timeout=120)
    assert "CONSOLE" not in shown.stderr
    assert Shape(shown.stdout).tags["svg"] == 7
    assert _colours(picture) > 100


def _colours(picture: Path) -> int:
    """How many different colours a screenshot has: a page whose figures failed has very few."""
    from PIL import Image

    with Image.open(picture) as image:
        return len(image.convert("RGB").getcolors(1 << 24) or [])
