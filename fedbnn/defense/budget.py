"""How much of a client's privacy is spent, round by round, and when a run must stop.

The records of a run say who took part, and its seed does too, so nothing is gained here from who
might have been asked: no amplification by sampling is claimed. A client that answered T questions
took part in T Gaussian mechanisms of multiplier z, and epsilon is that of the client asked most,

    epsilon = min over a > 1 of  T a / (2 z^2) + log((a - 1) / a) - (log delta + log a) / (a - 1)

by Renyi accounting of opacus (Mironov, 2017; Balle et al., 2020), the only library in here that
knows privacy. A round that is begun again after a crash asks its clients again: every attempt is
written to `state/privacy.json` before it begins, counts, and has noise of its own. That file also
holds the key from which the noise of the server follows: whoever reads it can take the noise away.

A run cannot forget what it spent: its records say how often each committed round was begun, the
newest manifest of the ledger how often the next one was, and a file that is gone, is none of ours
or has less is refused. A run that branches off from another (`fedbnn expel`) has asked `before`
what the other one asked in the rounds that are played again.
"""

import hashlib
import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbnn.defense.privacy import Privacy
from fedbnn.errors import PrivacyError, RunDirectoryError
from fedbnn.storage import files

FILE, LOST = "privacy.json", "restore it from a copy, or start a new run"
KEY, ROUNDING = re.compile("[0-9a-f]{64}"), 1e-6
ORDERS = [1 + 10 ** (place / 50) for place in range(-200, 201)]


def epsilon(noise: float, questions: int, delta: float) -> float:
    """What so many questions with noise of this multiplier spend."""
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(noise, 1.0, questions)]
    return float(accountant.get_epsilon(delta, alphas=ORDERS))


def _write(path: Path, key: str, begun: Mapping[int, int], before: Mapping[int, int]) -> None:
    """Keep an account, for nobody else to read."""
    files.write_atomic(path, json.dumps({"key": key, "begun": begun, "before": before}).encode())
    os.chmod(path, 0o600)


def _times(record: Mapping[str, Any]) -> int:
    """How often the round of a record was begun; once, at least."""
    match record.get("privacy"):
        case {"begun": int(times)}:
            return max(1, times)
    return 1


def _counts(found: Mapping[str, Any], least: int) -> Counter[int]:
    """Whole numbers from `least` on, by round (from 1) or by client (from 0)."""
    if not all(name.isdecimal() and int(name) >= least for name in found):
        raise ValueError("a name that is no number")
    if not all(type(times) is int and times >= 1 for times in found.values()):
        raise ValueError("a count below 1, or none")
    return Counter({int(name): times for name, times in found.items()})


@dataclass
class Budget:
    """The account of a run: how many questions are `asked` of whom in a round.

    `committed` are the records of the rounds that the ledger has, and it counts how often the round
    after them was `begun`; `begins` tells it of one more.
    """

    privacy: Privacy
    root: Path
    asked: Callable[[int], Mapping[int, int]]
    committed: Sequence[Mapping[str, Any]] = ()
    begun: int = 0
    begins: Callable[[], None] = lambda: None
    _begun: Counter[int] = field(default_factory=Counter)
    _before: Counter[int] = field(default_factory=Counter)
    _key: str = ""

    def __post_init__(self) -> None:
        if (path := self.root / FILE).exists():
            self._read(path)
        elif self.committed:
            what = f"the account of privacy is gone, but {len(self.committed)} rounds were played"
            raise RunDirectoryError(what, str(path), LOST)
        for number, known in enumerate([*map(_times, self.committed), self.begun], 1):
            if (found := self._begun[number]) < known:
                what = f"round {number} was begun {known} times, the account of privacy has {found}"
                raise RunDirectoryError(what, str(path), LOST)
        self._check_spent(path)

    def _check_spent(self, path: Path) -> None:
        """The account spends no less than the newest committed round has on record."""
        match self.committed[-1:]:
            case [{"privacy": {"epsilon": float(known)}}]:
                found = self._spent(len(self.committed), self._begun) or 0.0
                if found < known * (1 - ROUNDING):
                    what = f"epsilon was {known:.4g}, the account of privacy has {found:.4g}"
                    raise RunDirectoryError(what, str(path), LOST)

    def _read(self, path: Path) -> None:
        """The account as it was written; nothing else is one."""
        try:
            kept = files.read_json(path)
            self._key = kept["key"]
            counts = [(kept["begun"], 1), (kept.get("before", {}), 0)]
            self._begun, self._before = (_counts(found, least) for found, least in counts)
            if not KEY.fullmatch(self._key):
                raise ValueError("a key of other length or letters")
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            what = f"the account of privacy is none of ours: {type(error).__name__}: {error}"
            raise RunDirectoryError(what, str(path), LOST) from error

    def begin(self, round: int) -> None:
        """Write down that a round begins; raises before one that would exceed the budget."""
        tried = self._begun + Counter([round])
        if self.privacy.epsilon is not None:
            would, most = self._spent(round, tried), self.privacy.epsilon
            if would is not None and would > most:
                before = self._spent(round - 1, self._begun) or 0.0
                what = f"round {round} would spend epsilon {would:.4g}, the budget is {most:g}"
                kept = f"stopped at {before:.4g}; the rounds before it are kept"
                raise PrivacyError(what, "privacy.epsilon", kept)
        self._begun, self._key = tried, self._key or secrets.token_hex(32)
        _write(self.root / FILE, self._key, tried, self._before)
        self.begins()

    def branch(self, root: Path, first: int) -> None:
        """Open the account of a run that plays the rounds from `first` on again, with a new key."""
        if (path := root / FILE).exists():
            what = "there is an account of privacy already"
            raise RunDirectoryError(what, str(path), "choose another directory")
        kept = {number: times for number, times in self._begun.items() if number < first}
        again = {number: times for number, times in self._begun.items() if number >= first}
        try:
            before = self._before + self._questions(again)
        except IndexError as error:
            what = f"the account of privacy is none of ours: {error}"
            raise RunDirectoryError(what, str(self.root / FILE), LOST) from error
        _write(path, secrets.token_hex(32), kept, before)

    def _questions(self, begun: Mapping[int, int]) -> Counter[int]:
        """How many questions each client was asked in rounds that were begun so often."""
        asked = Counter[int]()
        for number, times in begun.items():
            for client, questions in self.asked(number).items():
                asked[client] += times * questions
        return asked

    def _spent(self, round: int, begun: Mapping[int, int]) -> float | None:
        """Epsilon of the client asked most in rounds 1..r; infinite, as None, without noise."""
        if not self.privacy.noise:
            return None
        rounds = {number: begun.get(number, 1) for number in range(1, round + 1)}
        most = max((self._before + self._questions(rounds)).values(), default=0)
        return epsilon(self.privacy.noise, most, self.privacy.delta) if most else 0.0

    def record(self, round: int) -> dict[str, float | None]:
        """What is spent after a round, for its record."""
        spent, times = self._spent(round, self._begun), self._begun[round]
        return {"epsilon": spent, "delta": self.privacy.delta, "begun": times}

    def seed(self, round: int, exchange: str) -> int:
        """The seed of the server's noise in this attempt at an exchange."""
        text = f"{self._key}/{round}/{exchange}/{self._begun[round]}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
