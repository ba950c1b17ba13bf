"""What a user may write in a package of their own and name in `trainer:` by its path."""

from pathlib import Path
from typing import Any

import pytorch_lightning as pl


class Notes(pl.Callback):
    """Writes a line for every hook it is called in."""

    def __init__(self, path: str, word: str = "step") -> None:
        self.path, self.word = Path(path), word

    def _note(self, line: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{line}\n")

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._note(f"fit {type(module).__name__}")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._note(f"{self.word} {trainer.global_step} {trainer.callback_metrics['train/loss']}")

    def on_fit_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._note("end")


class Keeps(pl.Callback):
    """Keeps the last Trainer it was called by."""

    trainer: pl.Trainer

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.trainer = trainer
