"""SOAR, a beam search over positions that speeds up where the model is sure (Cao et al., 2026, arXiv 2602.10953).

c_i is the largest probability at open position i, and every revealed token is the most probable one. A beam with
positions of c_i > tau reveals all of them at once. Any other beam has K children, one per position of the K largest
c_i. Of the children of all beams, equal rows are merged, and the K with the largest score are kept:

    score = Σ over steps of the mean c_i of the positions that the step revealed

A complete row keeps its score. If the best child comes from a sure beam (one with positions of c_i > tau), only this
child is kept (`shrink`). When its beam is no longer sure, its K children widen the search again. The answers are the
beams at the end, at most K = k + spare, best score first. There may be fewer than k: the search shrinks, and different
orders of positions lead to equal texts.

The rule "c_i > tau" is the option `reveal`; "largest c_i" is the option `order`. The paper has tau = 0.95 and K = 2 for
LLaDA and returns the best beam: `k=1, spare=1`. The published code reveals at most 5 sure positions per step, adds
their c_i instead of their mean, and shrinks as soon as any beam is sure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from d5p4 import Choice, D5P4Error, Final, Kept, Option, PoolView, Settings
from d5p4.decode.tree import Leaves
from d5p4.methods.tree import awake_rows
from d5p4.ops.precision import steady_sum, wide
from d5p4.ops.ties import coarse, ranked, repeats
from d5p4.options import Checked
from d5p4.rng import hash_tokens


@dataclass(frozen=True)
class SOAR(Checked):
    """Keeps every row that was run, and prunes the children before they are run."""

    shrink: Annotated[bool, Option("Keep only the best beam after a step that was sure.")] = True
    sums: Annotated[
        Literal["confidence", "logprob"], Option("What a beam adds up: mean probability per step, or log-probability.")
    ] = "confidence"

    score_kind: ClassVar[str] = "what SOAR adds up over the reveals of an answer"

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        return pool.keep(awake_rows(pool, k))

    def check_reveal(self, settings: Settings) -> None:
        """Raise an error if no reveal rule says which positions are sure, or if tokens are drawn."""
        if settings.temperature != 0:
            reason = "has no meaning for method soar, which takes the most probable token of a position; leave it out"
            raise D5P4Error(reason, option="temperature", value=settings.temperature)
        if not settings.reveal_spec.adaptive:
            reason = "does not say which positions are sure; use reveal='threshold' with tau, and no steps"
            raise D5P4Error(reason, option="reveal", value=settings.reveal)

    def gains(self, logprob: Tensor, new: Tensor) -> Tensor:
        """Return what rows add to their scores, [P, N], given log p [P, N, L] and which positions are new."""
        values = logprob.to(wide(logprob.device))
        if self.sums == "logprob":
            return steady_sum(values * new)
        return steady_sum(values.exp() * new) / new.sum(-1).clamp_min(1)

    def prune(self, leaves: Leaves, k: int, key: Tensor) -> Tensor:
        """Return the indices [P, k] of the leaves that are kept; -1 says that there is no row."""
        order = ranked(leaves.value, leaves.tie)
        place = torch.arange(leaves.tokens.shape[-1], device=order.device)
        gone = repeats(hash_tokens(leaves.tokens, place), order) | (leaves.value == -torch.inf)
        if self.shrink:
            best, number = order[:, :1], torch.arange(order.shape[1], device=order.device)
            gone = gone | ((leaves.state["sure"].gather(1, best) > 0) & (number != best))
        gone = gone.gather(1, order)
        first = gone.to(torch.uint8).argsort(dim=-1, stable=True)[:, :k]
        kept = torch.where(gone.gather(1, first), -1, order.gather(1, first))
        return torch.nn.functional.pad(kept, (0, k - kept.shape[1]), value=-1)

    def finish(self, final: Final, k: int, **_: object) -> Kept:
        """Return all rows with their scores, by which the answers are sorted."""
        place = torch.arange(final.tie.shape[1], device=final.tie.device)
        return Kept(place.expand_as(final.tie), coarse(final.state["value"]))
