"""How wide the posterior is, in three numbers a site."""

import torch

from fedbnn.state import State

MOST = 1_000_000


def scale_quantiles(state: State) -> dict[str, dict[str, list[float]]] | None:
    """5 %, 50 % and 95 % quantiles of the scales of backbone and rows; None while weights are points."""
    if not state.bayesian:
        return None
    marks = torch.tensor([0.05, 0.5, 0.95])
    sites = {name: f"{name}.scale" for name in ("backbone", "prototypes")}
    found = {
        site: state[name].flatten()
        for site, name in sites.items()
        if name in state and state[name].numel()
    }
    return {
        "scale": {
            site: torch.quantile(values[:: -(-len(values) // MOST)], marks).tolist()
            for site, values in found.items()
        }
    }
