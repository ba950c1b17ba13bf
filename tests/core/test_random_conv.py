"""Random convolutions: the same for everybody, blind to contrast and to the mirror."""

import pytest
import torch
from torch import Tensor

from fedbnn.bayes.flatten import layout_of
from fedbnn.networks import FixedFeatures
from fedbnn.networks.random_conv import RandomConv, _covariance, gabor_filters


def pictures(*shape: int) -> Tensor:
    """Smooth noise, as strong as what networks see."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return noise + 2 * torch.nn.functional.avg_pool2d(noise, 3, 1, 1)


@pytest.mark.parametrize("channels", [1, 3])
def test_filters_have_no_mean_and_answer_nature_with_variance_one(channels: int) -> None:
    bank = gabor_filters(20, channels, 6, 0).double().flatten(1)
    torch.testing.assert_close(bank.mean(1), torch.zeros(20).double(), rtol=0, atol=1e-6)
    variance = ((bank @ _covariance(channels, 6)) * bank).sum(1)
    torch.testing.assert_close(variance, torch.ones(20).double(), rtol=1e-5, atol=0)


def test_a_seed_is_all_that_is_shared() -> None:
    assert torch.equal(gabor_filters(5, 3, 6, 4), gabor_filters.__wrapped__(5, 3, 6, 4))
    assert not torch.allclose(gabor_filters(5, 3, 6, 4), gabor_filters(5, 3, 6, 5))


@pytest.mark.parametrize("mirror", [True, False])
def test_a_usual_feature_is_that_of_an_answer_like_noise(mirror: bool) -> None:
    noise = torch.randn(10**6, generator=torch.Generator().manual_seed(2))
    wanted = (1 + mirror) * float((noise - 0.5).clamp_min(0).mean().sqrt())
    assert RandomConv(3, mirror, 0).usual == pytest.approx(wanted, rel=5e-3)


def test_as_a_network_they_have_no_weights_and_lie_around_zero() -> None:
    network, images = FixedFeatures((3, 32, 32), filters=40), pictures(30, 3, 32, 32)
    found = network(images)
    assert layout_of(network).size == 0
    assert found.shape == (30, network.width) == (30, 360)
    seen = RandomConv(40, True, 0)
    torch.testing.assert_close(found, 2 * seen(images) / seen.usual - 2)
    assert abs(float(found.mean())) < 1


@pytest.mark.parametrize("shape", [(1, 4, 4), (1, 8, 8), (1, 28, 28), (3, 32, 40), (3, 64, 64)])
def test_images_of_any_size_have_nine_features_a_filter(shape: tuple[int, ...]) -> None:
    seen = RandomConv(7, True, 0)
    found = seen(pictures(30, *shape))
    assert found.shape == (30, seen.width) == (30, 63)
    assert bool(found.isfinite().all())
    assert bool((found >= 0).all())
    assert float(found.std(0).max()) > 0.01


def test_projections_are_rectified_lines_about_the_usual_feature() -> None:
    images = pictures(30, 3, 32, 32)
    more, plain = RandomConv(5, True, 0, projections=2000), RandomConv(5, True, 0)
    found, seen = more(images), plain(images)
    assert found.shape == (30, more.width) == (30, 2045)
    torch.testing.assert_close(found[:, :45], seen)
    assert bool((found >= 0).all())
    assert torch.equal(found, RandomConv(5, True, 0, projections=2000)(images))
    strength = (seen - plain.usual).square().mean(1)  # half of it is above 0, over many directions
    torch.testing.assert_close(found[:, 45:].square().mean(1), strength / 2, rtol=0.3, atol=0)


def test_batches_do_not_matter() -> None:
    seen, images = RandomConv(6, True, 0), pictures(47, 3, 16, 16)
    parts = torch.cat([seen(images[:5]), seen(images[5:])])
    torch.testing.assert_close(seen(images), parts, rtol=1e-5, atol=1e-6)


def test_an_image_and_its_mirror_image_are_the_same() -> None:
    images = pictures(9, 3, 32, 32)
    both, one = RandomConv(6, True, 0), RandomConv(6, False, 0)
    torch.testing.assert_close(both(images), both(images.flip(-1)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(both(images), one(images) + one(images.flip(-1)))
    assert not torch.allclose(one(images), one(images.flip(-1)), rtol=0.05)


def test_light_and_contrast_do_not_matter() -> None:
    seen, images = RandomConv(6, False, 0), 20 * pictures(9, 3, 32, 32)
    torch.testing.assert_close(seen(3 * images + 5), seen(images), rtol=1e-2, atol=1e-2)


def test_a_feature_is_the_root_of_the_mean_response_in_its_field() -> None:
    """The formula patch by patch, on the first of nine fields."""
    images, size = pictures(2, 1, 16, 16), 6
    bank = gabor_filters(4, 1, size, 0).flatten(1)
    patches = images.unfold(2, size, 1).unfold(3, size, 1)[:, 0].flatten(3)
    calm = patches - patches.mean(-1, keepdim=True)
    even = calm / (patches.var(-1, unbiased=False, keepdim=True) + 0.002).sqrt()
    heard = (even @ bank.T - 0.5).clamp_min(0)  # (image, row, column, filter) at 11 x 11 places
    first = heard[:, :4, :4].mean((1, 2)).sqrt()
    found = RandomConv(4, False, 0)(images).view(2, 4, 9)[:, :, 0]
    torch.testing.assert_close(found, first, rtol=1e-4, atol=1e-5)
