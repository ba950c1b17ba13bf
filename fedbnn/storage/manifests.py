"""The manifest of a committed round: every file the round needs with its sha256, and a digest of the manifest itself."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbnn.errors import RunDirectoryError
from fedbnn.storage.files import as_json
from fedbnn.wire import digest

FORMAT = 1
MANIFEST, STATE, RECORD, CLIENTS = "manifest.json", "state.safetensors", "record.json", "clients"
_ROUND = re.compile(r"round-(\d{6,})")


class Damaged(ValueError):
    """A round that cannot be used; the text says what is wrong with it."""


@dataclass(frozen=True)
class ClientFile:
    """The private state of a client as it was after a round."""

    client: int
    round: int
    sha256: str

    @property
    def name(self) -> str:
        """Its file in `state/clients`."""
        return f"{self.client}-r{self.round}.safetensors"


@dataclass(frozen=True)
class Manifest:
    """What belongs to a round: digests of its own files, and the newest file of every client seen so far."""

    round: int
    files: Mapping[str, str]
    clients: Mapping[int, ClientFile]

    def to_bytes(self) -> bytes:
        """`{"format", "body", "sha256"}`, where the digest covers format and body."""
        clients = {
            str(entry.client): [entry.round, entry.sha256] for entry in self.clients.values()
        }
        body = {"round": self.round, "files": dict(self.files), "clients": clients}
        content: dict[str, object] = {"format": FORMAT, "body": body}
        return as_json({**content, "sha256": digest(as_json(content))})

    @classmethod
    def from_bytes(cls, payload: bytes) -> "Manifest":
        """The manifest that `to_bytes` wrote; raises `Damaged`, or `RunDirectoryError` for a format of the future."""
        content = _checked(payload)
        if content["format"] != FORMAT:
            what = f"the run was written in the newer format {content['format']}, this version reads {FORMAT}"
            raise RunDirectoryError(what, fix="upgrade fedbnn to resume it")
        body = content["body"]
        clients = {
            int(name): ClientFile(int(name), number, sha256)
            for name, (number, sha256) in body["clients"].items()
        }
        return cls(body["round"], body["files"], clients)


def _checked(payload: bytes) -> dict[str, Any]:
    """The content of a manifest whose digest is right."""
    try:
        content = json.loads(payload)
        sha256 = content.pop("sha256")
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise Damaged("its manifest cannot be read") from error
    if digest(as_json(content)) != sha256:
        raise Damaged("the digest of its manifest does not match")
    return content  # type: ignore[no-any-return]


def directory_name(round: int) -> str:
    """The directory of a committed round."""
    return f"round-{round:06d}"


def rounds(root: Path) -> list[int]:
    """The rounds that have a directory, oldest first."""
    matches = (_ROUND.fullmatch(path.name) for path in (root.iterdir() if root.is_dir() else ()))
    return sorted(int(match[1]) for match in matches if match)


def peek(root: Path, round: int) -> Manifest:
    """The manifest of a round, without a look at the files it names."""
    try:
        manifest = Manifest.from_bytes((root / directory_name(round) / MANIFEST).read_bytes())
    except OSError as error:
        raise Damaged(f"{MANIFEST} cannot be read") from error
    if manifest.round != round:
        raise Damaged(f"its manifest is that of round {manifest.round}")
    return manifest


def load(root: Path, round: int) -> Manifest:
    """The manifest of a round, after every file it names has been checked; raises `Damaged` otherwise."""
    manifest = peek(root, round)
    for name, sha256 in manifest.files.items():
        verify(root / directory_name(round) / name, sha256)
    for entry in manifest.clients.values():
        verify(root / CLIENTS / entry.name, entry.sha256)
    return manifest


def verify(path: Path, sha256: str) -> None:
    """Raise `Damaged` unless the file is there and has this digest."""
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read") from error
    if found != sha256:
        raise Damaged(f"the digest of {path.name} does not match")
