"""report.html: self-contained, escaped, true to the numbers, and clean in a real browser."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from html.parser import HTMLParser
from itertools import product
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.stats import t as student

from fedbnn.errors import RunDirectoryError
from fedbnn.report import page as report
from fedbnn.report import tables, values, words
from fedbnn.report.values import Varied
from fedbnn.storage.run_dir import environment

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run"
QUIET += " --disable-background-networking --disable-component-update"
QUIET += " --disable-sync --enable-logging=stderr"
WINDOW = (1000, 10000)
CONFIG_LINES = 2000
NOTHING = '<figure id="nothing"><svg viewBox="0 0 640 320"></svg></figure>'
PROBE = """<script>
const places = [...document.querySelectorAll("figure")]
  .map(figure => [figure.id, figure.firstChild.getBoundingClientRect()]);
const sides = box => [box.left, box.top, box.right, box.bottom];
const boxes = Object.fromEntries(places.map(([id, box]) => [id, sides(box)]));
const phone = document.createElement("iframe");
phone.style = "width: 390px; border: 0";
phone.srcdoc = document.head.outerHTML + document.querySelector("main").outerHTML;
phone.onload = () => {
  const root = phone.contentDocument.documentElement;
  const overflow = root.scrollWidth - root.clientWidth;
  phone.remove();
  const cut = document.documentElement.scrollHeight - innerHeight;
  document.title = JSON.stringify({boxes, overflow, cut});
};
document.body.append(phone);
console.log("the probe was here");
</script>"""


class Shape(HTMLParser):
    """Counts tags, and collects what a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.loads += [
            value or ""
            for name, value in attrs
            if name in ("src", "href", "xlink:href", "srcset", "data")
        ]


def test_the_page_of_a_run_has_its_figures_numbers_and_sources(page, run) -> None:
    text = page.read_text()
    shape = Shape(text)
    assert shape.tags["figure"] == 9
    assert shape.tags["svg"] == 9
    assert f"<td>{run['class_agnostic']['fin'][0]:.1f}</td>" in text
    assert "influence 1e6 times the median" in text
    assert "name: toy" in text
    assert environment()["packages"]["torch"] in text
    assert len(list((page.parent / "figures").glob("*.png"))) == 9


def test_the_pages_load_nothing_and_run_nothing(page, comparison) -> None:
    for path in (page, comparison):
        shape = Shape(path.read_text())
        assert not [link for link in shape.loads if not link.startswith(("#", "data:"))]
        assert "script" not in shape.tags
        assert "alert(&#39;config&#39;)" in path.read_text()
        assert not re.search(r"url\((?!#)", path.read_text())


def test_the_page_of_a_comparison_has_tables_in_every_format(comparison) -> None:
    shape = Shape(comparison.read_text())
    assert shape.tags["figure"] == 9
    assert shape.tags["table"] == 13
    assert "Three &lt;toy&gt; tasks" in comparison.read_text()
    assert 'class="best"' in comparison.read_text()
    tex, md, csv = (
        (comparison.parent / f"tables.{kind}").read_text() for kind in ("tex", "md", "csv")
    )
    assert tex.count(r"\begin{tabular}") == len(re.findall(r"^\| ---", md, re.M)) == 12
    assert len({line.rsplit(",", 4)[0] for line in csv.splitlines()[1:]}) == 12


