"""`fedbnn expel RUN --client K --from_round R`: a run as if K had not been asked since round R.

What a client taught the model is also in what the others sent afterwards: they started from it. So
nothing is subtracted: the new run begins with the state that was committed before round R, as the
ledger has it, and asks everybody else again. It is, bit for bit, a run with

    stream: {expelled: [[K, R]]}

from its first round on, but for the noise of private clients, who pay for both runs: what the old
one asked of them stands in the account of the new one. Rounds before the oldest that
`ledger.keep_rounds` kept cannot be undone so; `--anew` plays all of them again from the seed, which
comes to the same.
"""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from jsonargparse.typing import NonNegativeInt, PositiveInt

from fedbnn.cli import train
from fedbnn.cli.compose import compose
from fedbnn.cli.main import Arguments
from fedbnn.config.parse import Parsed
from fedbnn.errors import RunDirectoryError
from fedbnn.federation import experiment
from fedbnn.storage import run_dir
from fedbnn.storage.ledger import EVERY, Ledger, rounds


def main(argv: Sequence[str]) -> int:
    """Branch off before the round, without the client, and play on."""
    options = _options(argv)
    source = run_dir.find(str(options.run_dir), train.RUNS)
    out = options.out or _free(source, options.client)
    if not _took_part(source, options.client, options.from_round):
        since = f"client {options.client} took no part since round {options.from_round}"
        print(f"{since}: there is nothing to take back from {source}")
        return 0
    parsed = _without(source, out, options)
    first = 1 if options.anew else options.from_round
    _begin(source, out, parsed, first)
    return train.main(["--resume", str(out)])


def _options(argv: Sequence[str]) -> Namespace:
    parser = Arguments("expel", "Play a run again as if a client had not been asked since a round.")
    add, all_of_it = parser.add_argument, "play all rounds again, also where the ledger keeps them"
    add("run_dir", type=Path, metavar="RUN_DIR", help="directory of a run, finished or not")
    add("--client", type=NonNegativeInt, required=True, help="the number of the client")
    add("--from_round", type=PositiveInt, required=True, help="the first round without it")
    add("--out", type=Path, help="the new run (default: RUN_DIR-without-K)")
    add("--anew", action="store_true", help=all_of_it)
    return parser.parse_args(argv)


def _free(source: Path, client: int) -> Path:
    """The first of RUN-without-K, RUN-without-K-2, ... that is not there."""
    whole = source.resolve()
    return train.first_free(whole.with_name(f"{whole.name}-without-{client}"))


def _took_part(source: Path, client: int, first: int) -> bool:
    """Whether the client was asked in this round or a later one, as the records have it."""
    found = (record for record in run_dir.records(source) if record["round"] >= first)
    return any(client in record.get("clients", ()) for record in found)


def _without(source: Path, out: Path, options: Namespace) -> Parsed:
    """The configuration of the run without the client, and with what was left out before."""
    before = train.parse(["--config", str(source / "config.yaml")])
    gone = dict(before["stream"]["expelled"] or ())
    gone[options.client] = min(options.from_round, gone.get(options.client, options.from_round))
    words = ["--config", str(source / "config.yaml"), "--run_dir", str(out), "--beside", "[]"]
    return train.parse([*words, f"--stream.expelled={json.dumps(sorted(gone.items()))}"])


def _begin(source: Path, out: Path, parsed: Parsed, first: int) -> None:
    """A new run whose newest round is the one before `first`; from nothing if that is the first."""
    kept = rounds(source)
    if first > 1 and first - 1 not in kept:
        oldest = f"the oldest is {kept[0]}" if kept else "none is"
        what = f"round {first - 1} is not kept, {oldest}: what came since cannot be undone"
        since = f"--from_round {kept[0] + 1}, " if kept else ""
        fix = f"{since}--anew to play every round again, or ledger.keep_rounds from the start"
        raise RunDirectoryError(what, str(source / "state"), fix)
    with Ledger(source, EVERY) as then, Ledger(out) as ledger:
        _go_on_spending(then, ledger, first)
        experiment.start(ledger, parsed.values)
        if first > 1:
            ledger.branch(then, first - 1)


def _go_on_spending(then: Ledger, ledger: Ledger, first: int) -> None:
    """Private clients are asked again: the new account has what the old run asked of them."""
    before = train.parse(["--config", str(then.run_dir / "config.yaml")])
    run_dir.resume(then, before.values, experiment.MAY_DIFFER)
    if before.build("privacy").on:
        made = compose(before, then.run_dir)
        if account := experiment.budget(made, then, run_dir.reconcile(then)):
            account.branch(ledger.root, first)
