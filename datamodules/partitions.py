"""Who owns which image: pure functions from labels and clients to one owner for every image."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from datamodules.scenarios import Integers
from fedbnn.seeds import address


def draws(seed: int, *path: int | str) -> np.random.Generator:
    """A numpy generator of its own for the address `path`."""
    return np.random.default_rng(address(seed, *path))


@dataclass(frozen=True)
class Assignment:
    """Images sorted by owner, so that the images of a client are one slice, however many clients there are."""

    images: Integers
    owners: Integers

    @classmethod
    def of(cls, images: Integers, owners: Integers) -> "Assignment":
        """From images and the owner of each, in any order."""
        order = np.argsort(owners, kind="stable")
        return cls(images[order], owners[order])

    def images_of(self, client: int) -> Integers:
        """The images of one client."""
        first, last = np.searchsorted(self.owners, (client, client + 1))
        return self.images[first:last]


def preference(seed: int, label: int, clients: int, alpha: float) -> NDArray[np.float64]:
    """ln g_k of every client for one class, g_k ~ Gamma(alpha), drawn as Gamma(alpha + 1) U^(1/alpha) so it never underflows.

    Normalised over *any* subset of clients, g is Dirichlet(alpha) there: a client keeps its taste whoever else is around.
    """
    random = draws(seed, "preference", label)
    return np.asarray(
        np.log(random.gamma(alpha + 1, size=clients)) + np.log1p(-random.random(clients)) / alpha
    )


def dirichlet(
    labels: Integers, members: Integers, clients: int, alpha: float, seed: int
) -> Integers:
    """Each class is cut over the members in proportions ~ Dirichlet(alpha): image j of n goes where (j + 1/2) / n falls."""
    owners = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        images = draws(seed, "order", int(label)).permutation(np.flatnonzero(labels == label))
        taste = preference(seed, int(label), clients, alpha)[members]
        ladder = np.cumsum(np.exp(taste - taste.max()))
        place = (np.arange(len(images)) + 0.5) / len(images) * ladder[-1]
        owners[images] = members[np.searchsorted(ladder, place, side="right")]
    return owners


def iid(labels: Integers, members: Integers, seed: int) -> Integers:
    """Images in random order are dealt like cards: sizes differ by at most one."""
    random = draws(seed, "deal")
    owners = np.empty(len(labels), np.int64)
    owners[random.permutation(len(labels))] = random.permutation(members)[
        np.arange(len(labels)) % len(members)
    ]
    return owners


def shards(labels: Integers, members: Integers, each: int, seed: int) -> Integers:
    """Images sorted by class are cut into `each` equal pieces a member, and the pieces are dealt at random."""
    random = draws(seed, "shards")
    mixed = random.permutation(len(labels))
    by_class = mixed[np.argsort(labels[mixed], kind="stable")]
    pieces = random.permutation(np.repeat(members, each))
    owners = np.empty(len(labels), np.int64)
    owners[by_class] = pieces[np.arange(len(labels)) * len(pieces) // max(len(labels), 1)]
    return owners


@dataclass(frozen=True)
class Partition:
    """How the images of a task are divided among the clients on it."""

    kind: str
    alpha: float
    shards_per_client: int

    def owners(self, labels: Integers, members: Integers, clients: int, seed: int) -> Integers:
        """The owner of each image; `members` are those of the `clients` that take part."""
        ways: dict[str, Callable[[], Integers]] = {
            "dirichlet": lambda: dirichlet(labels, members, clients, self.alpha, seed),
            "iid": lambda: iid(labels, members, seed),
            "shards": lambda: shards(labels, members, self.shards_per_client, seed),
        }
        return ways[self.kind]()
