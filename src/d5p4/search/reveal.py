"""Reveal rules decide which open positions of a row are revealed at a step: at least one per step.

The rule sees the positions in the sequence of the order: position 1 comes first. p_j is the probability that the rule
tests: of the drawn token if the order draws first, otherwise of the most probable token. H_j is the entropy.

    schedule        as many as the schedule says, the same number in every row
    threshold       all positions with p_j > tau; tau = 1 reveals one position per step
    factor          the longest prefix in which (j + 1)(1 - p_j) < factor for every j
    entropy-bound   the longest prefix in which H_1 + ... + H_j - max(H_1 ... H_j) <= entropy_bound for every j

Threshold and factor follow Fast-dLLM (Wu et al., 2025), the entropy bound follows Ben-Hamu et al. (2025).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from ..ops.precision import wide
from ..options import Checked, Option, Registered, Registry


@dataclass(frozen=True)
class OpenPositions:
    """The open positions of each child in the sequence of the order, [P, m, C, M]."""

    probability: Tensor
    stats: dict[str, Tensor]  # the statistics that the rule asked for
    open: Tensor  # bool: False at the padding that follows the open positions of a row


@dataclass(frozen=True)
class Reveal(Registered):
    """A reveal rule. `rule` is a dataclass whose fields are the rule's parameters. Its instances are called with
    `OpenPositions` and return which positions are accepted, a bool [P, m, C, M]. The first position is always accepted.

    statistics  the names of the statistics that the rule reads (see `ops.vocab`)
    """

    registry: ClassVar[Registry] = Registry("reveal")

    name: str
    rule: Callable[..., Any] | None
    summary: str = ""
    statistics: tuple[str, ...] = ()

    @property
    def adaptive(self) -> bool:
        """Whether rows reveal different numbers of positions."""
        return self.rule is not None


@dataclass(frozen=True)
class Threshold(Checked):
    tau: Annotated[float, Option("Reveal all positions with a probability above this.", above=0, most=1)] = 0.9

    def __call__(self, seen: OpenPositions) -> Tensor:
        return seen.probability > self.tau


@dataclass(frozen=True)
class Factor(Checked):
    factor: Annotated[float, Option("Reveal n positions if (n + 1)(1 - p_n) is below this.", above=0)] = 1.0

    def __call__(self, seen: OpenPositions) -> Tensor:
        number = torch.arange(seen.probability.shape[-1], device=seen.probability.device) + 2
        return prefix(number * (1 - seen.probability) < self.factor)


@dataclass(frozen=True)
class EntropyBound(Checked):
    entropy_bound: Annotated[float, Option("Bound on summed entropies less the largest, in nats.", least=0)] = 0.1

    def __call__(self, seen: OpenPositions) -> Tensor:
        entropy = seen.stats["entropy"].to(wide(seen.probability.device))
        return prefix(entropy.cumsum(-1) - entropy.cummax(-1).values <= self.entropy_bound + 1e-9)


@dataclass(frozen=True)
class Scheduled:
    """The schedule as a rule for the tree: of the m positions that a table reveals, the first m - 1 are accepted.

    reveals[p, n] is m for a row with n open positions in its block, so m depends on the prompt and the row alone.
    """

    reveals: Tensor  # [P, n + 1] int64

    def __call__(self, seen: OpenPositions) -> Tensor:
        number, count = torch.arange(seen.open.shape[-1], device=seen.open.device), seen.open.sum(-1)
        return number < self.reveals.gather(1, count.flatten(1)).view(*count.shape, 1) - 1


def prefix(accepted: Tensor) -> Tensor:
    """Return which positions are accepted together with all positions before them."""
    return accepted.to(torch.uint8).cumprod(-1).bool()


for _rule in (
    Reveal("schedule", None, "as many positions as the schedule says"),
    Reveal("threshold", Threshold, "all positions whose probability is above tau"),
    Reveal("factor", Factor, "the surer, the more positions"),
    Reveal("entropy-bound", EntropyBound, "positions of little joint entropy", ("entropy",)),
):
    Reveal.registry.add(_rule)
