"""One client in one round, as the data module that Lightning users know."""

from typing import Protocol

from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader

from fedbnn.images import Batch, ImageSet


class Stream(Protocol):
    """The two questions that are asked of a stream here."""

    def train(self, round: int, client: int) -> ImageSet:
        """What the client trains on."""
        ...

    def test_now(self, round: int, images: int | None) -> ImageSet:
        """Test images of what all clients see now."""
        ...


class ClientData(LightningDataModule):
    """Training batches of one client, validated and tested on what the whole federation sees in that round."""

    def __init__(self, stream: Stream, round: int, client: int, batch_size: int) -> None:
        super().__init__()
        self.stream, self.round, self.client, self.batch_size = stream, round, client, batch_size

    def train_dataloader(self) -> DataLoader[Batch]:
        """The client's images of the round, shuffled and augmented."""
        return self.stream.train(self.round, self.client).loader(self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """The tasks in their current shares."""
        return self.stream.test_now(self.round, None).loader(self.batch_size, shuffle=False)

    def test_dataloader(self) -> DataLoader[Batch]:
        """The same as for validation."""
        return self.val_dataloader()
