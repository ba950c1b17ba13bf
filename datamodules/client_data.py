"""One client in one round, as the data module that Lightning users know."""

from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader

from fedbnn.images import Batch, ImageSet


class ClientData(LightningDataModule):
    """Training batches of one client's images of the round, shuffled and augmented."""

    def __init__(self, images: ImageSet, batch_size: int) -> None:
        super().__init__()
        self.images, self.batch_size = images, batch_size

    def with_images(self, images: ImageSet) -> "ClientData":
        """The same with other images, or other labels."""
        return ClientData(images, self.batch_size)

    def train_dataloader(self) -> DataLoader[Batch]:
        """One pass over the images."""
        return self.images.loader(self.batch_size, shuffle=True)
