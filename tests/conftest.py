"""What all tests share."""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

import fedbnn  # noqa: F401  (before Lightning, which imports torchvision)

settings.register_profile("fedbnn", deadline=None)
settings.load_profile("fedbnn")


def pytest_collection_finish() -> None:
    """Libraries and tests are no garbage: from here on nobody looks through them."""
    gc.freeze()


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real images named by FEDBNN_DATA; without one the test is skipped."""
    folder = os.environ.get("FEDBNN_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("FEDBNN_DATA names no folder of real images")
    return Path(folder)
