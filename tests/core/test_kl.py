"""The KL of a million weights, and its gradient."""

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from fedbnn.bayes import inference
from fedbnn.bayes.inference import WeightedKL
from fedbnn.bayes.model import Weights
from tests.core.small_models import kl_by_weight, small


def test_kl_is_exactly_zero_at_the_prior_for_a_million_weights_in_float32() -> None:
    loc, log_scale = torch.randn(1_000_000), (0.05 * torch.rand(1_000_000) + 1e-3).log()
    q, p = Weights(loc.clone(), log_scale.clone()), Weights(loc, log_scale)
    assert kl_by_weight(q, p).abs().max().item() == 0
    assert WeightedKL.apply(q.loc, q.log_scale, p, 1.0).item() == 0


def test_kl_is_exactly_zero_when_a_client_begins() -> None:
    model, guide = small()
    assert kl_by_weight(guide.posterior(), model.prior()).abs().max().item() == 0


def test_kl_by_weight_is_that_of_torch_also_close_to_the_prior() -> None:
    for step in (1.0, 1e-2, 1e-4):
        loc, scale = torch.randn(50).double(), torch.rand(50).double() + 0.01
        other, wider = (
            loc + step * torch.randn(50).double(),
            scale * (1 + step * torch.rand(50).double()),
        )
        found = kl_by_weight(Weights(other, wider.log()), Weights(loc, scale.log(), scale))
        reference = kl_divergence(Normal(other, wider), Normal(loc, scale))
        torch.testing.assert_close(found, reference, rtol=1e-7, atol=1e-15)


def test_kl_in_float32_keeps_its_digits_where_the_usual_form_loses_them() -> None:
    """The usual form, log s_0 - log s + (s^2 + (m - m_0)^2) / 2 s_0^2 - 1/2, is a difference of
    large terms.
    """
    loc, log_scale = torch.randn(100_000), (0.05 * torch.rand(100_000) + 1e-3).log()
    wider = log_scale + 1e-4 * torch.randn(100_000)
    exact = (
        kl_by_weight(
            Weights(loc.double(), wider.double()), Weights(loc.double(), log_scale.double())
        )
        .sum()
        .item()
    )
    ours = kl_by_weight(Weights(loc, wider), Weights(loc, log_scale)).sum().item()
    usual = (log_scale - wider + wider.exp() ** 2 / (2 * log_scale.exp() ** 2) - 0.5).sum().item()
    assert ours == pytest.approx(exact, rel=1e-2)
    assert usual != pytest.approx(exact, rel=1e-2)


def random_kl(count: int = 6) -> tuple[Tensor, Tensor, Weights, Tensor]:
    loc, log_scale = (
        torch.randn(count).double().requires_grad_(),
        torch.randn(count).double().requires_grad_(),
    )
    return (
        loc,
        log_scale,
        Weights(torch.randn(count).double(), torch.randn(count).double()),
        torch.rand(count).double(),
    )


def test_the_gradient_of_the_weighted_kl_is_that_of_finite_differences() -> None:
    loc, log_scale, prior, weight = random_kl()
    found = torch.autograd.grad(WeightedKL.apply(loc, log_scale, prior, weight), (loc, log_scale))
    for place, gradient in enumerate(found):
        for entry in range(6):
            step = torch.zeros(6).double().index_fill_(0, torch.tensor([entry]), 1e-5)
            pair = (loc.detach(), log_scale.detach())
            moved = [
                [value + sign * step if spot == place else value for spot, value in enumerate(pair)]
                for sign in (1, -1)
            ]
            above, below = (WeightedKL.apply(*one, prior, weight).item() for one in moved)
            assert gradient[entry].item() == pytest.approx(
                (above - below) / 2e-5, rel=1e-6, abs=1e-8
            )


def test_a_draw_is_mean_plus_scale_times_noise_with_the_gradients_of_that() -> None:
    loc, log_scale = (
        torch.randn(50).double().requires_grad_(),
        torch.randn(50).double().requires_grad_(),
    )
    direction = torch.randn(50).double()
    torch.manual_seed(9)
    drawn = Weights(loc, log_scale).rsample()
    torch.manual_seed(9)
    reference = loc + log_scale.exp() * torch.randn(50, dtype=torch.float64)
    torch.testing.assert_close(drawn, reference)
    for one, other in zip(
        *(torch.autograd.grad(draw @ direction, (loc, log_scale)) for draw in (drawn, reference)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("scalar", [True, False])
def test_weighted_kl_is_the_sum_that_autograd_knows(scalar: bool) -> None:
    loc, log_scale, prior, weight = random_kl()
    factor: Tensor | float = 0.3 if scalar else weight
    found = 2 * WeightedKL.apply(loc, log_scale, prior, factor)
    reference = 2 * (factor * kl_by_weight(Weights(loc, log_scale), prior)).sum()
    torch.testing.assert_close(found, reference)
    torch.testing.assert_close(
        torch.autograd.grad(found, (loc, log_scale)),
        torch.autograd.grad(reference, (loc, log_scale)),
    )


@pytest.mark.parametrize("learned", [True, False])
def test_the_kl_of_pieces_is_that_of_the_whole(
    learned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients to the last bit, the sum up to rounding; the last piece is shorter."""
    loc, log_scale, prior, weight = random_kl(50)
    leaves = (loc, log_scale) if learned else (loc,)
    found = []
    for piece in (50, 7):
        monkeypatch.setattr(inference, "PIECE", piece)
        total = WeightedKL.apply(loc, log_scale if learned else None, prior, weight)
        found.append((total, torch.cat(torch.autograd.grad(total, leaves))))
    (whole, gradient), (pieces, by_piece) = found
    torch.testing.assert_close(pieces, whole)
    assert torch.equal(by_piece, gradient)
