"""Networks: the numbers of the paper, shapes, and logits that are no probabilities."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedbnn.bayes.flatten import Layout, layout_of
from fedbnn.errors import ConfigError
from fedbnn.networks import (
    MLP,
    NETWORKS,
    CifarResNet18,
    Classifier,
    Convolution,
    LeNet,
    MaxPool,
    PaperResNet,
)

COUNTS = {"mlp": 317_400, "lenet": 83_072, "paper_resnet": 6_795_048, "cifar_resnet18": 11_168_832}
WIDTHS = {"mlp": 100, "lenet": 200, "paper_resnet": 1000, "cifar_resnet18": 512}
COUNTS["random_conv"], WIDTHS["random_conv"] = 0, 2700


def size(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize("name", NETWORKS)
def test_number_of_weights_at_32_pixels(name: str) -> None:
    assert size(NETWORKS[name]((3, 32, 32))) == COUNTS[name]


def test_two_blocks_a_stage_have_the_depth_of_a_resnet18() -> None:
    network = PaperResNet((3, 32, 32), blocks_per_stage=2)
    assert size(network) == 13_065_768
    assert sum(isinstance(module, nn.Conv2d) for module in network.stages.modules()) == 16 + 3


def test_the_torchvision_resnet18_is_the_reference_for_the_cifar_one() -> None:
    from torchvision.models import resnet18

    reference = resnet18(num_classes=1)
    with_small_stem = size(reference) - 64 * 3 * 49 + 64 * 3 * 9 - size(reference.fc)
    assert size(CifarResNet18((3, 32, 32))) == with_small_stem


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("side", [32, 64, 96])
def test_features_and_logits_have_the_right_shape(name: str, side: int) -> None:
    with torch.device("cpu" if name == "random_conv" else "meta"):  # it draws its filters
        network = Classifier(NETWORKS[name]((3, side, side)), 7).eval()
        images = torch.zeros(2, 3, side, side)
    assert network.backbone.width == WIDTHS[name]
    assert network.backbone(images).shape == (2, WIDTHS[name])
    assert network(images).shape == (2, 7)


@pytest.mark.parametrize("side", range(5, 40))
def test_the_paper_network_knows_its_own_last_map(side: int) -> None:
    with torch.device("meta"):
        assert PaperResNet((1, side, side)).eval()(torch.zeros(2, 1, side, side)).shape == (2, 1000)


def test_the_paper_network_is_the_table() -> None:
    network = PaperResNet((3, 32, 32))
    stem = network.stem[0]
    assert (stem.kernel_size, stem.stride, stem.padding) == ((7, 7), (4, 4), (1, 1))
    shortcuts = [
        stage.shortcut[0].kernel_size
        for stage in network.stages
        if not isinstance(stage.shortcut, nn.Identity)
    ]
    assert shortcuts == [(3, 3)] * 3
    assert all(isinstance(stage.last, nn.Identity) for stage in network.stages)


@pytest.mark.parametrize(("window", "stride", "padding"), [(2, 2, 0), (3, 1, 1), (3, 2, 1)])
def test_pooling_without_gradients_gives_the_same_bits_in_the_same_order(
    window: int, stride: int, padding: int
) -> None:
    pool, images = MaxPool(window, stride, padding), torch.randn(5, 6, 11, 11)
    with torch.no_grad():
        quick = pool(images)
    assert torch.equal(quick, pool(images))
    assert quick.is_contiguous()


@pytest.mark.parametrize("channels", [3, 40])
@pytest.mark.parametrize("sides", [(8, 8), (6, 10), (7, 8), (9, 9)])
def test_pooling_by_two_has_the_bits_of_torch_and_its_gradient_where_corners_are_equal(
    channels: int, sides: tuple[int, int]
) -> None:
    """Halves of small whole numbers are often equal; zeros behind a rectifier always are."""
    images = torch.randint(-2, 3, (4, channels, *sides)).div(2).requires_grad_()
    ours, reference = MaxPool(2)(images), nn.functional.max_pool2d(images, 2)
    assert torch.equal(ours, reference)
    above = torch.randn_like(reference)
    expected = torch.autograd.grad(reference, images, above, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(ours, images, above)[0], expected)
    one_by_one = vmap(grad(lambda image, up: (MaxPool(2)(image) * up).sum()))(images, above)
    assert torch.equal(one_by_one, expected)


@pytest.mark.parametrize("name", ["lenet", "paper_resnet", "cifar_resnet18"])
def test_gradients_one_by_one_are_those_of_single_images(name: str) -> None:
    """What EWC and MAS ask a network for; pooling of many channels refused it."""
    torch.manual_seed(0)
    backbone = NETWORKS[name]((3, 32, 32)).eval()
    weights = {key: value.detach() for key, value in backbone.named_parameters()}
    images = torch.randn(2, 3, 32, 32)

    def of_one(weights: dict[str, Tensor], image: Tensor) -> Tensor:
        return functional_call(backbone, weights, (image[None],)).square().sum()

    together = vmap(grad(of_one), in_dims=(None, 0))(weights, images)
    for place, image in enumerate(images):
        for key, alone in grad(of_one)(weights, image).items():
            torch.testing.assert_close(together[key][place], alone, rtol=1e-3, atol=1e-3)


def test_logits_are_not_probabilities() -> None:
    network = Classifier(LeNet((3, 32, 32)), 5)
    with torch.no_grad():
        logits = network(torch.randn(8, 3, 32, 32))
    assert bool((logits < 0).any())
    assert not torch.allclose(logits.sum(1), torch.ones(8))
    features = network.backbone(torch.zeros(1, 3, 32, 32))
    torch.testing.assert_close(
        network(torch.zeros(1, 3, 32, 32)), features @ network.head.weight.T + network.head.bias
    )


@pytest.mark.parametrize(("name", "side"), [("lenet", 15), ("paper_resnet", 4)])
def test_images_too_small_are_refused_by_name(name: str, side: int) -> None:
    with pytest.raises(ConfigError, match=name):
        NETWORKS[name]((3, side, side))


@pytest.mark.parametrize("name", ["paper_resnet", "cifar_resnet18"])
def test_group_norm_has_no_statistics(name: str) -> None:
    assert layout_of(NETWORKS[name]((3, 32, 32), norm="group")).buffers == ()
    assert layout_of(NETWORKS[name]((3, 32, 32), norm="batch")).buffers != ()


def small_resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 4)
    )


def test_what_a_layout_reads_it_writes_back() -> None:
    source, target = small_resnet(), small_resnet()
    source(torch.randn(9, 3, 4, 4))
    layout = layout_of(source)
    layout.write(target, *layout.read(source))
    for name, value in source.state_dict().items():
        if "num_batches" not in name:
            assert torch.equal(target.state_dict()[name], value)


def test_what_is_read_is_a_copy() -> None:
    network = small_resnet()
    layout = layout_of(network)
    weights, buffers = layout.read(network)
    weights.zero_(), buffers.fill_(7)
    assert bool((layout.read(network)[0] != 0).any())
    assert not bool((layout.read(network)[1] == 7).any())


def test_views_share_the_memory_of_the_vector_and_cover_it_once() -> None:
    layout = layout_of(small_resnet())
    vector = torch.arange(layout.size)
    views = layout.views(vector)
    assert torch.cat([view.reshape(-1) for view in views.values()]).sort().values.equal(vector)
    assert all(view.data_ptr() >= vector.data_ptr() for view in views.values())
    torch.testing.assert_close(layout.flatten(views), vector)


def test_parameters_by_name_are_those_of_the_classifier_and_back() -> None:
    backbone = MLP((1, 4, 4), (5,))
    layout, rows = layout_of(backbone), torch.randn(3, 6)
    network = layout.classifier(backbone, rows)
    weights = layout.read(backbone)[0]
    named = layout.by_parameter(weights, rows)
    assert named.keys() == dict(network.named_parameters()).keys()
    assert all(torch.equal(named[name], value) for name, value in network.named_parameters())
    whole = layout.by_parameter_of(torch.cat([weights, rows.reshape(-1)]))
    assert all(torch.equal(whole[name], value) for name, value in named.items())
    assert whole.keys() == named.keys()
    back = layout.from_parameters(named)
    assert torch.equal(back["backbone"], weights)
    assert torch.equal(back["prototypes"], rows)


def test_norm_layers_have_weights_like_all_others() -> None:
    layout = layout_of(small_resnet())
    names = {"0.weight", "1.weight", "1.bias", "3.weight", "3.bias"}
    assert {slot.name for slot in layout.slots} == names
    assert layout.size == size(small_resnet())


def scale_of(layout: Layout, name: str, gain: float) -> torch.Tensor:
    return layout.views(layout.initial_scale(gain))[name]


def test_the_initial_scale_is_gain_over_root_fan_in() -> None:
    layout = layout_of(small_resnet())
    assert scale_of(layout, "0.weight", 0.3).unique().item() == pytest.approx(0.3 / (3 * 9) ** 0.5)
    assert scale_of(layout, "3.weight", 0.3).unique().item() == pytest.approx(0.3 / 32**0.5)
    assert scale_of(layout, "3.bias", 0.3).unique().item() == pytest.approx(0.3 / 32**0.5)
    assert layout.initial_scale(0.05, constant=True).unique().item() == pytest.approx(0.05)


def test_the_initial_scale_keeps_the_noise_of_a_layer_independent_of_its_width() -> None:
    noises = []
    for width in (50, 5000):
        layout = layout_of(MLP((1, 1, width), (20,)))
        draw = layout.views(layout.initial_scale(1.0) * torch.randn(layout.size))["layers.1.weight"]
        noises.append((torch.ones(width) @ draw.T).std().item())
    assert noises[0] == pytest.approx(noises[1], rel=0.7)


@pytest.mark.parametrize(("kernel", "padding"), [(3, 1), (1, 0)])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("sides", [(1, 1), (2, 2), (1, 2), (3, 1), (4, 4)])
def test_a_convolution_on_a_map_of_any_size_is_that_of_torch(
    kernel: int, padding: int, stride: int, sides: tuple[int, int]
) -> None:
    ours = Convolution(3, 5, kernel, stride, padding).double()
    images = torch.randn(4, 3, *sides, dtype=torch.float64, requires_grad=True)
    weight = ours.weight.detach().clone().requires_grad_()
    found = ours(images)
    reference = nn.functional.conv2d(images, weight, stride=stride, padding=padding)
    torch.testing.assert_close(found, reference)
    signal = torch.randn_like(found)
    theirs = torch.autograd.grad(reference, (images, weight), signal)
    mine = torch.autograd.grad(found, (images, ours.weight), signal)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("sides", [(1, 1), (2, 2), (4, 4)])
def test_under_autocast_a_convolution_has_the_types_of_that_of_torch(
    sides: tuple[int, int],
) -> None:
    ours = Convolution(3, 5, 3, 2, 1)
    plain = nn.Conv2d(3, 5, 3, 2, 1, bias=False)
    plain.load_state_dict(ours.state_dict())
    found = []
    for one in (ours, plain):
        images = torch.linspace(-1, 1, 12 * sides[0] * sides[1]).view(4, 3, *sides).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            seen = one(images)
        seen.sum().backward()
        found.append((seen, images.grad, one.weight.grad))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)


def test_gradients_of_single_images_go_through_a_convolution_of_one_window() -> None:
    ours = Convolution(3, 5, 3, 2, 1).double()
    images = torch.randn(4, 3, 2, 2, dtype=torch.float64)

    def score(weight: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.functional_call(ours, {"weight": weight}, (image[None],))
        return found.square().sum()

    weight = ours.weight.detach()
    found = torch.func.vmap(torch.func.grad(score), in_dims=(None, 0))(weight, images)
    one_by_one = torch.stack([torch.func.grad(score)(weight, image) for image in images])
    torch.testing.assert_close(found, one_by_one)
    assert found.abs().amax((0, 1, 2)).count_nonzero() == 4  # taps beyond the map have none
