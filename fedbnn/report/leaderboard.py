"""One board of finished runs: what every method reaches on every stream, and what it takes.

Runs of one method on one stream that differ in nothing but the seed are one line. A stream has a
table of its own: numbers of different streams are not to be compared.

A page with a board keeps the runs it was made of beside it, a line each in leaderboard.jsonl: runs
that are made on several machines, or gone, stay on it until the same run is made again.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedbnn.config import yaml
from fedbnn.errors import RunDirectoryError
from fedbnn.evaluation.evaluate import REGIMES
from fedbnn.report import page, tables
from fedbnn.report.values import Path as Place
from fedbnn.report.values import Results, Runs, Table, at, by_method
from fedbnn.storage.files import Damaged, below, read, read_json, write_atomic
from fedbnn.storage.run_dir import flat

COLUMNS: dict[str, Place] = {
    "aware @TS": ("task_aware", "avg_ts"),
    "aware @Fin": ("task_aware", "avg_fin"),
    "agnostic @TS": ("class_agnostic", "avg_ts"),
    "agnostic @Fin": ("class_agnostic", "avg_fin"),
    "forgetting": ("class_agnostic", "forgetting"),
    "ECE": ("class_agnostic", "ece"),
    "MB": ("costs", "MB"),
    "seconds": ("costs", "seconds"),
}
WORDS = ("seeds", "stored images", "told boundaries", "commit", "command")
WHERE = (
    *("track", "engine", "beside", "report"),
    *("stream.data_dir", "stream.cache_dir", "stream.download"),
)
PATHS = ("run_dir", "stream.data_dir", "stream.cache_dir")
"""Where things lie on one machine, which no other need know."""
NOTES = (
    "forgetting and ECE are class-agnostic",
    f"calibration errors are {tables.POOLED}",
    "MB: up and down, of a whole run",
    "seconds: only of runs that had the machine for themselves",
)
BEGIN, END = "<!-- leaderboard -->", "<!-- end of the leaderboard -->"
"""Between these two lines of a Markdown file stands its board."""
HEAD = "head.name"
KEPT = ("scenario", "method", "seed", "replay_images", "notes")
"""Of the results, as they are."""
Commands = Callable[[str, Runs], str]


def find(places: Sequence[Path]) -> list[Path]:
    """The finished runs at these places and below them."""
    everything = sorted(path for place in places for path in below(place))
    found = [path.parent for path in everything if path.name == "results.json"]
    if not found:
        fix = "give directories of finished runs, or directories that hold them"
        raise RunDirectoryError("no finished run", ", ".join(map(str, places)), fix)
    return list(dict.fromkeys(found))


def write(run_dirs: Sequence[Path], where: Path, command: Commands) -> Path:
    """leaderboard.md and leaderboard.csv of finished runs; `command` says how to repeat a line.

    If `where` is a Markdown file, the board goes between its two marks, whatever is around them,
    with the runs that it had before and that were not made again.
    """
    cards, page_of_ours = [card(run_dir) for run_dir in run_dirs], where.suffix == ".md"
    file = where if page_of_ours else where / "leaderboard.md"
    memory = file.with_name("leaderboard.jsonl")
    if page_of_ours:
        cards = merged(_remembered(memory), cards)
    made = boards(cards, command)
    board = "\n".join(map(page.markdown, made))
    text = _between_marks(file, board) if page_of_ours else board
    file.parent.mkdir(parents=True, exist_ok=True)
    if page_of_ours:
        write_atomic(memory, "".join(f"{json.dumps(one)}\n" for one in cards).encode())
    write_atomic(file, text.encode())
    write_atomic(file.with_name("leaderboard.csv"), page.comma_separated(made).encode())
    return file


def card(run_dir: Path) -> Results:
    """What a board needs to know of a run: numbers, settings, the source it was made with."""
    run, config = page.results_of(run_dir), yaml.read(run_dir / "config.yaml")
    known = {**run, "costs": _costs(run)}
    kept = {name: run[name] for name in KEPT}
    numbers: dict[str, dict[str, Any]] = {}
    for regime, name in COLUMNS.values():
        numbers.setdefault(str(regime), {})[str(name)] = at(known, regime, name)
    chance = {regime: {"avg_ts": at(run, "chance", regime, "avg_ts")} for regime in REGIMES}
    said = {key: value for key, value in flat(config) if key not in PATHS}
    where = {"directory": run_dir.name, "commit": _commit(run_dir), "config": said}
    return {**kept, **numbers, "chance": chance, **where}


def merged(before: Runs, now: Runs) -> list[Results]:
    """The runs of a board: those made again take the places of the old ones, new ones follow."""
    return [*{_identity(one): one for one in (*before, *now)}.values()]


def _identity(one: Results) -> tuple[str, ...]:
    """A run by its stream, its method, its seed and the settings that change its result."""
    settings = (f"{key}={value}" for key, value in sorted(_settings(one).items()))
    return str(one["scenario"]), str(one["method"]), str(one["seed"]), *settings


def _remembered(memory: Path) -> list[Results]:
    """The runs that a board was made of before; none if it has no memory yet."""
    if not memory.exists():
        return []
    try:
        found = [json.loads(line) for line in read(memory).decode().splitlines()]
        unknown = [one for one in found if not {*KEPT, "config", "commit"} <= one.keys()]
    except (Damaged, ValueError, AttributeError) as error:
        unknown = [error]
    if unknown:
        fix = "move it away; the board is then made of the runs at hand"
        raise RunDirectoryError("not the runs of a board", str(memory), fix)
    return found


def _between_marks(file: Path, board: str) -> str:
    """The text of a file with this board in the place of the one it has."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        what, fix = "no place for a board", f"put the lines {BEGIN} and {END} where it belongs"
        raise RunDirectoryError(what, str(file), fix)
    return f"{before}{begin}\n\n{board}\n{end}{after}"


