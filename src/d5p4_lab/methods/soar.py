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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from d5p4 import Choice, D5P4Error, Final, Option, Settings
from d5p4.decode.pool import Call, Pool
from d5p4.decode.schedule import Policy, Steps
from d5p4.decode.view import ForwardView
from d5p4.ops.precision import steady_sum, wide
from d5p4.ops.ties import coarse, ranked, repeats
from d5p4.options import Checked
from d5p4.rng import hash_tokens
from d5p4.search import TreeSearch
from d5p4.search.children import Children, Draw, Parents, candidates


@dataclass(frozen=True)
class SOAR(Checked, TreeSearch):
    """Keeps every row that was run, and prunes the children before they are run."""

    shrink: Annotated[bool, Option("Keep only the best beam after a step that was sure.")] = True

    timeless, constrains = True, False
    score_kind: ClassVar[str] = "what SOAR adds up over the reveals of an answer"

    def check(self, settings: Settings) -> None:
        """Raise an error if no reveal rule says which positions are sure, or if tokens are drawn."""
        if settings.temperature != 0:
            reason = "has no meaning for method soar, which takes the most probable token of a position; leave it out"
            raise D5P4Error(reason, option="temperature", value=settings.temperature)
        if not settings.reveal_spec.adaptive:
            reason = "does not say which positions are sure; use reveal='threshold' with tau, and no steps"
            raise D5P4Error(reason, option="reveal", value=settings.reveal)

    def start(self, call: Call, schedules: Sequence[Policy], pool: Pool) -> Pool:
        pool = super().start(call, schedules, pool)
        vars(self).update(project=positions)
        return pool

    def choose(self, view: ForwardView) -> Choice:
        return super().choose(view)._replace(children=self.most)

    @property
    def most(self) -> int:
        return self.call.settings.groups

    def score(self, final: Final) -> Tensor:
        return coarse(final.state["value"])

    def value(self, children: Pool) -> Tensor:
        """Return the scores [P, N] of the children that the rule keeps, and -inf for all others."""
        call, tie = self.call, children.tie
        new = children.revealed == children.step[:, None, None]
        probability = children.logprob.to(wide(tie.device)).exp()
        gains = steady_sum(probability * new) / new.sum(-1).clamp_min(1)
        value = children.state["value"] + gains
        tokens = children.tokens
        shown = tokens.masked_fill(call.after_end(tokens, children), call.model.mask_id)
        order, place = ranked(value, tie), torch.arange(tokens.shape[-1], device=tie.device)
        gone = repeats(hash_tokens(shown, place), order) | (value == -torch.inf)
        if self.shrink:
            best, number = order[:, :1], torch.arange(order.shape[1], device=order.device)
            gone = gone | ((children.state["sure"].gather(1, best) > 0) & (number != best))
        value = value.masked_fill(gone, -torch.inf)
        kept = ranked(value, tie)[:, : call.settings.groups]
        return torch.full_like(value, -torch.inf).scatter(1, kept, value.gather(1, kept))


def positions(parents: Parents, step: Steps, draw: Draw, count: int) -> Children:
    """Return at most `count` children of each parent, which differ in the position that they reveal.

    If the reveal rule accepts positions, the row is *sure*, and its only child reveals all of them. Otherwise, child c
    reveals the position that is number c in the sequence of the order. Places without a child have the value -inf. A
    row without open positions is its own only child.
    """
    seen = candidates(parents, step, draw, 1, 0.0)
    assert seen.accepted is not None and seen.valid is not None
    child = torch.arange(count, device=seen.place.device)
    sure = seen.accepted.any(-1, keepdim=True)  # [P, m, 1, 1]
    number = torch.arange(seen.place.shape[-1], device=child.device) == child[:, None]  # [C, M]
    shown = torch.where(sure, seen.accepted & (child == 0)[:, None], seen.valid & number)  # [P, m, C, M]
    exists = shown.any(-1) | ((child == 0) & ~seen.valid.any(-1))
    state = {name: values[..., None].expand_as(exists) for name, values in parents.state.items()}
    state |= {"value": state["value"].masked_fill(~exists, -torch.inf)}
    state |= {"sure": sure[..., 0].expand_as(exists).to(state["value"].dtype)}
    return seen.expand(count).reveal(parents, shown)._replace(state=state)
