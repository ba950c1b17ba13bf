"""report.html: one page that needs no other file, for a run, a comparison or a sweep; and the figures beside it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from fedbnn import __version__
from fedbnn.config import yaml
from fedbnn.errors import RunDirectoryError
from fedbnn.report import (
    comparison_figures,
    comparison_tables,
    config_differences,
    figure_style,
    figures,
    summary,
    sweeps,
    table_formats,
    tables,
)
from fedbnn.storage.files import write_atomic

Json = Mapping[str, Any]
MOST_INCIDENTS = 50
WIDE = ("focus_on_now", "sweep")
CAPTIONS = {
    "focus_on_now": "Accuracy on a test set drawn from the tasks of the moment, and below it the share of clients on each task.",
    "accuracy_matrix": "Each row is an evaluation at the end of a task, each column a tested task. Read down to see forgetting.",
    "forgetting": "How many points were lost since the best earlier evaluation. Less is better.",
    "reliability": "On the dotted line the model is as often right as it claims. Below it, it is too sure of itself.",
    "uncertainty": "Uncertainty about images of classes already seen and not seen yet. The further apart, the better.",
    "posterior_scale": "How uncertain the weights are: the median, and the band that holds nine weights in ten.",
    "communication": "RoundStats between server and clients so far, and where the time went.",
    "averages": "Average accuracy at the end of each task (pale) and at the end of the run (full); the whiskers are over seeds.",
    "novelty": "How well uncertainty tells classes never seen from classes seen. 0.5 is a coin toss.",
    "sweep": "Average accuracy at the end of the run over the values of the setting; the whiskers are over seeds.",
    "cost": "Final accuracy against what it took. One point per run.",
}


@dataclass(frozen=True)
class Picture:
    """A figure in the page."""

    name: str
    svg: Markup
    caption: str
    wide: bool


@dataclass(frozen=True)
class Tile:
    """One large number with what it is, and what to hold beside it."""

    value: str
    label: str
    beside: str


@dataclass(frozen=True)
class Written:
    """Where the page and its figures are."""

    page: Path
    figures: list[Path]


def write_run(run_dir: Path) -> Written:
    """Make figures/ and report.html of one run from the files in its directory."""
    results, diagnostics = _read(run_dir / "results.json"), _read(run_dir / "diagnostics.json")
    drawn = figures.of_run(results, diagnostics)
    page = _page(
        title=f"{results['scenario']}: {results['method']}, seed {results['seed']}",
        kind="Federated continual run",
        summary=summary.of_run(results),
        tiles=_tiles(results),
        tables=[tables.of_run(results)],
        pictures=_pictures(drawn),
        incidents=_incidents([results]),
        facts=_facts(results),
        differing=None,
        sources=_sources(run_dir),
    )
    write_atomic(run_dir / "report.html", page.encode())
    return Written(run_dir / "report.html", figure_style.save(drawn, run_dir / "figures"))


def write_comparison(
    run_dirs: Sequence[Path], directory: Path, title: str, reference: str = tables.REFERENCE
) -> Written:
    """Make report.html, figures/ and the tables (Markdown, LaTeX, CSV) of several finished runs on one stream."""
    runs = [_read(run_dir / "results.json") for run_dir in run_dirs]
    drawn = comparison_figures.of_comparison(
        runs, [_read(run_dir / "diagnostics.json") for run_dir in run_dirs]
    )
    made = comparison_tables.of_comparison(runs, reference)
    words = {
        "title": title,
        "kind": "Comparison of methods",
        "summary": summary.of_comparison(runs, reference),
    }
    return _write_together(dict(zip(run_dirs, runs, strict=True)), made, drawn, directory, **words)


def write_sweep(
    key: str, values: Mapping[Path, str | None], directory: Path, title: str
) -> Written:
    """The same for runs that differ in one setting: `values` says what each run directory has; None if it is not varied."""
    runs = [_read(run_dir / "results.json") for run_dir in values]
    swept = list(zip(values.values(), runs, strict=True))
    made, drawn = sweeps.tables(key, swept), sweeps.figures(key, swept)
    words = {
        "title": title,
        "kind": "Sweep over one setting",
        "summary": summary.of_sweep(key, sweeps.points(swept)),
    }
    return _write_together(
        dict(zip(values, sweeps.named(swept), strict=True)), made, drawn, directory, **words
    )


def _write_together(
    runs: Mapping[Path, Json],
    made: Sequence[tables.Table],
    drawn: Mapping[str, Figure],
    directory: Path,
    **words: str,
) -> Written:
    """The page, the tables and the figures of several runs."""
    directory.mkdir(parents=True, exist_ok=True)
    results = list(runs.values())
    page = _page(
        **words,
        tiles=[],
        tables=made,
        pictures=_pictures(drawn),
        incidents=_incidents(results),
        facts=_grid_facts(results),
        differing=_differing(runs),
        sources=_sources(next(iter(runs))),
    )
    write_atomic(directory / "report.html", page.encode())
    _write_tables(made, directory)
    return Written(directory / "report.html", figure_style.save(drawn, directory / "figures"))


def _write_tables(made: Sequence[tables.Table], directory: Path) -> None:
    """The same tables as tables.md, tables.tex and tables.csv."""
    write_atomic(directory / "tables.md", "\n".join(map(table_formats.markdown, made)).encode())
    write_atomic(directory / "tables.tex", "\n".join(map(table_formats.latex, made)).encode())
    write_atomic(directory / "tables.csv", table_formats.comma_separated(made).encode())


def _page(**parts: Any) -> str:
    """Fill the template; whatever is not marked as safe is escaped, and a missing part is an error."""
    loader = PackageLoader("fedbnn.report", ".")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("report.html").render(version=__version__, **parts)


def _read(path: Path) -> dict[str, Any]:
    """A JSON file of a run directory."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        fix = "finish the run first: python train.py --config ... with the same run directory"
        raise RunDirectoryError(
            f"no {path.name} that can be read", str(path.parent), fix
        ) from error
    return dict(found)


