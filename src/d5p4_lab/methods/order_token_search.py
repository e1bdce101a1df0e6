"""Order-Token Search, a beam search over orders and tokens together (Shen et al., 2026, arXiv 2601.20339).

K beams start as K equal rows of masks. At the first step of every block, each beam has K children instead of one, all
drawn from the same forward: the draws of a child decide its tokens and, by their probabilities, its positions. The
draft x̂ of a child takes the child's draws at all masked positions. A child is scored by one forward in which only the
block b of its draft is masked:

    score = score of the beam + Σ_{i in b} log p(x̂_i | x̂ without b)

The K children with the largest scores go on. All other steps are ordinary: one child per beam. The answers are the K
beams at the end, the best score first. With S steps and L / B blocks this takes S K + (L / B) K^2 rows. Equal rows run
only once, as everywhere.

If there are no blocks, or if `segment` is given, the children are drawn whenever `segment` more positions are revealed,
and b consists of the `segment` positions that the order would reveal next, given the draws of the child.

Where the model is sure, the children of a beam are equal, so those of the best beam take all places, and the K answers
are one text.

The paper returns only the best beam, `k=1, spare=K-1`, with blocks of 32, L = 256, S = 128 and a tuned temperature.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from d5p4 import Choice, D5P4Error, Final, Kept, Option, PoolView, Settings, Step
from d5p4.decode.pool import Call, Pool
from d5p4.decode.schedule import Policy, Steps, sent
from d5p4.decode.view import ForwardView
from d5p4.ops.precision import steady_sum, wide
from d5p4.ops.ties import coarse, ranked
from d5p4.ops.vocab import vocab_stats
from d5p4.options import LARGEST_POOL, Checked
from d5p4.rng import hash_tokens, mix
from d5p4.search import Beam
from d5p4.search.children import candidates, drawn
from d5p4.types import block_of

SCORE = "score"
SEGMENTS = 8  # segments of an answer without blocks, as many as 256 tokens have blocks of 32


@dataclass(frozen=True)
class OrderTokenSearch(Checked, Beam):
    """Chooses every row. Where a segment begins, each row has K children, and the K best of all children are kept."""

    timeless, completes, constrains = True, False, False
    score_kind: ClassVar[str] = "log-probability of the segments in the drafts of an answer"
    sizes: ClassVar[dict[int, int]]  # the most positions of a segment of each prompt, by name
    segments: ClassVar[dict[tuple[int, int], int]]  # a number that changes where a segment begins, by name and step

    segment: Annotated[
        int | None,
        Option("Positions between two searches.", least=1, unset="a block, or 1/8 of the answer without blocks"),
    ] = None

    def check(self, settings: Settings) -> None:
        """Raise an error if children may not be drawn one by one, or if they are too many."""
        if settings.groups**2 > LARGEST_POOL:
            reason = f"with spare={settings.spare} makes {settings.groups**2} children per search"
            raise D5P4Error(f"{reason}, more than {LARGEST_POOL}; lower one of them", option="k", value=settings.k)
        if settings.distinct:
            reason = "does not fit method ots, whose children are told apart by their drafts; leave it out"
            raise D5P4Error(reason, option="distinct", value=True)

    def size(self, settings: Settings, length: int) -> int:
        """Return the most positions of a segment."""
        return self.segment or settings.block_length or -(-length // SEGMENTS)

    def cost(self, settings: Settings, steps: int) -> tuple[int, int]:
        """Return the forwards of a pool in all searches, and that no step compares candidates (see `Search`)."""
        length = max(steps, settings.gen_length or 0)  # segments count positions, of which a step may reveal several
        return settings.groups * min(steps, -(-length // self.size(settings, length))), 0

    def start(self, call: Call, schedules: Sequence[Policy], pool: Pool) -> Pool:
        pool, names = super().start(call, schedules, pool), pool.names.tolist()
        sizes = {name: self.size(call.settings, x.length) for name, x in zip(names, schedules, strict=True)}
        vars(self).update(sizes=vars(self).get("sizes", {}) | sizes, segments=vars(self).get("segments", {}))
        return replace(pool, state={SCORE: torch.zeros_like(pool.tie, dtype=wide(pool.tie.device))})

    def selecting(self, step: Step, name: int) -> bool:
        """Return whether a segment begins at this step, inside the selection window."""
        settings, facts = self.call.settings, step.facts
        revealed = step.stop - step.masked if facts is None else facts.decoded - -(-facts.left // facts.rows)
        number = step.start if self.segment is None and settings.block_length else revealed // self.sizes[name]
        self.segments[name, step.index] = number
        return number != self.segments.get((name, step.index - 1)) and step.within(settings.select_window)

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        return pool.stay()._replace(children=k)

    def offspring(self, view: ForwardView, now: Steps, choice: Choice) -> Pool:
        """Return the children with the largest scores, as many as there are parents."""
        children, count = super().offspring(view, now, choice), choice.children
        if count == 1:
            return children
        score = children.state[SCORE] + self.gains(view, now, choice, children)
        number = torch.arange(children.size, device=score.device)
        copies = view.pool.complete.repeat_interleave(count, 1) & (number % count > 0)  # of complete rows
        best = ranked(score.masked_fill(copies, -torch.inf), children.tie)[:, : children.size // count]
        return replace(children, state={SCORE: score}).take(best.sort(-1).values)

    def gains(self, view: ForwardView, now: Steps, choice: Choice, children: Pool) -> Tensor:
        """Return Σ log p [P, N] over the segment of the draft of each child, 0 if the segment has no open position."""
        call, parents = self.call, self.parents(view.pool, view.hidden, choice)
        draw, count = self.drawing(view.pool, choice, parents, now), choice.children
        width, length, sizes = now.stop - now.start, parents.tokens.shape[2], [self.sizes[name] for name in now.names]
        block = replace(now, masked=width, reveal=width, reveals=None, exact=False)
        window = replace(block, start=0, stop=length, starts=None, stops=None, masked=length, reveal=length)
        # In a block-causal model, what is behind the block has no effect on it.
        reveal_all = block if block_of(call.model) else window
        draft = drawn(parents, reveal_all, replace(draw, rule=None), count).tokens.flatten(1, 2)
        seen = candidates(parents, block, draw, count, draw.start)
        assert seen.valid is not None
        place, inside = (x.flatten(1, 2)[..., : max(sizes)] for x in (seen.place, seen.valid))
        inside = inside & (torch.arange(place.shape[2], device=place.device) < sent(sizes, place.device)[:, None, None])
        masked = torch.zeros_like(draft, dtype=torch.bool).scatter(2, place, inside)
        tokens = draft.masked_fill(masked, call.model.mask_id)
        name = hash_tokens(tokens, children.positions[:, None])
        name = torch.where(inside.any(-1), name, mix(name, children.tie, -1))  # what is not run equals nothing that is
        hidden = view.run(replace(children, tokens=tokens, undecided=masked, row_hash=name))
        drafts = replace(parents, states=hidden.states, slot=hidden.slot, compute=hidden.compute)
        given = draft.gather(2, place).view(-1, 1)
        stats = drafts.read_table(place, lambda states, token: vocab_stats(states, call.head, (), token), given)
        finite = (stats["logsumexp"].isfinite().view_as(inside) | ~inside).all(-1)
        call.checks.expect_finite(finite.flatten(), children.names, torch.ones_like(finite).nonzero(), children.step)
        return steady_sum(torch.where(inside, stats["token"].view_as(inside), 0.0).to(wide(place.device)))

    def finish(self, final: Final, k: int) -> Kept:
        """Return the k rows with the largest scores. One beam has no children to compare, so nothing was scored."""
        if final.tie.shape[1] == 1:
            return Kept(ranked(torch.zeros_like(final.tie), final.tie))
        score = coarse(final.state[SCORE])  # rounded, so that scores that count as tied are equal
        rows = ranked(score, final.tie)[:, :k]
        return Kept(rows, score.gather(1, rows))
