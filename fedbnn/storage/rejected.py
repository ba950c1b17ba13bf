"""Refused updates, kept as they came with the reason beside them, for a person to look at."""

from dataclasses import dataclass
from pathlib import Path

from fedbnn.storage.files import as_json, write_atomic, writing
from fedbnn.wire import digest


@dataclass(frozen=True)
class Rejected:
    """The directory `rejected/` of a run; the newest `most` payloads stay, and never more than `megabytes` of one."""

    directory: Path
    most: int = 20
    megabytes: float = 512.0

    def keep(self, round: int, exchange: str, client: int, payload: bytes, reason: str) -> None:
        """Write the bytes and the reason; nothing is ever read back by the program."""
        if not self.most:
            return
        with writing(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
        stem = f"r{round:06d}-{exchange}-client{client}-{digest(payload)[:8]}"
        facts = {
            "round": round,
            "exchange": exchange,
            "client": client,
            "bytes": len(payload),
            "reason": reason,
        }
        write_atomic(self.directory / f"{stem}.bin", payload[: int(self.megabytes * 2**20)])
        write_atomic(self.directory / f"{stem}.json", as_json(facts))
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Drop the oldest rounds' payloads beyond `most`."""
        for path in sorted(self.directory.glob("*.bin"))[: -self.most]:
            path.unlink(missing_ok=True)
            path.with_suffix(".json").unlink(missing_ok=True)
