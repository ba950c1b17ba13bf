"""What the commands import: nothing of a library that no run uses."""

import subprocess
import sys

LEAN = """
import sys
import fedbnn.cli.compose
import torchmetrics
assert "scipy.signal" not in sys.modules
{then}
assert scipy.signal.windows.hann(3)[1] == 1
assert scipy.signal.__spec__.origin
"""
ASKED = """
import sys
import fedbnn
from fedbnn.machine import lean_torchmetrics
from types import ModuleType
lean_torchmetrics._execute(lambda _: exec({asks!r}), ModuleType("asks"))
import scipy.signal
assert scipy.signal.__spec__.origin
"""


def _run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


def test_torchmetrics_comes_without_scipy_signal_which_is_there_when_asked_for() -> None:
    _run(LEAN.format(then="import scipy.signal"))


def test_whoever_asks_the_placeholder_for_more_gets_what_the_module_has() -> None:
    _run(ASKED.format(asks="from scipy.signal import butter; butter(2, 0.5)"))
    _run(ASKED.format(asks="import scipy.signal.windows as found; found.hann(3)"))
    _run(ASKED.format(asks="import scipy.signal; scipy.signal.hamming; scipy.signal.butter"))
