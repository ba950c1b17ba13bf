"""Which rounds a mirror has already: the id of its run and the last round it was given, in a small file."""

import json
import secrets
from pathlib import Path

from fedbnn.storage.run_dir import write_json


class Cursor:
    """The id of the W&B run and the last round it was given, kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        kept = json.loads(path.read_text()) if path.exists() else {}
        self.id: str = kept.get("id") or secrets.token_hex(4)
        self.last: int = kept.get("last", 0)

    def renew(self) -> None:
        """Begin again under a new id, because the server does not take the old one."""
        self.id, self.last = secrets.token_hex(4), 0

    def advance(self, round: int) -> None:
        """Remember before sending: a crash in between loses a point of a curve, and doubles none."""
        self.last = round
        write_json(self._path, {"id": self.id, "last": round})
