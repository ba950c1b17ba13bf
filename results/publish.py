"""A comparison of a protocol, published: its tables here, and a short one in results/README.md.

    python results/publish.py cifar100_ci_fast

It takes what `python results/protocol.py results/protocols/cifar100_ci_fast.yaml` has left in
runs/protocol-cifar100_ci_fast/table: tables.md, tables.csv and the picture of the averages go to
results/cifar100_ci_fast/. Between the lines `<!-- table: cifar100_ci_fast -->` and
`<!-- end of the table -->` of results/README.md it writes the averages at both moments, forgetting
and calibration, and the paired differences at the end of the run, with the commit of the runs.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

HERE = Path(__file__).parent
TABLES = ("tables.md", "tables.csv", "figures/averages.png")
Cells = dict[str, dict[str, str]]
"""A table by row and column, as its cells are written."""
AVERAGES = "Averages over the tasks, in percent"
PAIRED = "Paired differences against fedbnn"
ERRORS = "Calibration at the end, class-agnostic"
HEADS = (
    *("method", "task-aware, @TS / @Fin", "class-agnostic, @TS / @Fin"),
    *("forgetting, agnostic", "NLL, ECE, agnostic", "FedBNN less this @Fin, aware / agnostic"),
)
END = "<!-- end of the table -->"


def read(text: str) -> dict[str, Cells]:
    """The tables of a page of tables, by their titles."""
    found: dict[str, Cells] = {}
    title, heads = "", list[str]()
    for line in text.splitlines():
        if line.startswith("**") and line.endswith("**"):
            title, heads = line.strip("*"), []
        elif line.startswith("| ---") or not line.startswith("| "):
            continue
        elif not heads:
            heads = _cells(line)
        else:
            name, *values = _cells(line)
            found.setdefault(title, {})[name] = dict(zip(heads[1:], values, strict=False))
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def summary(tables: dict[str, Cells]) -> list[str]:
    """One line a method: what it reaches, forgets and says of it, and how far it is from FedBNN."""
    lines, regimes = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"], ("aware", "agnostic")
    for name, average in tables[AVERAGES].items():
        accuracies = [_pair(average, f"{regime} @TS", f"{regime} @Fin") for regime in regimes]
        errors = _pair(tables[ERRORS].get(name, {}), "NLL", "ECE", ", ")
        method = name.partition(" [")[0]
        apart = tables.get(PAIRED, {}).get(f"fedbnn − {method}", {})
        differences = _pair(apart, "aware @Fin", "agnostic @Fin")
        lost = average.get("agnostic forgetting", "–")
        lines.append(f"| {' | '.join([name, *accuracies, lost, errors, differences])} |")
    return lines


def _pair(row: dict[str, str], first: str, second: str, between: str = " / ") -> str:
    """Two cells of a row in one; nothing where the row has neither."""
    return between.join(row[name] for name in (first, second) if name in row)


def commits(folder: Path) -> str:
    """The sources that the runs of a comparison were made with."""
    cards = sorted(folder.glob("*-s*/env.json"))
    found = dict.fromkeys(str(json.loads(card.read_text())["commit"])[:7] for card in cards)
    return ", ".join(found)


def command(name: str, tables: dict[str, Cells]) -> str:
    """What made these tables; methods are named where a protocol has more."""
    file = f"results/protocols/{name}.yaml"
    asked = [*yaml.safe_load((HERE / "protocols" / f"{name}.yaml").read_text())["methods"]]
    compared = {row.partition(" [")[0] for row in tables[AVERAGES]}
    played = [method for method in asked if method in compared]
    some = f" --methods {','.join(played)}" if played != asked else ""
    return f"python results/protocol.py {file} --data_dir data{some}"


def between(page: str, name: str, lines: Sequence[str]) -> str:
    """The page with these lines as the table of this name."""
    begin = f"<!-- table: {name} -->"
    before, found, rest = page.partition(begin)
    _, end, after = rest.partition(END)
    if not found or not end:
        sys.exit(f"results/README.md has no place for a table: {begin} and {END}")
    return "\n".join([before + begin, "", *lines, "", end + after])


def main() -> None:
    """Copy the tables, and write the short one into the page."""
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("names", nargs="+", metavar="NAME", help="protocols that have been played")
    for name in parser.parse_args().names:
        folder = Path(f"runs/protocol-{name}/table")
        for part in TABLES:
            (HERE / name / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / part, HERE / name / part)
        tables = read((folder / "tables.md").read_text())
        lines = [*summary(tables), "", f"`{command(name, tables)}`, commit {commits(folder)}"]
        page = HERE / "README.md"
        page.write_text(between(page.read_text(), name, lines))
        print(f"{name}: {page}")


if __name__ == "__main__":
    main()
