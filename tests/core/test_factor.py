"""The R factor says of a client's features what their second moment says, in fewer numbers."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbnn.heads.statistics import factor, length, unpacked


@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 9))
def test_the_gram_matrix_is_the_same(seed: int, images: int, width: int) -> None:
    source = torch.Generator().manual_seed(seed)
    features = torch.randn(images, width, generator=source, dtype=torch.float64)
    numbers = factor(features)
    upper = unpacked(numbers, images, width)
    assert numbers.shape == (length(images, width),)
    assert upper.shape == (min(images, width), width)
    assert torch.equal(upper, upper.triu())
    torch.testing.assert_close(upper.T @ upper, features.T @ features, rtol=1e-10, atol=1e-10)


def test_a_few_images_of_a_thousand_features_are_an_order_fewer_bytes_to_a_millionth() -> None:
    features = torch.relu(torch.randn(50, 1000)).double()
    numbers = factor(features).float()
    assert 10 * len(numbers) <= 1000 * 1001 // 2
    upper, exact = unpacked(numbers, 50, 1000).double(), features.T @ features
    assert float((upper.T @ upper - exact).abs().max()) < 1e-6 * float(exact.abs().max())
    assert length(5000, 1000) == 1000 * 1001 // 2  # many images never cost more than the triangle
