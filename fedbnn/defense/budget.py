"""How much of a client's privacy is spent, round by round, and when a run must stop.

The records of a run say who took part, and its seed does too, so nothing is gained here from who
might have been asked: no amplification by sampling is claimed. A client that answered T questions
took part in T Gaussian mechanisms of multiplier z, and epsilon is that of the client asked most,

    epsilon = min over a > 1 of  T a / (2 z^2) + log((a - 1) / a) - (log delta + log a) / (a - 1)

by Renyi accounting of opacus (Mironov, 2017; Balle et al., 2020), the only library in here that
knows privacy. A round that is begun again after a crash asks its clients again: every attempt is
written to `state/privacy.json` before it begins, counts, and has noise of its own. That file also
holds the key from which the noise of the server follows: whoever reads it can take the noise away.
"""

import hashlib
import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedbnn.defense.privacy import Privacy
from fedbnn.errors import PrivacyError
from fedbnn.storage import files

FILE = "privacy.json"
ORDERS = [1 + 10 ** (place / 50) for place in range(-200, 201)]


def epsilon(noise: float, questions: int, delta: float) -> float:
    """What so many questions with noise of this multiplier spend."""
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(noise, 1.0, questions)]
    return float(accountant.get_epsilon(delta, alphas=ORDERS))


@dataclass
class Budget:
    """The account of a run: how many questions are `asked` of whom in a round."""

    privacy: Privacy
    root: Path
    asked: Callable[[int], Mapping[int, int]]
    _begun: dict[int, int] = field(default_factory=dict)
    _key: str = ""

    def __post_init__(self) -> None:
        if (path := self.root / FILE).is_file():
            kept = json.loads(files.read(path))
            self._key = str(kept["key"])
            self._begun = {int(round): int(times) for round, times in kept["begun"].items()}

    def begin(self, round: int) -> None:
        """Write down that a round begins; raises before one that would exceed the budget."""
        tried = {**self._begun, round: self._begun.get(round, 0) + 1}
        if self.privacy.epsilon is not None:
            would, most = self._spent(round, tried), self.privacy.epsilon
            if would is not None and would > most:
                before = self._spent(round - 1, self._begun) or 0.0
                what = f"round {round} would spend epsilon {would:.4g}, the budget is {most:g}"
                kept = f"stopped at {before:.4g}; the rounds before it are kept"
                raise PrivacyError(what, "privacy.epsilon", kept)
        self._begun, self._key = tried, self._key or secrets.token_hex(32)
        kept_as = {"key": self._key, "begun": {str(one): times for one, times in tried.items()}}
        path = self.root / FILE
        files.write_atomic(path, json.dumps(kept_as).encode())
        os.chmod(path, 0o600)

    def _spent(self, round: int, begun: dict[int, int]) -> float | None:
        """Epsilon of the client asked most in rounds 1..r; infinite, as None, without noise."""
        if not self.privacy.noise:
            return None
        asked = Counter[int]()
        for number in range(1, round + 1):
            for client, questions in self.asked(number).items():
                asked[client] += begun.get(number, 1) * questions
        most = max(asked.values(), default=0)
        return epsilon(self.privacy.noise, most, self.privacy.delta) if most else 0.0

    def record(self, round: int) -> dict[str, float | None]:
        """What is spent after a round, for its record."""
        return {"epsilon": self._spent(round, self._begun), "delta": self.privacy.delta}

    def seed(self, round: int, exchange: str) -> int:
        """The seed of the server's noise in this attempt at an exchange."""
        text = f"{self._key}/{round}/{exchange}/{self._begun[round]}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
