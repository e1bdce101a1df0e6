"""The arguments and the result of a projection, which draws the children of chosen parents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..rng import mix
from ..types import Head, Step


@dataclass(frozen=True)
class Parents:
    """The chosen parents whose hidden states are in this process: m per prompt, or a G x q table (see `beams`)."""

    tokens: Tensor  # [P, m, L] the token ids of each parent
    states: Tensor  # [U, L, D] hidden states of U rows at the L positions of the window
    slot: Tensor  # [P, m] the row of `states` that belongs to each parent
    positions: Tensor  # [P, L] each position's distance from the first token that is not padding
    stream: Tensor  # [P, m] seeds of random numbers, mixed from seed, prompt, step, tokens, number among equal parents

    def keyed(self, purpose: int) -> Tensor:
        """Return one random stream per parent [P, m]. Different values of `purpose` give independent streams."""
        return mix(self.stream, purpose)


@dataclass(frozen=True)
class Draw:
    """The options that say how tokens are drawn and in which order positions are revealed."""

    head: Head
    mask_id: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    order: str = "confidence"
    order_temperature: float = 0.1
    last_ids: Tensor | None = None  # ids of the tokens to reveal last: end-of-text if eos="last"


class Children(NamedTuple):
    """The C children of each parent."""

    tokens: Tensor  # [P, m, C, L] the token ids of each child
    logprob: Tensor  # [P, m, C, L] log p (temperature 1, unfiltered) of the tokens revealed in this step, 0 elsewhere
    finite: Tensor  # [P, m] bool: whether all logits from which a parent's tokens were drawn are finite


Projection = Callable[[Parents, Step, Draw, int], Children]
"""`project(parents, step, draw, count)` returns `count` children of each parent."""
