"""The search behind results/tuning.md: trials of one configuration on the validation split.

    python results/search.py --data_dir data --jobs 2 results/trials.txt

Every line of the trials file is a name and settings (`fedprox method=fedprox method.mu=0.1`). The
class posteriors do not change how a backbone or a row is trained, so each trial is trained once and
both heads are read off it. Trials that are in results/tuning.json already, with the same name,
configuration and settings, are not run again; to make the whole search again, give it a file of its
own (`--found again.json`). The table stands beside that file (`again_table.md`).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

HERE = Path(__file__).resolve().parent


def trial(words: list[str]) -> dict:
    """Train one trial in this process; its averages with both heads."""
    from fedbnn.cli.compose import compose
    from fedbnn.cli.train import parse
    from fedbnn.federation import experiment

    with tempfile.TemporaryDirectory() as folder:
        found = experiment.run(compose(parse(words), Path(folder) / "run"))
    keep = ("avg_ts", "avg_fin", "fin", "nll", "ece")
    heads = {
        head: {
            regime: {key: one[regime][key] for key in keep}
            for regime in ("task_aware", "class_agnostic")
        }
        for head, one in (("gaussian", found), ("linear", found["linear"]))
    }
    return {"seconds": found["seconds"], **heads}


def run(asked: dict, options: argparse.Namespace) -> dict:
    """One trial in a process of its own; what was asked and what was found."""
    pairs = dict(asked["settings"])
    method = pairs.pop("method")
    fixed = {"stream.data_dir": options.data_dir, "stream.validation": "true", "track.wandb": "off"}
    fixed |= {"evaluate.every": "0", "evaluate.both_heads": "true"}
    words = ["--config", options.config, "--method", method, "--head", "gaussian"]
    words += [word for key, value in {**fixed, **pairs}.items() for word in (f"--{key}", value)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, __file__, "--trial", json.dumps(words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    result = (
        json.loads(done.stdout.splitlines()[-1])
        if done.returncode == 0
        else {"failed": done.stderr.strip()[-300:]}
    )
    return {**asked, **result}


def wanted(trials: Path, config: str) -> list[dict]:
    """The trials of a file; one is known by its name, configuration and settings together."""
    lines = [
        line.split()
        for line in trials.read_text().splitlines()
        if line.strip() and not line.startswith("#")
    ]
    return [
        {
            "trial": name,
            "config": Path(config).stem,
            "settings": dict(word.split("=", 1) for word in words),
        }
        for name, *words in lines
    ]


def add(entry: dict, found: Path) -> None:
    """Append one finding, whole."""
    entries = [*known(found), entry]
    aside = found.with_suffix(".new")
    aside.write_text(json.dumps(entries, indent=1) + "\n")
    shutil.move(aside, found)
    write_table(entries, found.with_name(f"{found.stem}_table.md"))
    print(json.dumps(entry), flush=True)


def known(found: Path) -> list[dict]:
    """What was found so far."""
    return json.loads(found.read_text()) if found.exists() else []


def write_table(entries: list[dict], file: Path) -> None:
    """One line per trial, in the order in which they were found."""
    regimes = "aware TS / Fin | agnostic TS / Fin"
    heads = f"| config | trial | settings | linear: {regimes} | gaussian: {regimes} | s |"
    lines = [heads, "|---|---|---|---|---|---|---|---|"]
    for one in entries:
        if "failed" in one:
            continue
        cells = [
            f"{one[head][regime]['avg_ts']:.2f} / {one[head][regime]['avg_fin']:.2f}"
            for head in ("linear", "gaussian")
            for regime in ("task_aware", "class_agnostic")
        ]
        settings = " ".join(f"{key}={value}" for key, value in one["settings"].items())
        known_by = f"{one['config']} | {one['trial']} | `{settings}`"
        lines.append(f"| {known_by} | {' | '.join(cells)} | {one['seconds']:.0f} |")
    file.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Run the trials that are not known yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trials", nargs="?", type=Path)
    parser.add_argument("--config", default=str(HERE.parent / "conf/cifar100_ci_fast.yaml"))
    parser.add_argument("--data_dir", default="data")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--found", type=Path, default=HERE / "tuning.json")
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trial:
        print(json.dumps(trial(json.loads(options.trial))))
        return
    done = [
        {key: one[key] for key in ("trial", "config", "settings")} for one in known(options.found)
    ]
    new = [asked for asked in wanted(options.trials, options.config) if asked not in done]
    with ThreadPoolExecutor(options.jobs) as pool:
        for ended in as_completed([pool.submit(run, asked, options) for asked in new]):
            add(ended.result(), options.found)


if __name__ == "__main__":
    main()
