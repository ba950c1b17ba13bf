"""How much the KL of each weight counts in the loss of a client."""

from collections.abc import Mapping

import torch

from fedbnn.methods import FedBNN
from fedbnn.protocol.messages import FitInstruction
from fedbnn.protocol.state import State
from lightning_modules.svi_client import kl_weights


def told(total: int, by_class: Mapping[str, int]) -> FitInstruction:
    """An instruction of a round with so many images, in all and by class."""
    return FitInstruction("run", 1, "train", State({}), total, by_class)


def test_the_kl_is_weighted_by_the_round_and_rows_by_their_class() -> None:
    method, counts = FedBNN(temperature=0.5), {"a": 6, "b": 2, "c": 0}
    found = kl_weights(method, 4, 2, counts, told(100, {"a": 30, "b": 2, "c": 9}))
    expected = (
        [0.5 / 100] * 4 + [0.5 * 6 / (8 * 30)] * 2 + [0.5 * 2 / (8 * 2)] * 2 + [0.5 / 100] * 2
    )
    torch.testing.assert_close(found, torch.tensor(expected))


def test_the_kl_is_weighted_by_the_client_or_by_the_number_of_weights() -> None:
    counts, sent = {"a": 6, "b": 2}, told(100, {"a": 30, "b": 2})
    client = kl_weights(FedBNN(temperature=0.5, kl_per="client"), 5, 2, counts, sent)
    torch.testing.assert_close(client, torch.full((9,), 0.5 / 8))
    weights = kl_weights(FedBNN(temperature=0.5, kl_per="weights"), 5, 2, counts, sent)
    torch.testing.assert_close(weights, torch.full((9,), 0.5 / 9))


def test_rows_that_stay_at_home_count_the_client_alone() -> None:
    found = kl_weights(FedBNN(temperature=1.0), 1, 2, {"a": 6, "b": 2}, told(100, {}))
    torch.testing.assert_close(found[1:], torch.full((4,), 1 / 8))


def test_alone_in_a_round_all_weights_of_the_kl_are_those_of_one_posterior() -> None:
    counts = {"a": 5, "b": 3}
    found = kl_weights(FedBNN(temperature=1.0), 2, 4, counts, told(8, counts))
    torch.testing.assert_close(found, torch.full((10,), 1 / 8))