def boards(cards: Iterable[Results], command: Commands) -> list[Table]:
    """A table for each stream, the best line first."""
    streams: dict[str, list[Results]] = {}
    for one in cards:
        streams.setdefault(one["scenario"], []).append(one)
    return [_board(stream, _labelled(runs), command) for stream, runs in streams.items()]


def _costs(run: Results) -> Mapping[str, float | None]:
    sent = (run["bytes_up"] + run["bytes_down"]) / 1e6
    return {"MB": sent, "seconds": run["seconds"] if run.get("quiet") else None}


def _labelled(runs: Runs) -> list[Results]:
    """The runs; where one method stands with several settings, they follow its name."""
    found: list[Results] = []
    for method, mine in by_method(runs).items():
        settings = [_settings(run) for run in mine]
        for run, own in zip(mine, settings, strict=True):
            said = ", ".join(f"{_short(key)} {own.get(key, '–')}" for key in _varied(own, settings))
            name = f"{method} ({said})" if said else method
            found.append({**run, "base": method, "method": name})
    return found


def _varied(own: Mapping[str, str], settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Settings that differ among runs of a method; those of a head, among runs with that head."""
    same = [one for one in settings if one.get(HEAD) == own.get(HEAD)]

    def differs(key: str) -> bool:
        among = same if key.startswith("head.") and key != HEAD else settings
        return len({one.get(key) for one in among}) > 1

    return [key for key in dict.fromkeys(key for one in settings for key in one) if differs(key)]


def _short(key: str) -> str:
    """A setting without its section; a head by its section."""
    return key.partition(".")[0] if key == HEAD else key.rpartition(".")[2]


def _settings(run: Results) -> dict[str, str]:
    """Settings that change the result, without the seed."""
    skip = (*page.OWN, *WHERE)
    pairs = run["config"].items()
    return {k: str(v) for k, v in pairs if not f"{k}.".startswith(tuple(f"{s}." for s in skip))}


def _board(stream: str, runs: Runs, command: Commands) -> Table:
    """The lines of one stream, highest class-agnostic accuracy at the end first."""
    grouped = by_method(runs)
    table = tables.by_columns(f"{stream}, in percent", runs, COLUMNS)
    height = table.heads.index("agnostic @Fin") - 1
    rows = [
        replace(row, words=_words(mine, command))
        for row, mine in zip(table.rows, grouped.values(), strict=True)
    ]
    rows.sort(key=lambda row: -(row.cells[height].value or 0.0))
    notes = (*table.notes, tables.EXPLAINED, *NOTES)
    return Table(table.title, (*table.heads, *WORDS), tuple(rows), notes)


def _words(runs: Runs, command: Commands) -> tuple[str, ...]:
    """What stands behind a line: seeds, images of the past, hints, the source, how to repeat it."""
    first = runs[0]
    seeds = ", ".join(str(run["seed"]) for run in sorted(runs, key=lambda run: run["seed"]))
    told = first["notes"].get("consolidation") == "at task ends"
    commits = dict.fromkeys(str(run["commit"]) for run in runs)
    stored, hints = str(first["replay_images"]), "yes" if told else "no"
    return seeds, stored, hints, ", ".join(commits), f"`{command(first['base'], runs)}`"


def _commit(run_dir: Path) -> str:
    """The source a run was made with, short; with a star if it was changed."""
    commit = "–"
    with suppress(Damaged):
        commit = str(read_json(run_dir / "env.json").get("commit") or commit)
    return commit[:7] + ("*" if commit.endswith("-dirty") else "")
