"""What a projection gets and gives: parents in, children out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..rng import mix
from ..types import Head, Step


@dataclass(frozen=True)
class Parents:
    """The chosen parents whose hidden rows are here: m of each of P prompts, or any grid of them."""

    tokens: Tensor  # [P, m, L]
    states: Tensor  # [U, L, D] hidden window rows
    slot: Tensor  # [P, m] which of the U a parent is
    positions: Tensor  # [P, L] counted from the first real token
    stream: Tensor  # [P, m] keyed by seed, prompt, step, the parent's tokens and its occurrence

    def keyed(self, purpose: int) -> Tensor:
        """[P, m] the streams for one purpose."""
        return mix(self.stream, purpose)


@dataclass(frozen=True)
class Draw:
    """How tokens are drawn and positions ordered."""

    head: Head
    mask_id: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    order: str = "confidence"
    order_temperature: float = 0.1
    last_ids: Tensor | None = None  # revealed last: end-of-text under eos="last"


class Children(NamedTuple):
    """C children of each parent."""

    tokens: Tensor  # [P, m, C, L]
    logprob: Tensor  # [P, m, C, L] of the tokens revealed now (temperature 1, unfiltered); 0 elsewhere
    finite: Tensor  # [P, m] bool: all logits drawn from were finite


Projection = Callable[[Parents, Step, Draw, int], Children]
"""`project(parents, step, draw, count)`: `count` children of each parent."""
