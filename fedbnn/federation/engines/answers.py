"""What every engine does around one client: one thread, and an exception that costs that client only."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedbnn.errors import FedBNNError
from fedbnn.federation.engines import ClientFailed, Worker
from fedbnn.messages import Failure, FitResult

LOG = logging.getLogger(__name__)


def answer(
    worker: Worker, payload: bytes, client: int, private: bytes | None
) -> FitResult | Failure:
    """The client's reply, or why there is none. The traceback of a defect goes to the log."""
    try:
        return worker.perform(payload, client, private)
    except (ClientFailed, FedBNNError) as error:
        return Failure(client, str(error))
    except Exception as error:  # the border between one client and the round
        LOG.error("client %d raised", client, exc_info=True)
        return Failure(client, f"{type(error).__name__}: {error}"[:400])


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as the workers of `processes` do: the order of sums, so every byte, depends on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
