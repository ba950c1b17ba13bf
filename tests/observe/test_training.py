"""The loss that a round reports: a mean over images on the client, then over the clients."""

import math

import pytest
import torch

from fedbnn.federation.parts import RoundStats
from fedbnn.protocol.messages import FitResult
from lightning_modules.point_client import Meter


def test_a_client_says_the_mean_over_the_images_of_its_last_pass() -> None:
    meter = Meter()
    meter.batches = [(2, torch.tensor([9.0, 9.0]))]
    assert meter.end_pass() == 9.0
    meter.batches = [(2, torch.tensor([1.0, 0.5])), (6, torch.tensor([-3.0, 1.0]))]
    assert meter.end_pass() == 3.0
    assert meter.train == pytest.approx({"loss": (2 - 18) / 8, "kl": (1 + 6) / 8})


def test_a_pass_without_images_changes_nothing_and_no_number_is_noticed() -> None:
    meter = Meter()
    assert meter.end_pass() == 0.0
    assert meter.train == {}
    meter.batches = [(1, torch.tensor([1.0])), (1, torch.tensor([math.nan]))]
    assert math.isnan(meter.end_pass())


def stats(counts: dict[int, int], said: dict[int, dict[str, float]]) -> RoundStats:
    """A round whose clients have so many images and say this of their training."""
    made = RoundStats(1, {client: {"a": images} for client, images in counts.items()})
    for client, train in said.items():
        made.heard(FitResult(client, b"", inner=2.0, train=train))
    return made


def test_a_round_says_the_mean_weighted_by_images_of_the_clients_that_count() -> None:
    said = {0: {"loss": 1.0, "kl": 0.5}, 1: {"loss": 4.0, "kl": 1.0}, 2: {"loss": 100.0}}
    found = stats({0: 30, 1: 10}, said)
    assert found.trained() == pytest.approx({"loss": 1.75, "kl": 0.625})
    assert found.seconds["inner"] == 6.0


def test_the_order_of_the_answers_does_not_matter_and_other_words_are_not_heard() -> None:
    said = {client: {"loss": 0.1 * client, "other": 1.0} for client in range(1, 8)}
    counts = dict.fromkeys(said, 3)
    turned = dict(reversed(said.items()))
    assert stats(counts, said).trained() == stats(counts, turned).trained()
    assert stats(counts, said).trained().keys() == {"loss"}
    assert stats(counts, {}).trained() == {}
