"""The classifier a client trains: the rows of the classes it holds, from the server's library or from its own."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedbnn.bayes.flatten import Layout
from fedbnn.heads import library
from fedbnn.methods import FedBNN, Method
from fedbnn.networks import Classifier
from fedbnn.state import State


@dataclass(frozen=True)
class Assembly:
    """Rows of the library in the order of `classes`; the first `sent` of them are the client's own classes."""

    holder: State
    classes: tuple[str, ...]
    sent: int

    @property
    def index(self) -> Tensor:
        """Places of these rows in the library."""
        return self.holder.index(self.classes)

    @property
    def rows(self) -> Tensor:
        """Weights and bias (means, once Bayesian)."""
        return self.holder["rows"][self.index]

    @property
    def scales(self) -> Tensor:
        """Scales of the rows."""
        return self.holder["rows.scale"][self.index]

    @property
    def fresh(self) -> Tensor:
        """Which rows nobody has trained yet."""
        return library.fresh(self.holder, self.classes)

    def classifier(self, backbone: nn.Module) -> Classifier:
        """A classifier with these rows on this backbone."""
        network = Classifier(backbone, len(self.classes))
        write_rows(network, self.rows)
        return network


def assemble(
    state: State, held: tuple[str, ...], method: Method, private: State | None, width: int
) -> Assembly:
    """The rows for the classes `held`, and with `scope: seen` those of all other trained classes behind them."""
    holder = state if method.share == "global" else _own(state, held, method, private, width)
    return Assembly(holder, method.softmax(holder, held), len(held))


def _own(
    state: State, held: tuple[str, ...], method: Method, private: State | None, width: int
) -> State:
    """The client's own library, made a posterior when the backbone is one, with rows for what it holds now."""
    own = private or State(library.empty(width))
    scale = method.row_scale(width) if isinstance(method, FedBNN) and state.bayesian else None
    if scale is not None and "rows.scale" not in own:
        own = own.having({"rows.scale": torch.full_like(own["rows"], scale)})
    return library.grow(own, held, scale)


def read_rows(network: Classifier) -> Tensor:
    """The rows of a classifier: weights and bias side by side."""
    return torch.cat([network.head.weight.detach(), network.head.bias.detach()[:, None]], 1)


def write_rows(network: Classifier, rows: Tensor) -> None:
    """Set the rows of a classifier."""
    with torch.no_grad():
        network.head.weight.copy_(rows[:, :-1])
        network.head.bias.copy_(rows[:, -1])


def load_backbone(backbone: nn.Module, layout: Layout, state: State) -> None:
    """Put the weights (means, once Bayesian) and statistics of a state into a backbone."""
    layout.write(backbone, state["backbone"], state["buffers"])
