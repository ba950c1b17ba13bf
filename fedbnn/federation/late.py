"""Late is not lost: a likelihood does not expire, so the answer of a slow client is folded later.

    on time   q_1 = q_0 l_a l_b,    q_2 = q_1 l_c
    late      q_1 = q_0 l_a,        q_2 = q_1 l_b l_c       the same, where factors are multiplied

An answer that comes after its exchange has ended is compared with what was asked then, written to
the ledger, and folded with those of the next round, through the same gate. It is on disk before it
counts, so a round that is played again after a crash finds it where it was.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fedbnn.config.ranges import Count
from fedbnn.errors import ConfigError
from fedbnn.methods import FedBNN, Method
from fedbnn.methods.aggregation import TRAIN
from fedbnn.protocol.messages import FitResult, Refused, read_update


@dataclass(frozen=True)
class Late:
    """What becomes of answers that come after their round.

    Args:
        late: `fold` multiplies the factor of a slow client into the round after the one in which it
            comes; `refuse` does not wait for it. Engines that end a client at its deadline (all but
            Flower on sites) have no late answers.
        max_staleness: how many rounds after it was asked for a factor may still be used.
    """

    late: Literal["refuse", "fold"] = "refuse"
    max_staleness: Count = 3

    @property
    def rounds(self) -> int:
        """How many rounds an order outlives its own."""
        return self.max_staleness if self.late == "fold" else 0


def only_factors(method: Method) -> None:
    """Only factors can wait: weights and moments are worth nothing on another prior."""
    factors = isinstance(method, FedBNN) and method.fold_by != "moments"
    if not (factors and method.shares_prototypes):
        what = "only factors may come late, and this method sends none"
        fix = "use method fedbnn with fold_by product or scaled, or federation.late: refuse"
        raise ConfigError(what, "federation.late", fix)


@dataclass
class Order:
    """An instruction to train: its digest, and the clients that still owe an answer to it."""

    prior: str
    owing: set[int]


def check(answer: FitResult, asked: Mapping[int, Order], folded: int, most: int) -> Order:
    """The order it answers; raises `Refused` unless it owes that, and is not too many rounds late.

    `asked` has the orders by round, `folded` is the round in which it would count. Who was not
    asked, or has answered, on time or late, owes nothing: nobody counts twice.
    """
    update = read_update(answer.update)
    if (update.client, update.exchange) != (answer.client, TRAIN):
        raise Refused("late, and not an answer to train")
    order = asked.get(update.round)
    if order is None or order.prior != update.prior:
        raise Refused(f"late, and not an answer to what was asked in round {update.round}")
    if answer.client not in order.owing:
        raise Refused(f"late, and owes no answer of round {update.round}")
    if folded - update.round > most:
        raise Refused(f"{folded - update.round} rounds late, the most is {most}")
    return order
