"""How a client trains: the `client:` and `trainer:` sections, and one Trainer a fit."""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import pytorch_lightning as pl
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch.multiprocessing import ProcessRaisedException

from fedbnn.config.ranges import Count, Momentum, NonNegativeCount, Positive
from fedbnn.errors import ConfigError
from fedbnn.federation.engines import ClientFailed


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains on its data of the round; the same budget for every method.

    Args:
        optimizer: adam, or sgd with `momentum`.
        lr: learning rate of the weights (of their means, once Bayesian); a method may set its own.
        momentum: momentum of sgd.
        epochs: passes over the data of the round.
        batch_size: images per step.
        warmup_epochs: passes that fit prototypes of new classes with the backbone frozen.
        warmup_lr: learning rate of those passes.
    """

    optimizer: Literal["adam", "sgd"] = "adam"
    lr: Positive = 1e-3
    momentum: Momentum = 0.0
    epochs: Count = 5
    batch_size: Count = 32
    warmup_epochs: NonNegativeCount = 3
    warmup_lr: Positive = 1e-2


_LEAN: Mapping[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
_RESTARTING = ("ddp", "ddp_spawn", "fsdp", "deepspeed")
"""Strategies that start the script again, or send the network to a fresh process."""
_CHATTER = (
    ".*does not have many workers.*",
    ".*number of training batches.*",
    ".*GPU available but not used.*",
    ".*LeafSpec.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*Experiment logs directory .* exists and is not empty.*",
)


class ClientTrainer:
    """Fits one module after the other; `options` are Lightning's own, given to every Trainer.

    Loggers and callbacks see the fits of all clients of the process. Several devices fork from it:
    restarting the script would play every round twice.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        if options.get("strategy") in _RESTARTING:
            fix = "use ddp_fork (or leave it out: several devices take it by themselves)"
            what = f"a client cannot train with strategy {options['strategy']}"
            raise ConfigError(what, "trainer.strategy", fix)
        alone = options.get("devices", 1) in (1, "1", "auto")
        given = [options.get(name) or [] for name in ("logger", "callbacks")]
        self._listeners = [x for one in given for x in (one if isinstance(one, list) else [one])]
        self._unused: dict[int, pl.Trainer] = {}
        self._options = {**_LEAN, **({} if alone else {"strategy": "ddp_fork"}), **options}
        logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
        try:
            self._made(1)
        except (MisconfigurationException, TypeError, ValueError) as error:
            what = " ".join(str(error).split())
            raise ConfigError(f"Lightning refuses this: {what}", "trainer") from error

    def _made(self, epochs: int) -> pl.Trainer:
        """A fresh Trainer: a copy of one that is never used, but for the user's own objects.

        To make one takes six times as long: it looks for plug-ins among all installed packages.
        """
        if epochs not in self._unused:
            with _quiet():
                self._unused[epochs] = pl.Trainer(**self._options, max_epochs=epochs)
        return deepcopy(self._unused[epochs], {id(one): one for one in self._listeners})

    def fit(self, module: pl.LightningModule, data: pl.LightningDataModule, epochs: int) -> None:
        """Fit a module to a client's data for so many epochs.

        Lightning leaves layers found in eval mode in eval mode, and a network that has just been
        measured is: so it is put into training mode here. It comes back in float32, whatever
        `precision` it was trained in. A Trainer refers to itself, so what the optimiser remembers
        is let go by hand and does not wait for the collector of cycles.
        """
        trainer = self._made(epochs)
        try:
            with _quiet():
                trainer.fit(module.train(), datamodule=data)
        except (FloatingPointError, ProcessRaisedException) as error:
            last = str(error).strip().splitlines()[-1]
            raise ClientFailed(last.removeprefix("FloatingPointError: ")) from error
        finally:
            trainer.strategy.optimizers = []
            if trainer.precision != "32-true":
                module.float()


@contextmanager
def _quiet() -> Iterator[None]:
    """Advice that is wrong for small fits of many clients is not shown."""
    with warnings.catch_warnings():
        for text in _CHATTER:
            warnings.filterwarnings("ignore", text)
        yield