@pytest.fixture(scope="session")
def swept(comparison: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of two methods by two seeds at two values of a setting."""
    root, values = tmp_path_factory.mktemp("swept"), {}
    for seed, method, value in product((0, 1), ("fedbnn", "fedavg"), ("5", "10")):
        run_dir = root / f"{method}-s{seed}-{value}"
        shutil.copytree(comparison.parents[1] / f"{method}-{seed}", run_dir)
        (run_dir / "config.yaml").write_text(
            f"name: toy\nmethod: {{name: {method}}}\nclient: {{epochs: {value}}}\n"
        )
        values[run_dir] = value
    varied, title = Varied("client.epochs", list(values.values())), "toy, client.epochs = 5, 10"
    return report.write(list(values), root / "made", title, sweep=varied).page


def test_the_page_of_a_sweep_has_the_plot_the_curves_all_tables_and_the_setting(swept) -> None:
    text = swept.read_text()
    assert Shape(text).tags["figure"] == 2
    assert '<figure id="sweep" class="wide">' in text
    assert "client.epochs takes 2 values: 5, 10." in text
    assert all(f'<th scope="row">fedbnn − fedavg at {value}</th>' in text for value in (5, 10))
    assert '<th scope="row">client.epochs</th><td>5</td><td>10</td><td>5</td><td>10</td>' in text
    assert "Configuration of fedbnn-s0-5 (config.yaml)" in text
    assert all(f"fedavg {value}" in (swept.parent / "tables.md").read_text() for value in (5, 10))
    assert sorted(path.name for path in (swept.parent / "figures").iterdir()) == [
        f"{name}.{kind}" for name in ("focus_on_now", "sweep") for kind in ("pdf", "png")
    ]


@pytest.mark.parametrize("varied", ["fedbnn", "fedavg"])
def test_a_sweep_of_one_method_has_its_differences_once(grid, varied) -> None:
    pairs = [
        (value, run)
        for run in grid
        for value in (("1", "2") if run["method"] == varied else (None,))
    ]
    sweep, runs = Varied("lr", [value for value, _ in pairs]), [run for _, run in pairs]
    made = tables.every(runs, sweep=sweep)
    [paired] = [table for table in made if table.title.startswith("Paired")]
    assert len([row for row in paired.rows if "fedavg" in row.name]) == 2
    assert "fedbnn ends" in words.summary(runs, "fedbnn", sweep)


def test_the_settings_that_differ_are_found_and_those_of_one_run_are_not() -> None:
    one = {
        "seed": 0,
        "run_dir": None,
        "method": {"name": "fedavg"},
        "client": {"lr": 0.1, "sizes": [1, 2], "on": True},
    }
    other = {
        "seed": 1,
        "run_dir": "b",
        "method": {"name": "ewc", "weight": 2},
        "client": {"lr": 0.1, "sizes": [1], "on": None},
    }
    assert report.differences({"fedavg": one, "ewc": other}) == {
        "setting": ["fedavg", "ewc"],
        "client.sizes": ["[1, 2]", "[1]"],
        "client.on": ["true", "null"],
        "method.weight": ["–", "2"],
    }


def test_writing_twice_gives_the_same_page(page) -> None:
    before = page.read_bytes()
    assert report.write([page.parent], page.parent, pictures=False).page.read_bytes() == before


def test_a_run_without_results_is_named(tmp_path) -> None:
    with pytest.raises(RunDirectoryError, match=r"no results: results\.json cannot be read"):
        report.write([tmp_path], tmp_path)


def test_the_summary_of_a_run_gives_both_regimes_with_their_chance(run) -> None:
    text = words.of_run(run)
    assert f"{run['task_aware']['avg_fin']:.1f} % of the images (chance: 50.0 %)" in text
    assert f"{run['class_agnostic']['avg_fin']:.1f} % of the images (chance: 16.7 %)" in text
    assert "Not counted: 1 update refused and 1 client without an answer." in text
    assert "Counted with less weight: 2 updates." in text
    assert "less weight" not in words.of_run({**run, "down_weighted": []})
    assert "5 of 12 rounds" in words.of_run({**run, "rounds_done": 5})


def test_nothing_lost_is_said_without_a_sign(run) -> None:
    """A mean of rounding errors below zero is no gain."""
    least = {**run, "task_aware": {**run["task_aware"], "forgetting": -1e-15}}
    assert " it lost 0.0 points " in words.of_run(least)


def test_a_down_weighted_update_stands_beside_the_refused_and_the_failed(
    page, comparison, grid
) -> None:
    for path, runs in ((page, 1), (comparison, 9)):
        assert path.read_text().count("down-weighted: trust 0.25") == runs
        assert path.read_text().index("trust 0.25") > path.read_text().index("no answer: diverged")
    costs = tables.every(grid)[-1]
    assert costs.heads[-3:] == ("refused", "failed", "down-weighted")
    assert [cell.text() for cell in costs.rows[0].cells[-3:]] == ["3", "3", "6"]


def test_the_page_of_a_run_gives_its_four_numbers_and_its_plain_facts(page, run) -> None:
    text = page.read_text()
    finals = [run[part]["avg_fin"] for part in ("task_aware", "class_agnostic")]
    assert [f"{value:.1f} %" for value in finals] == re.findall(r"<b>([\d.]+ %)</b>", text)
    assert "<title>toy, three tasks: fedbnn, seed 0</title>" in text
    assert "<dt>rounds</dt><dd>12 of 12</dd>" in text
    assert "<dt>communication</dt><dd>1.4 MB up, 1.2 MB down</dd>" in text
    assert "Federated continual run" in text


def test_the_facts_of_a_comparison_are_those_of_all_its_runs(comparison) -> None:
    text = comparison.read_text()
    assert "<dt>methods</dt><dd>fedbnn, fedavg, fcil</dd>" in text
    assert "<dt>seeds</dt><dd>0, 1, 2</dd>" in text
    assert "<dt>stored images</dt><dd>200</dd>" in text
    assert "162.0 s for all runs together" in text
    assert "<b>" not in text


def shifted(grid: list, method: str, points: list[float]) -> list:
    """The same runs, the final class-agnostic accuracy of one moved around that of fedavg."""
    base = {
        run["seed"]: run["class_agnostic"]["avg_fin"] for run in grid if run["method"] == "fedavg"
    }
    copies = json.loads(json.dumps(grid))
    for run in copies:
        if run["method"] == method:
            run["class_agnostic"]["avg_fin"] = base[run["seed"]] + points[run["seed"]]
    return copies


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([3.0, 3.1, 2.9], "fedbnn is 3.0 points above fedavg."),
        ([-3.0, -3.1, -2.9], "fedbnn is 3.0 points below fedavg."),
        (
            [3.0, -1.0, -0.5],
            "fedbnn is 0.5 points above fedavg, which is within the noise of the seeds.",
        ),
        ([0.0, 0.0, 0.0], "fedbnn and fedavg end level."),
    ],
)
def test_the_summary_of_a_comparison_is_honest_about_wins_losses_and_noise(
    grid, points, said
) -> None:
    assert said in words.of_comparison(shifted(grid, "fedbnn", points))


@pytest.mark.parametrize("pairs", range(2, 12))
def test_a_difference_is_clear_where_student_says_so(pairs) -> None:
    noise = np.resize([1.0, -1.0], pairs) - np.resize([1.0, -1.0], pairs).mean()
    edge = student.ppf(0.975, pairs - 1) * noise.std(ddof=1) / sqrt(pairs)
    assert values.clear(list(noise + 1.001 * edge))
    assert values.clear(list(noise - 1.001 * edge))
    assert not values.clear(list(noise + 0.999 * edge))


@pytest.mark.parametrize(
    ("points", "marked"), [([3.0, 3.1, 2.9], True), ([3.0, -1.0, -0.5], False)]
)
def test_differences_that_are_clear_are_marked(grid, points, marked) -> None:
    table = tables.every(shifted(grid, "fedbnn", points))[1]
    [row] = [row for row in table.rows if row.name == "fedbnn − fedavg"]
    assert row.cells[table.heads.index("agnostic @Fin") - 1].best is marked
    assert ("**+3.0 ± 0.1**" in report.markdown(table)) is marked


def test_one_seed_is_never_clear(grid) -> None:
    assert not values.clear([50.0])
    alone = [run for run in shifted(grid, "fedbnn", [50.0] * 3) if run["seed"] == 0]
    assert "fedbnn is 50.0 points above fedavg (one seed)." in words.of_comparison(alone)


def test_of_many_methods_the_words_name_the_nearest(grid) -> None:
    mine = [run for run in grid if run["method"] == "fedavg"]
    more = [{**run, "method": f"mine {number}"} for number in range(5) for run in mine]
    text = words.of_comparison([*grid, *more])
    named = [one for one in ("fedavg", *(f"mine {number}" for number in range(5))) if one in text]
    assert len(named) <= words.NEAREST + 1
    assert text.endswith("The paired differences below have the others.")
    assert "paired differences" not in words.of_comparison(grid)


def test_the_summary_crowns_neither_bounds_nor_stored_images(grid) -> None:
    high = shifted(shifted(grid, "fcil", [40.0] * 3), "fedbnn", [5.0] * 3)
    text = words.of_comparison(high)
    assert re.search(
        r"fedbnn ends highest, at [0-9.]+ %\. "
        r"fcil ends at [0-9.]+ % with the help of 200 stored images",
        text,
    )
    bounded = [
        run | ({"notes": {"bound": "upper: all images"}} if run["method"] == "fedbnn" else {})
        for run in high
    ]
    text = words.of_comparison(bounded, reference="fedavg")
    assert re.search(
        r"fedavg ends at [0-9.]+ %\. The upper bound fedbnn \(all images\) ends at", text
    )
    assert "highest" not in text
    assert "fedavg is 5.0 points below fedbnn." in text


def test_the_summary_of_unfinished_runs_says_so(grid) -> None:
    for run in grid:
        run["class_agnostic"]["avg_fin"] = None
    assert "none has reached its last round" in words.of_comparison(grid)


@dataclass(frozen=True)
class Seen:
    """What a browser made of a page: places of the figures, pixels too wide for a phone or below
    the screen, print, log.
    """

    boxes: dict[str, tuple[float, float, float, float]]
    overflow: int
    cut: int
    screen: np.ndarray
    printed: bytes
    log: str

    def coloured(self, name: str) -> float:
        """The share of a figure that is neither paper nor ink: both are grey, data are not."""
        left, top, right, bottom = map(round, self.boxes[name])
        part = self.screen[top:bottom, left:right]
        return float((np.ptp(part, axis=2) > 60).mean())


def look(page: Path, folder: Path) -> Seen:
    """Start Chromium on a copy with an empty figure, a long configuration and a probing script."""
    text = page.read_text().replace('<div class="figures">', f'<div class="figures">{NOTHING}')
    text = text.replace("<pre>name: toy", "<pre>" + "line\n" * CONFIG_LINES)
    copy, screen, printed = (folder / f"copy.{kind}" for kind in ("html", "png", "pdf"))
    copy.write_text(text.replace("</body>", f"{PROBE}</body>"))
    command = [
        str(CHROMIUM),
        *QUIET.split(),
        f"--user-data-dir={folder / 'profile'}",
        "--window-size={},{}".format(*WINDOW),
    ]
    asked = ["--dump-dom", f"--screenshot={screen}", f"--print-to-pdf={printed}", copy.as_uri()]
    shown = subprocess.run(
        [*command, *asked], capture_output=True, text=True, check=True, timeout=240
    )
    [title] = re.findall("<title>(.*?)</title>", shown.stdout)[:1]
    with Image.open(screen) as image:
        pixels = np.asarray(image.convert("RGB"))
    return Seen(
        **json.loads(unescape(title)), screen=pixels, printed=printed.read_bytes(), log=shown.stderr
    )


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("kind", ["page", "comparison", "swept"])
def test_a_real_browser_draws_every_figure_fits_a_phone_and_prints_all(
    kind, request, tmp_path
) -> None:
    seen = look(request.getfixturevalue(kind), tmp_path)
    assert seen.log.count("CONSOLE") == seen.log.count("the probe was here") == 1
    assert seen.cut <= 0
    assert len(seen.boxes) == {"page": 9, "comparison": 9, "swept": 2}[kind] + 1
    assert [name for name in seen.boxes if seen.coloured(name) < 0.002] == ["nothing"]
    assert seen.overflow == 0
    assert len(re.findall(rb"/Type\s*/Page\b", seen.printed)) > CONFIG_LINES / 80
