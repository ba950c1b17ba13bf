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

from fedbnn.config.schema import Count, Momentum, NonNegativeCount, Positive
from fedbnn.devices import CPU, described
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
    "accelerator": "auto",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
_FORK = "ddp_fork"
_REFUSED = (MisconfigurationException, TypeError, ValueError, RuntimeError, ImportError)
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
    restarting the script would play every round twice. `device` is where the rest of a client's
    work is done, and evaluation: that of the fit, or the CPU where fits fork, since nobody can fork
    after having used CUDA.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        given = [options.get(name) or [] for name in ("logger", "callbacks")]
        self._listeners = [x for one in given for x in (one if isinstance(one, list) else [one])]
        self._unused: dict[int, pl.Trainer] = {}
        self._options = {**_LEAN, **options}
        logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
        if _restarts(self._first()) and "strategy" not in options:
            self._options["strategy"], self._unused = _FORK, {}
        if _restarts(trainer := self._first()):
            fix = f"use {_FORK} (or leave it out: several devices take it by themselves)"
            what = f"a client cannot train with strategy {options['strategy']}"
            raise ConfigError(what, "trainer.strategy", fix)
        self.forks = trainer.strategy.launcher is not None
        self.device = CPU if self.forks else trainer.strategy.root_device
        self.pinnable = self.device.type == "cuda" and self._options["devices"] in (1, "1")

    @property
    def described(self) -> str:
        """Where clients train, in words."""
        if not self.forks:
            return described(self.device)
        trainer = self._unused[1]
        kind = type(trainer.accelerator).__name__.removesuffix("Accelerator")
        return f"{trainer.num_devices} x {kind}, forked for every fit; evaluation on the CPU"

    def _first(self) -> pl.Trainer:
        """The Trainer of one epoch, if these options make one."""
        try:
            return self._made(1)
        except _REFUSED as error:
            what = f"Lightning refuses this: {' '.join(str(error).split())}"
            fix = "trainer.accelerator: auto, with one device, takes what there is"
            raise ConfigError(what, "trainer", fix) from error

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


def _restarts(trainer: pl.Trainer) -> bool:
    """Whether a fit starts the script again, or sends the network to a fresh process."""
    launcher = trainer.strategy.launcher
    return launcher is not None and not launcher.is_interactive_compatible


@contextmanager
def _quiet() -> Iterator[None]:
    """Advice that is wrong for small fits of many clients is not shown."""
    with warnings.catch_warnings():
        for text in _CHATTER:
            warnings.filterwarnings("ignore", text)
        yield
