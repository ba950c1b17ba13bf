"""A fresh, lean Trainer per client: it fits, and does nothing else."""

import logging
import warnings
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader

from fedbnn.engines import ClientFailed
from fedbnn.errors import ConfigError
from fedbnn.images import Batch

_LEAN: Mapping[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
_CHATTER = (
    ".*does not have many workers.*",
    ".*number of training batches.*",
    ".*fit_loop.*",
    ".*GPU available but not used.*",
    ".*LeafSpec.*",
)


def fit(module: pl.LightningModule, loader: DataLoader[Batch], epochs: int, options: Mapping[str, Any]) -> pl.Trainer:
    """Fit a module for some epochs; `options` is the `trainer:` section of the configuration.

    Lightning leaves layers found in eval mode in eval mode, and a network that has just been measured is: so it is
    put into training mode here.
    """
    module.train()
    with warnings.catch_warnings():
        for text in _CHATTER:
            warnings.filterwarnings("ignore", text)
        logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
        trainer = pl.Trainer(**{**_LEAN, **_side_by_side(options), **options, "max_epochs": epochs})
        try:
            trainer.fit(module, loader)
        except (FloatingPointError, ProcessRaisedException) as error:
            raise ClientFailed(str(error).strip().splitlines()[-1].removeprefix("FloatingPointError: ")) from error
    return trainer


def _side_by_side(options: Mapping[str, Any]) -> dict[str, str]:
    """Several devices fork from this process: a strategy that starts the script again would play every round twice."""
    return {} if options.get("devices", 1) in (1, "1", "auto") else {"strategy": "ddp_fork"}


def check(options: Mapping[str, Any]) -> None:
    """Refuse strategies that start the script again, or that send the network to a fresh process."""
    if options.get("strategy") in ("ddp", "ddp_spawn", "fsdp", "deepspeed"):
        fix = "use ddp_fork (or leave it out: several devices take it by themselves)"
        raise ConfigError(f"a client cannot train with strategy {options['strategy']}", "trainer.strategy", fix)
