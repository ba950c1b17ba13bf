"""report.html, the figures and the tables of runs: a run is a comparison of one.

The page needs no other file, and is clean in light and dark, on a phone and on paper.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedbnn import __version__
from fedbnn.config import yaml
from fedbnn.errors import RunDirectoryError
from fedbnn.report import figures, formats, style, tables, words
from fedbnn.report.values import Cell, Results, Runs, Table, Varied
from fedbnn.storage.files import write_atomic
from fedbnn.storage.run_dir import flat

OWN = ("seed", "run_dir", "method.name", "track.group", "track.name")
"""Settings that every run has of its own, and nobody needs to be told."""
MOST_INCIDENTS = 50


@dataclass(frozen=True)
class Written:
    """Where the page and its figures are."""

    page: Path
    figures: list[Path]


def write(
    run_dirs: Sequence[Path],
    directory: Path,
    title: str | None = None,
    reference: str = tables.REFERENCE,
    sweep: Varied | None = None,
) -> Written:
    """Write report.html and figures/ of finished runs on one stream, and of several their tables.

    `sweep` says which setting the runs differ in, and how. A run's own title is its default. In
    the page, what is not marked as safe is escaped, and a missing part is an error.
    """
    runs = list(map(_run, run_dirs))
    named = sweep.named(runs) if sweep else runs
    made, drawn = tables.every(runs, reference, sweep), figures.every(runs, sweep)
    loader = PackageLoader("fedbnn.report", ".")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    page = environment.get_template("report.html").render(
        version=__version__,
        title=title or "{scenario}: {method}, seed {seed}".format(**runs[0]),
        sweep=sweep,
        runs=named,
        summary=words.summary(runs, reference, sweep),
        tables=made,
        pictures={name: Markup(style.inline_svg(one, name)) for name, one in drawn.items()},
        incidents=_incidents(named),
        cell=Cell,
        differing=_differing(dict(zip(run_dirs, named, strict=True))),
        sources=_sources(run_dirs[0]),
    )
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in {"report.html": page, **_tables(made)}.items():
        write_atomic(directory / name, text.encode())
    return Written(directory / "report.html", style.save(drawn, directory / "figures"))


def _run(run_dir: Path) -> Results:
    """The results of a run, with its diagnostics."""
    return {**_read(run_dir / "results.json"), "diagnostics": _read(run_dir / "diagnostics.json")}


def _read(path: Path) -> dict[str, Any]:
    """A JSON file of a run directory."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError) as error:
        what, where = f"no {path.name} that can be read", str(path.parent)
        fix = "finish the run first: python train.py --config ... with the same run directory"
        raise RunDirectoryError(what, where, fix) from error


def _tables(made: Sequence[Table]) -> dict[str, str]:
    """The tables of a comparison as files; one run has its table in the page alone."""
    if len(made) == 1:
        return {}
    written = {"md": map(formats.markdown, made), "tex": map(formats.latex, made)}
    joined = {f"tables.{kind}": "\n".join(texts) for kind, texts in written.items()}
    return {**joined, "tables.csv": formats.comma_separated(made)}


def _incidents(runs: Runs) -> list[dict[str, Any]]:
    """Updates that were refused or never came, then those that counted less; the first ones."""
    found = []
    for run in runs:
        said = [(one, f"refused: {one['reason']}") for one in run["refused"]]
        said += [(one, f"no answer: {one['reason']}") for one in run["failed"]]
        said += [(one, f"down-weighted: trust {one['trust']:.2f}") for one in run["down_weighted"]]
        name = f"{run['method']}-{run['seed']}"
        found += [{"run": name, **one, "what": what} for one, what in said]
    found.sort(key=lambda one: ("trust" in one, one["run"], one["round"]))
    return found[:MOST_INCIDENTS]


def _differing(runs: Mapping[Path, Results]) -> dict[str, Sequence[str]]:
    """The settings that differ between the methods, as the first run of each has them."""
    first: dict[str, Path] = {}
    for run_dir, run in runs.items():
        first.setdefault(run["method"], run_dir / "config.yaml")
    return differences({one: yaml.read(path) for one, path in first.items() if path.exists()})


def differences(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Sequence[str]]:
    """Names of the configurations, then each setting that differs; a dash where one has none."""
    texts = [
        {key: one if isinstance(one, str) else json.dumps(one) for key, one in flat(config)}
        for config in configs.values()
    ]
    keys = [key for key in dict.fromkeys(key for text in texts for key in text) if key not in OWN]
    lines = {key: [text.get(key, "–") for text in texts] for key in keys}
    varied = {key: line for key, line in lines.items() if len(set(line)) > 1}
    return {"setting": list(configs), **varied}


def _sources(run_dir: Path) -> dict[str, str]:
    """Configuration and environment, as they stand in the run directory, under its name."""
    run, files = run_dir.resolve().name, {"Configuration": "config.yaml", "Environment": "env.json"}
    found = {f"{what} of {run} ({name})": run_dir / name for what, name in files.items()}
    return {said: path.read_text(encoding="utf-8") for said, path in found.items() if path.exists()}
