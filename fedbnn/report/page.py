"""report.html, the figures and the tables of runs: a run is a comparison of one.

The page needs no other file, and is clean in light and dark, on a phone and on paper.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, TemplateError
from markupsafe import Markup
from matplotlib.figure import Figure

from fedbnn import __version__
from fedbnn.config import yaml
from fedbnn.errors import RunDirectoryError, called
from fedbnn.machine import postponed
from fedbnn.report import figures, style, tables, words
from fedbnn.report.values import Cell, Results, Runs, Table, Varied
from fedbnn.storage.files import TEXT, Damaged, read, read_json, write_atomic, writing
from fedbnn.storage.run_dir import flat, intact, sealed_again

OWN = ("seed", "run_dir", "report", "method.name", "track.group", "track.name")
"""Settings that every run has of its own, and nobody needs to be told."""
MOST_INCIDENTS = 50
SAID = {"–": "--", "−": "$-$", "±": r"$\pm$", "\\": r"\textbackslash{}"}
SAID |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX = str.maketrans({letter: rf"\{letter}" for letter in "_%&#${}"} | SAID)
UNFIT = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)


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
    pictures: bool = True,
) -> Written:
    """Write report.html and figures/ of finished runs on one stream, and of several their tables.

    `sweep` says which setting the runs differ in, and how. A run's own title is its default. In
    the page, what is not marked as safe is escaped, and a missing part is an error. The page has
    its figures within: without `pictures` they are not drawn again as files.
    """
    runs = list(map(results_of, run_dirs))
    with _shown(run_dirs), postponed():
        page, made, drawn = _made(runs, run_dirs, title, reference, sweep)
    texts = {"report.html": page, **_tables(made)}
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_atomic(directory / name, text.encode())
        saved = style.save(drawn if pictures else {}, directory / "figures")
    others = [path.with_suffix(".pdf") for path in saved]
    sealed_again(directory, [*(directory / name for name in texts), *saved, *others])
    return Written(directory / "report.html", saved)


def _made(
    runs: Runs,
    run_dirs: Sequence[Path],
    title: str | None,
    reference: str,
    sweep: Varied | None,
) -> tuple[str, list[Table], dict[str, Figure]]:
    """The page, the tables and the figures, in memory."""
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
    return page, made, drawn


@contextmanager
def _shown(run_dirs: Sequence[Path]) -> Iterator[None]:
    """The border to files of strangers: results that are not of our making cannot be shown."""
    try:
        yield
    except (OSError, *UNFIT, TemplateError) as error:
        what = f"the results cannot be shown: {type(error).__name__}: {error}"
        fix = "report finished runs of one stream together"
        raise RunDirectoryError(what, ", ".join(map(str, run_dirs)), fix) from error


def results_of(run_dir: Path) -> Results:
    """The results of a run, with its diagnostics, if they are as it left them."""
    intact(run_dir, "results.json", "diagnostics.json", "config.yaml", "env.json")
    try:
        found, more = (read_json(run_dir / f"{name}.json") for name in ("results", "diagnostics"))
    except Damaged as damage:
        fix = f"finish the run first: {called()} --resume {run_dir}"
        raise RunDirectoryError(f"no results: {damage}", str(run_dir), fix) from damage
    return {**found, "diagnostics": more}


def _tables(made: Sequence[Table]) -> dict[str, str]:
    """The tables of a comparison as files; one run has its table in the page alone."""
    if len(made) == 1:
        return {}
    written = {"md": map(markdown, made), "tex": map(latex, made)}
    joined = {f"tables.{kind}": "\n".join(texts) for kind, texts in written.items()}
    return {**joined, "tables.csv": comma_separated(made)}


def markdown(table: Table) -> str:
    """A pipe table under its title; the best in bold."""
    lines = [table.heads, ("---", *("---:" for _ in table.heads[1:]))]
    for row in table.rows:
        texts = (f"**{cell.text()}**" if cell.best else cell.text() for cell in row.cells)
        lines.append((row.name, *texts, *row.words))
    safe = [[part.replace("|", r"\|") for part in line] for line in lines]
    body = "\n".join(f"| {' | '.join(line)} |" for line in safe)
    notes = "".join(f"\n{note}.  " for note in table.notes)
    return f"**{table.title}**\n\n{body}\n{notes}\n"


def latex(table: Table) -> str:
    """A booktabs table; needs `\\usepackage{booktabs}`."""
    caption = _latex(". ".join([table.title, *table.notes]))
    cells = [[_latex(cell.text(), cell.best) for cell in row.cells] for row in table.rows]
    lines = [[_latex(row.name), *own] for row, own in zip(table.rows, cells, strict=True)]
    every = [list(map(_latex, table.heads)), *lines]
    head, *body = (" & ".join(line) + " \\\\\n" for line in every)
    columns = "l" + "r" * (len(table.heads) - 1)
    ruled = f"\\toprule\n{head}\\midrule\n{''.join(body)}\\bottomrule\n"
    tabular = f"\\begin{{tabular}}{{{columns}}}\n{ruled}\\end{{tabular}}"
    return f"\\begin{{table}}\n\\centering\n\\caption{{{caption}.}}\n{tabular}\n\\end{{table}}\n"


def _latex(text: str, best: bool = False) -> str:
    safe = text.translate(LATEX)
    return rf"\textbf{{{safe}}}" if best else safe


def comma_separated(made: Sequence[Table]) -> str:
    """All numbers, unrounded, one to a line: table, row, column, value, spread."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(("table", "row", "column", "value", "spread"))
    for table in made:
        for row in table.rows:
            numbers = [(cell.value, cell.spread) for cell in row.cells]
            told = [*numbers, *((word, None) for word in row.words)]
            for head, pair in zip(table.heads[1:], told, strict=True):
                writer.writerow((table.title, row.name, head, *pair))
    return written.getvalue()


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
    there = {said: read(path, TEXT) for said, path in found.items() if path.is_file()}
    return {said: text.decode(errors="replace") for said, text in there.items()}
