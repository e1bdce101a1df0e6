"""Orders decide which open positions are revealed first: those with the largest priority, which an order computes.

    confidence   probability of the drawn token (draws first)
    tempered     m of the 2m most confident positions, drawn by softmax(confidence / T) (draws first)
    top          largest probability of any token
    margin       largest minus second largest probability
    entropy      minus the entropy
    left         the leftmost position
    random       a keyed uniform number
    ancestral    MDLM's own rule, which has no priority: see `search.children`

All values are taken from the temperature-1, unfiltered distribution, so that temperature does not change the order.

An order that draws first looks at the drawn tokens. It suppresses unlikely tokens: if m positions are open and every
one has a top token of probability c > 1/2, it reveals another token only if all m draws are not the top token, which
happens with probability (1 - c)^m. The other orders look at the state alone ("position first"). They choose the
position and then draw its token, which is not the top token with probability 1 - c.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..ops.ties import coarse
from ..options import Registered, Registry
from ..rng import gumbel


@dataclass(frozen=True)
class Seen:
    """What an order sees of M open positions. All tensors broadcast to [P, m, C, M]: m parents with C children each."""

    stats: dict[str, Tensor]  # statistics of the distributions by name (see `ops.vocab`); "token": of the drawn token
    place: Tensor  # the index of each position in the window
    noise: Callable[[], Tensor]  # returns a keyed uniform number for each position of each child
    reveal: int  # the most positions that are revealed
    temperature: float  # the option order_temperature
    last: Tensor | None = None  # bool, True at end-of-text tokens that must come last (eos="last")
    open: Tensor | None = None  # bool, False at padding behind the open positions; None: all are open
    reveals: Tensor | None = None  # [P] the most positions that are revealed, if prompts differ


@dataclass(frozen=True)
class Order(Registered):
    """An order. `priority(seen)` returns the priority of each position, [P, m, C, M].

    statistics   the statistics that `priority` reads
    draws_first  whether the order looks at the drawn tokens. Reveal rules then test the drawn token's probability
    random       whether the order itself is random, so that answers differ even at temperature 0
    least        the priority of end-of-text tokens if eos="last"; None if `priority` reads `seen.last`
    """

    registry: ClassVar[Registry] = Registry("order")

    name: str
    priority: Callable[[Seen], Tensor]
    summary: str = ""
    statistics: tuple[str, ...] = ()
    draws_first: bool = False
    random: bool = False
    least: float | None = -torch.inf


def _confidence(seen: Seen) -> Tensor:
    return seen.stats["token"].exp()


def _tempered(seen: Seen) -> Tensor:
    """Return confidence / T + Gumbel noise. All but the 2 * reveal most confident positions get minus infinity."""
    priority = _confidence(seen)
    priority = priority if seen.last is None else priority.masked_fill(seen.last, 0.0)
    if seen.temperature == 0:
        return priority
    noise, reveals = seen.noise(), seen.reveal if seen.reveals is None else seen.reveals.view(-1, 1, 1, 1)
    among = priority if seen.open is None else priority.masked_fill(~seen.open, -torch.inf)
    keep = coarse(among).sort(dim=-1, descending=True, stable=True).indices
    few = (torch.arange(keep.shape[-1], device=keep.device) < 2 * reveals).expand_as(keep)
    support = torch.zeros_like(few).scatter(-1, keep, few)
    shaken = (priority.to(noise.dtype) - priority.amax(-1, keepdim=True)) / seen.temperature + gumbel(noise)
    return shaken.masked_fill(~support, -torch.inf)


for _order in (
    Order("confidence", _confidence, "the drawn token's probability, largest first", draws_first=True, least=0.0),
    Order("top", lambda seen: seen.stats["best"].exp(), "the largest probability first", ("best",), least=0.0),
    Order("margin", lambda seen: seen.stats["margin"], "the largest lead over the second", ("margin",), least=0.0),
    Order("entropy", lambda seen: -seen.stats["entropy"], "the lowest entropy first", ("entropy",)),
    Order("left", lambda seen: -seen.place.to(seen.stats["token"].dtype), "left to right"),
    Order("random", lambda seen: seen.noise(), "in random order", random=True, least=0.0),
    Order("tempered", _tempered, "confidence with noise", draws_first=True, random=True, least=None),
    Order("ancestral", lambda seen: seen.noise(), "MDLM's own rule: every position by chance", random=True),
):
    Order.registry.add(_order)
