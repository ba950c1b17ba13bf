"""In the place of a worker: begins as it should, then says what the configuration has for a client.

`python hostile.py PARENT`, with the connection as stdin. It imports nothing large.
"""

import json
import os
import struct
import time
from multiprocessing.connection import Connection

PARENT = Connection(0)
WORK = {"seconds": 1.0, "inner": 0.5, "loss": 0.25}


def say(*parts: object) -> None:
    """Messages as a worker sends them: bytes as they are, all else as JSON."""
    for part in parts:
        PARENT.send_bytes(part if isinstance(part, bytes) else json.dumps(part).encode())


def raw(data: bytes) -> None:
    """Bytes that need not be a message."""
    os.write(0, data)


def honest(client: int) -> None:
    say(["result", client, WORK, 2, None], b"ok")


def another_client(client: int) -> None:
    honest(client + 1)


def not_json(client: int) -> None:
    say(b'["result", ')


def nested(client: int) -> None:
    say(b"[" * 60_000)


def unknown_kind(client: int) -> None:
    say(["hello", client])


def no_table(client: int) -> None:
    say({"client": client})


def missing_fields(client: int) -> None:
    say(["result", client, WORK])


def wrong_types(client: int) -> None:
    say(["result", client, {**WORK, "inner": "0.5"}, 2, None], b"ok")


def no_number(client: int) -> None:
    say(["result", client, {**WORK, "loss": float("nan")}, 2, None], b"ok")


def endless_seconds(client: int) -> None:
    """Two of these are infinite, and no results can be made of that."""
    say(["result", client, {**WORK, "inner": 1.7e308}, 2, None], b"ok")


def endless_loss(client: int) -> None:
    say(["result", client, {**WORK, "loss": -1.7e308}, 2, None], b"ok")


def done_before_it_began(client: int) -> None:
    say(["result", client, {**WORK, "seconds": -1.0}, 2, None], b"ok")


def negative_size(client: int) -> None:
    say(["result", client, WORK, -2, None], b"ok")


def less_than_announced(client: int) -> None:
    say(["result", client, WORK, 20, None], b"ok")


def more_than_announced(client: int) -> None:
    say(["result", client, WORK, 2, None], b"okay" * 1000)


def long_head(client: int) -> None:
    say(b'"' + b" " * 2**20 + b'"')


def endless_head(client: int) -> None:
    raw(struct.pack("!i", -1) + struct.pack("!Q", 2**60) + b"x")
    time.sleep(600)


def another_language(client: int) -> None:
    raw(b"\xff" * 100_000)


def too_large(client: int) -> None:
    say(["result", client, WORK, 2**40, None])
    time.sleep(600)


def too_large_private(client: int) -> None:
    say(["result", client, WORK, 2, 2**40], b"ok")
    time.sleep(600)


def drip(client: int) -> None:
    raw(struct.pack("!i", 10_000))
    while True:
        raw(b"x")
        time.sleep(0.01)


def deaf(client: int) -> None:
    time.sleep(600)


def flood(client: int) -> None:
    for _ in range(20):
        honest(client)
    time.sleep(600)


def hang_up(client: int) -> None:
    os.close(0)
    time.sleep(600)


def unheard(client: int) -> None:
    """Somebody else holds the connection open when the worker is dead."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(20)
    time.sleep(600)


def main() -> None:
    """Answer clients in the ways the configuration says."""
    ways = json.loads(PARENT.recv_bytes())["config"]
    say(*ways.get("begin", [{"ready": True}]))
    while True:
        head = json.loads(PARENT.recv_bytes())
        for name in ("instruction", "private"):
            if head[name]:
                PARENT.recv_bytes()
        globals()[ways.get(str(head["client"]), "honest")](head["client"])


if __name__ == "__main__":
    main()
