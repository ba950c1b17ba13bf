"""What can be learnt of one client: differential privacy of whole clients (`privacy:`).

Each exchange asks one question of every client k, and its answer is one vector x_k over all weights
and all classes that the schedule has in the round, 0 for those it does not hold:

    points       (theta_k - theta_0) / s_0             s_0 the scale of the prior, before there is
    factors      (de_k - dL_k m_0) s_0,                one FedBNN's first: 0.05 / sqrt(fan-in)
                 dL_k s_0^2 / sqrt(2)                  |x|^2 / 2 is about KL(posterior || prior)
    statistics   n_kc,  s_kc / r,  M_k / r^2           r the length of the features of noise (under
                                                       all backbones sent); so |x| is in images

    sent         x_k min(1, C / |x_k|)                 C = `clip`, or `clip_images` for statistics
    folded       sum_k of them + N(0, (z C)^2 I)       z = `noise`; of weights then divided by m
    at: client   every client adds such noise itself, before it sends; so a length beyond
                 C (1 + z (sqrt(dim) + 5))             is refused: |N(0, I)| has the mean sqrt(dim)
                                                       and a deviation below 1

Every client has the same weight, whatever its images: what goes up names `images` and no counts,
a client that fails or is refused counts as 0, and m is the number of clients asked. So one client
more or less (its answer or 0) moves the sum by at most C, and everything after the sum uses nothing
but the sum: each exchange is one Gaussian mechanism with multiplier z, for whoever sees the model.
With `at: client` it is one for the server, too. `fedbnn.defense.budget` adds them up.

What this needs is checked first: no comparison between clients, whose outcome would depend on all
of them, no running statistics of batch norm, and only exchanges whose fold is a sum.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from typing import Literal

import torch
from torch import Tensor, nn

from fedbnn.bayes.flatten import Layout
from fedbnn.config.schema import Count, NonNegative, OpenUnitInterval, Positive
from fedbnn.defense.gate import Gate
from fedbnn.errors import ConfigError
from fedbnn.heads import ExactHead, Head, LinearHead, exact, gaussian
from fedbnn.heads.statistics import HEADS, names
from fedbnn.methods import FedBNN, Method
from fedbnn.methods.bounds import Exact
from fedbnn.methods.fedavg import FedAvg, FedProx
from fedbnn.protocol.messages import Update
from fedbnn.protocol.state import State

Steps = dict[str, Tensor]
GAIN, HALF = 0.05, math.sqrt(0.5)
BEYOND, ROUNDED = 5.0, 1.01
SITES = ("backbone", "prototypes")
INSTALL = 'install it: pip install -c constraints.txt ".[privacy]"'


@dataclass(frozen=True)
class Privacy:
    """What can be learnt of one client from what it sends, and from the model.

    Args:
        noise: z, deviation of the noise by the clip; 0 adds none.
        clip: C, how far one client may move the weights, in scales of the prior; null does not
            look. Finite, it gives every client the same weight.
        clip_images: the same for class statistics, in images.
        at: who adds the noise: the `server`, once, or every `client`.
        epsilon: the budget; the run stops before a round that would spend more. null only counts.
        delta: the probability that epsilon does not hold.
        images: how many images every client is taken to have, whatever it has.
        smallest_class: a class of which a client has fewer images is left out of its statistics.
    """

    noise: NonNegative = 0.0
    clip: Positive | None = None
    clip_images: Positive | None = None
    at: Literal["server", "client"] = "server"
    epsilon: Positive | None = None
    delta: OpenUnitInterval = 1e-5
    images: Count = 20
    smallest_class: Count = 2

    def __post_init__(self) -> None:
        if self.noise and self.clip is None and self.clip_images is None:
            raise ConfigError("noise without a clip hides nothing", "privacy.clip", "set it")
        if self.epsilon is not None and not self.noise:
            raise ConfigError("a budget without noise is spent at once", "privacy.noise", "set it")

    @property
    def on(self) -> bool:
        """Whether clients are clipped; else nothing is changed."""
        return self.clip is not None or self.clip_images is not None

    def announced(self, classes: Sequence[str]) -> dict[str, int]:
        """The images that every client is taken to have, shared evenly among these classes."""
        each = max(1, self.images // max(1, len(classes)))
        return dict.fromkeys(classes, each) if classes else {"": self.images}

    def enough(self, counts: Mapping[str, int]) -> dict[str, int]:
        """The classes of which there are enough images to send sums of."""
        return {name: count for name, count in counts.items() if count >= self.smallest_class}

    def clip_of(self, statistics: bool) -> float:
        """C of an exchange."""
        clip = self.clip_images if statistics else self.clip
        return math.inf if clip is None else clip


def check(privacy: Privacy, gate: Gate, method: Method, head: Head, layout: Layout) -> None:
    """Refuse what would leak, in one line."""
    if not privacy.on:
        return
    if privacy.noise and find_spec("opacus") is None:
        raise ConfigError("epsilon is counted by opacus, which is not there", "privacy", INSTALL)
    if gate.influence_cap is not None or gate.robust != "influence":
        what = "what counts may not depend on a comparison of clients"
        raise ConfigError(what, "privacy", "set gate.influence_cap: null and leave gate.robust out")
    if type(method) not in (FedAvg, FedProx, FedBNN, Exact):
        what = f"{type(method).__name__} sends more than is made private"
        raise ConfigError(what, "privacy", "use fedbnn, fedavg, fedprox or exact")
    if isinstance(method, FedBNN) and method.fold_by == "moments":
        raise ConfigError("moments are no sum of factors", "privacy", "use fold_by scaled, product")
    if layout.buffers:
        what = "running statistics of batch norm are not made private"
        raise ConfigError(what, "privacy", "use network.norm: group")
    needed = ["clip"] * method.trains + ["clip_images"] * (not isinstance(head, LinearHead))
    for name in needed:
        if getattr(privacy, name) is None:
            raise ConfigError("this exchange would not be clipped", f"privacy.{name}", "set it")


def unit(
    head: Head, backbone: nn.Module, layout: Layout, sent: State, shape: tuple[int, int, int]
) -> float:
    """r: how long features of this head are, of noise, under the backbones that are sent."""
    if isinstance(head, ExactHead):
        return exact.unit(head, shape)
    return gaussian.unit(backbone, layout, sent, shape)


@dataclass(frozen=True)
class Question:
    """One exchange: the state it is about, the classes of the round, and the units of answers."""

    state: State
    classes: tuple[str, ...]
    layout: Layout
    unit: float = 1.0

    @property
    def rows(self) -> Tensor:
        """Where the classes stand in the state."""
        return self.state.index(self.classes)

    def scale(self, site: str) -> Tensor | float:
        """s_0 of the weights of a site."""
        if site == "backbone":
            first = self.layout.initial_scale(GAIN)
            return self.state.tensors.get("backbone.scale", first).double()
        if self.state.bayesian and "prototypes.scale" in self.state:
            return self.state["prototypes.scale"][self.rows].double()
        return GAIN / math.sqrt(self.layout.width + 1)

    def start(self, site: str) -> Tensor:
        """m_0, or theta_0, of the weights of a site."""
        return (self.state[site] if site == "backbone" else self.state[site][self.rows]).double()

    @property
    def units(self) -> dict[str, float]:
        """Statistics by name, with what they are divided by."""
        powers = 1.0, self.unit, self.unit**2
        named = (zip(names(head), powers, strict=True) for head in HEADS)
        return dict(chain(*named))

    def asked(self, update: Update) -> Steps:
        """x_k of an update: dense, in units."""
        found: Steps = {}
        for name, unit in self.units.items():
            if name in update.tensors:
                found[name] = self._dense(update, name) / unit
        for site in SITES:
            if f"{site}.info" in update.tensors:
                scale, precision = self.scale(site), self._dense(update, f"{site}.precision")
                pull = self._dense(update, f"{site}.info") - precision * self.start(site)
                found[f"{site}.info"] = pull * scale
                found[f"{site}.precision"] = precision * scale**2 * HALF
            elif site in update.tensors:
                found[site] = self._moved(update, site) / self.scale(site)
        return found

    def _dense(self, update: Update, name: str) -> Tensor:
        """A tensor with a row for every class of the round, if it has rows; 0 where none came."""
        value = update.tensors[name].double()
        if not name.startswith("prototypes") and not name.endswith((".count", ".sum")):
            return value
        whole = value.new_zeros(len(self.classes), *value.shape[1:])
        whole[[self.classes.index(one) for one in update.classes]] = value
        return whole

    def _moved(self, update: Update, site: str) -> Tensor:
        """theta_k - theta_0; 0 for prototypes of classes it does not hold."""
        if site == "backbone":
            return update.tensors[site].double() - self.start(site)
        move = update.tensors[site].double() - self.state[site][self.state.index(update.classes)]
        return self._dense(replace(update, tensors={site: move}), site)

    def answer(self, steps: Steps, update: Update, counts: Mapping[str, int]) -> Update:
        """The update that says these steps, and no other count than these."""
        found: Steps = {}
        for name, unit in self.units.items():
            if name in steps:
                found[name] = steps[name] * unit
        for site in SITES:
            if f"{site}.info" in steps:
                scale = self.scale(site)
                precision = steps[f"{site}.precision"] / (scale**2 * HALF)
                found[f"{site}.precision"] = precision
                found[f"{site}.info"] = steps[f"{site}.info"] / scale + precision * self.start(site)
            elif site in steps:
                found[site] = steps[site] * self.scale(site) + self.start(site)
        tensors = {name: value.float() for name, value in found.items()}
        if "backbone" in steps or "backbone.info" in steps:
            tensors["buffers"] = self.state["buffers"]
        named = {name: count for name, count in counts.items() if name}
        return replace(update, samples=sum(counts.values()), counts=named, tensors=tensors)


def length_of(steps: Steps) -> float:
    """|x|."""
    return math.sqrt(sum(float(step.square().sum()) for step in steps.values()))


def clipped(steps: Steps, clip: float) -> Steps:
    """x min(1, C / |x|)."""
    length = length_of(steps)
    shorter = min(1.0, clip / length) if length else 1.0
    return {name: shorter * step for name, step in steps.items()}


def longest(steps: Steps, clip: float, noise: float) -> float:
    """C (1 + z (sqrt(dim) + 5)): how long an answer with noise of its own can be."""
    numbers = sum(step.numel() for step in steps.values())
    return clip * (1 + noise * (math.sqrt(numbers) + BEYOND))


def noised(steps: Steps, deviation: float, seed: int) -> Steps:
    """x + N(0, deviation^2 I), from a seed that nobody can guess."""
    if not deviation:
        return steps
    source = torch.Generator().manual_seed(seed)
    return {
        name: step + deviation * torch.randn(step.shape, generator=source, dtype=step.dtype)
        for name, step in sorted(steps.items())
    }


def neutral(steps: Steps) -> Steps:
    """The answer of nobody."""
    return {name: torch.zeros_like(step) for name, step in steps.items()}


@dataclass(frozen=True)
class Protection:
    """What the server folds in one exchange: of everybody `asked` the same `counts`, clipped.

    Noise at the server is added to one of them, which is as good as to the sum.
    """

    privacy: Privacy
    question: Question
    asked: tuple[int, ...]
    counts: Mapping[str, int]
    statistics: bool
    seed: int

    def defect(self, update: Update) -> str | None:
        """Longer than what was clipped and then noised by its client, up to its rounding."""
        steps, clip = self.question.asked(update), self.privacy.clip_of(self.statistics)
        long, most = length_of(steps), longest(steps, clip, self.privacy.noise)
        return None if long <= ROUNDED * most else f"its length is {long:.3g}, at most {most:.3g}"

    def __call__(self, updates: Sequence[Update]) -> Iterator[Update]:
        """An update for each client asked; who sent none counts as 0."""
        at_server, clip = self.privacy.at == "server", self.privacy.clip_of(self.statistics)
        by_client = {update.client: update for update in updates}
        somebody = next(iter(by_client.values()))
        nothing = neutral(self.question.asked(somebody))
        for place, client in enumerate(self.asked):
            there = client in by_client
            steps = self.question.asked(by_client[client]) if there else nothing
            if at_server:
                steps = clipped(steps, clip)
            if at_server and not place:
                steps = noised(steps, self.privacy.noise * clip, self.seed)
            yield self.question.answer(steps, replace(somebody, client=client), self.counts)
