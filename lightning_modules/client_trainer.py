"""One lean Trainer for all clients of a process: it fits, and does nothing else."""

import logging
import warnings
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from torch.multiprocessing import ProcessRaisedException

from fedbnn.errors import ConfigError
from fedbnn.federation.engines import ClientFailed
from fedbnn.images import ImageSet
from lightning_modules.client import ClientModule, Clip

_LEAN: Mapping[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
_RESTARTING = (
    "ddp",
    "ddp_spawn",
    "fsdp",
    "deepspeed",
)  # they start the script again, or send the network to a fresh process
_CLIP = ("gradient_clip_val", "gradient_clip_algorithm")
_CHATTER = (
    ".*does not have many workers.*",
    ".*number of training batches.*",
    ".*fit_loop.*",
    ".*GPU available but not used.*",
    ".*LeafSpec.*",
)


class ClientTrainer:
    """Fits one module after the other; `options` is the `trainer:` section of the configuration.

    A Trainer costs as much to make as some steps of a small network, so it stays, and its progress is set back to the
    beginning for each client. It is made anew after a fit that failed, and when it forks to several devices.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        if options.get("strategy") in _RESTARTING:
            fix = "use ddp_fork (or leave it out: several devices take it by themselves)"
            raise ConfigError(
                f"a client cannot train with strategy {options['strategy']}",
                "trainer.strategy",
                fix,
            )
        if options.get("accumulate_grad_batches", 1) != 1:
            fix = "raise client.batch_size"
            raise ConfigError(
                "a client does not accumulate gradients", "trainer.accumulate_grad_batches", fix
            )
        self._options = {name: value for name, value in options.items() if name not in _CLIP}
        self._clip = Clip(*(options.get(name) for name in _CLIP))
        self._trainer: pl.Trainer | None = None

    def fit(self, module: ClientModule, images: ImageSet, passes: int) -> pl.Trainer:
        """Fit a module for some passes over the images.

        Lightning leaves layers found in eval mode in eval mode, and a network that has just been measured is: so it is
        put into training mode here.
        """
        module.train()
        module.clip = self._clip
        with warnings.catch_warnings():
            for text in _CHATTER:
                warnings.filterwarnings("ignore", text)
            trainer, self._trainer = self._ready(passes), None
            try:
                trainer.fit(module, images.loader(module.local.batch_size, shuffle=True))
            except (FloatingPointError, ProcessRaisedException) as error:
                raise ClientFailed(
                    str(error).strip().splitlines()[-1].removeprefix("FloatingPointError: ")
                ) from error
        self._trainer = trainer if trainer.num_devices == 1 else None
        return trainer

    def _ready(self, passes: int) -> pl.Trainer:
        """A Trainer at its beginning; a pass over the images is an epoch."""
        if self._trainer is None:
            logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
            self._trainer = pl.Trainer(
                **{**_LEAN, **_side_by_side(self._options), **self._options, "max_epochs": 1}
            )
        epochs_loop = self._trainer.fit_loop
        epochs_loop.max_epochs = passes
        steps_loop = epochs_loop.epoch_loop
        steps = steps_loop.manual_optimization.optim_step_progress
        for progress in (epochs_loop.epoch_progress, steps_loop.batch_progress, steps):
            progress.reset()
        return self._trainer


def _side_by_side(options: Mapping[str, Any]) -> dict[str, str]:
    """Several devices fork from this process: a strategy that starts the script again would play every round twice."""
    return {} if options.get("devices", 1) in (1, "1", "auto") else {"strategy": "ddp_fork"}
