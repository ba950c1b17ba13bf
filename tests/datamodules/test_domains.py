"""Domain shifts: identities first, then an independent reference for each."""

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from datamodules.collection import DOMAINS, shifted

PIXELS = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, 3, 12, 12), dtype=np.uint8))
PLACES = np.array([3, 1, 254, 9, 505])
STRENGTHS = {"clean": "", "rotation": ":30", "noise": ":0.2", "blur": ":1.2"}


def test_every_change_is_tested() -> None:
    assert set(STRENGTHS) == set(DOMAINS)


@pytest.mark.parametrize("domain", ["clean", "rotation:0", "rotation:360", "noise:0", "blur:0"])
def test_no_change_is_the_identity(domain: str) -> None:
    assert torch.equal(shifted(domain, PIXELS, PLACES), PIXELS)


@pytest.mark.parametrize("name", STRENGTHS)
def test_an_image_looks_the_same_alone_and_in_company(name: str) -> None:
    together = shifted(name + STRENGTHS[name], PIXELS, PLACES)
    alone = [shifted(name + STRENGTHS[name], PIXELS[[i]], PLACES[[i]])[0] for i in range(5)]
    assert together.dtype == torch.uint8
    assert torch.equal(together, torch.stack(alone))


@pytest.mark.parametrize("quarters", [1, 2, 3])
def test_quarter_turns_move_pixels_exactly(quarters: int) -> None:
    assert torch.equal(
        shifted(f"rotation:{90 * quarters}", PIXELS, PLACES), PIXELS.rot90(quarters, (2, 3))
    )


def test_turning_back_restores_a_smooth_centre() -> None:
    wave = torch.sin(torch.arange(24) / 5)
    smooth = (127 + 100 * wave[:, None] * wave[None]).to(torch.uint8).expand(1, 1, 24, 24)
    back = shifted("rotation:-20", shifted("rotation:20", smooth, PLACES[:1]), PLACES[:1])
    assert (back - smooth.float())[..., 8:16, 8:16].abs().max() < 6


def test_noise_has_the_deviation_it_says() -> None:
    grey = torch.full((40, 3, 16, 16), 128, dtype=torch.uint8)
    noisy = shifted("noise:0.1", grey, np.arange(40)).float()
    assert noisy.std().item() == pytest.approx(25.5, rel=0.03)
    assert noisy.mean().item() == pytest.approx(128, abs=1)


def test_blur_is_the_gaussian_filter() -> None:
    expected = gaussian_filter(
        PIXELS.numpy().astype(float), (0, 0, 1.2, 1.2), mode="mirror", truncate=4 / 1.2
    )
    assert np.abs(shifted("blur:1.2", PIXELS, PLACES).numpy() - expected).max() < 0.6