def _pictures(drawn: Mapping[str, Figure]) -> list[Picture]:
    return [
        Picture(
            name,
            Markup(figure_style.inline_svg(figure, name.replace("_", " "))),
            CAPTIONS[name],
            name in WIDE,
        )
        for name, figure in drawn.items()
    ]


def _tiles(results: Json) -> list[Tile]:
    """The four numbers a reader looks for first."""
    tiles = []
    for regime, spoken in tables.SPOKEN.items():
        value, floor = (
            tables.Cell(part["avg_fin"]).text()
            for part in (results[regime], results["chance"][regime])
        )
        tiles.append(Tile(f"{value} %", f"{spoken} accuracy at the end", f"chance: {floor} %"))
    lost = tables.Cell(results["class_agnostic"]["forgetting"]).text()
    error = tables.Cell(results["ece"], digits=3).text()
    tiles.append(Tile(lost, "points forgotten", "class-agnostic; less is better"))
    tiles.append(Tile(error, "calibration error (ECE)", "class-agnostic; 0 is perfect"))
    return tiles


def _incidents(runs: Sequence[Json]) -> list[dict[str, Any]]:
    """Refused updates and failed clients of all runs, the first ones."""
    words = {"refused": "refused", "failed": "no answer"}
    found = [
        {"run": f"{run['method']}-{run['seed']}", **one, "what": f"{word}: {one['reason']}"}
        for run in runs
        for kind, word in words.items()
        for one in run[kind]
    ]
    return sorted(found, key=lambda one: (one["run"], one["round"]))[:MOST_INCIDENTS]


def _facts(results: Json) -> dict[str, str]:
    """The plain facts of a run."""
    facts = {
        "scenario": results["scenario"],
        "method": results["method"],
        "seed": str(results["seed"]),
        "rounds": f"{results['rounds_done']} of {results['rounds']}",
        "time": f"{results['seconds']:.1f} s",
        "communication": f"{results['bytes_up'] / 1e6:.1f} MB up, {results['bytes_down'] / 1e6:.1f} MB down",
    }
    return facts | (
        {"stored images": str(results["replay_images"])} if results["replay_images"] else {}
    )


def _grid_facts(runs: Sequence[Json]) -> dict[str, str]:
    """The plain facts of a comparison."""
    seeds = sorted({run["seed"] for run in runs})
    return {
        "scenario": ", ".join(dict.fromkeys(run["scenario"] for run in runs)),
        "methods": ", ".join(tables.by_method(runs)),
        "seeds": ", ".join(map(str, seeds)),
        "rounds": str(runs[0]["rounds"]),
        "time": f"{sum(run['seconds'] for run in runs):.0f} s for all runs together",
    }


def _differing(runs: Mapping[Path, Json]) -> config_differences.Differences:
    """The settings that differ between the methods, as the first run of each has them."""
    first: dict[str, Path] = {}
    for run_dir, run in runs.items():
        first.setdefault(run["method"], run_dir / "config.yaml")
    return config_differences.between(
        {method: yaml.read(path) for method, path in first.items() if path.exists()}
    )


def _sources(run_dir: Path) -> dict[str, str]:
    """Configuration and environment, as they stand in the run directory, under its name."""
    run = run_dir.resolve().name
    files = {
        f"Configuration of {run} (config.yaml)": "config.yaml",
        f"Environment of {run} (env.json)": "env.json",
    }
    return {
        label: (run_dir / name).read_text(encoding="utf-8")
        for label, name in files.items()
        if (run_dir / name).exists()
    }
