"""log.txt: what happened, with times, in the run directory; libraries may talk there but not on the console."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHATTY = (
    "pytorch_lightning",
    "lightning.pytorch",
    "lightning.fabric",
    "lightning_fabric",
    "wandb",
    "matplotlib",
    "flwr",
    "urllib3",
)
FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


@contextmanager
def logging_to(run_dir: Path) -> Iterator[logging.Logger]:
    """Write the log of everything below into `run_dir/log.txt`, and nothing of it on the console."""
    handler = logging.FileHandler(run_dir / "log.txt", encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter(FORMAT))
    root = logging.getLogger("fedbnn")
    before = root.level, root.propagate
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False
    try:
        with _redirected(handler):
            yield root
    finally:
        root.removeHandler(handler)
        root.setLevel(before[0])
        root.propagate = before[1]
        handler.close()


@contextmanager
def _redirected(handler: logging.Handler) -> Iterator[None]:
    """The loggers of chatty libraries, with only this handler and only from warnings on."""
    loggers = [logging.getLogger(name) for name in CHATTY]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
