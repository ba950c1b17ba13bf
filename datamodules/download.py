"""Fetching over a network that may not be there: short timeouts, a clear end, no half-unpacked data set."""

import http.client
import io
import socket
import sys
import urllib.error
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from fedbnn.errors import DataError

SECONDS_OF_SILENCE = 20.0


@contextmanager
def network(name: str, data_dir: Path) -> Iterator[None]:
    """Inside, a silent server is given up after some seconds; a failed download names itself and what helps."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SECONDS_OF_SILENCE)
    try:
        with _bars_on_terminals_only():
            yield
    except (OSError, EOFError, RuntimeError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        fix = "check the network and start again, or put the official files there yourself"
        raise DataError(f"{name} could not be downloaded: {error}", str(data_dir), fix) from error
    finally:
        socket.setdefaulttimeout(before)


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """Progress bars of the downloader belong on a terminal, not into a log."""
    with ExitStack() as stack:
        if not sys.stderr.isatty():
            stack.enter_context(redirect_stderr(io.StringIO()))
            stack.enter_context(redirect_stdout(io.StringIO()))
        yield


def missing(name: str, looked_for: Path) -> DataError:
    """The one line for a data set that is not there."""
    fix = "set stream.download=true, or stream.data_dir to where it is"
    return DataError(f"data set {name} is missing", f"looked for {looked_for}", fix)
