"""Children that a method rates by a forward of its own before it keeps K of them (Order-Token Search in the lab).

A `DraftSearch` has two functions. `segment_of(start, revealed, length, block)` returns a whole number for a prompt
whose block begins at the window position `start` and whose rows have revealed `revealed` of `length` positions.
Whenever this whole number changes, a segment begins, and the method chooses. If it chooses more than one child per
parent, `rate(drafts)` returns what each child adds to its score. The children with the K largest scores are kept,
before any of them is run. Between segments, every row has one child. `Final.state["score"]` has the scores at the end.

A draft is what a child would be if its step had revealed all open positions. The rows that `Drafts.logprob` runs count
like the rows of a pool: equal rows count once, and rows of complete parents do not count. As before every forward, the
host waits for the device to learn which rows differ. Every rank runs all drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from d5p4 import PoolView
from d5p4.decode.pool import Call, Pool, pick
from d5p4.decode.rows import Rows, guide
from d5p4.decode.schedule import Facts, Policy, Step
from d5p4.decode.view import Cost
from d5p4.methods import Beam
from d5p4.ops.precision import wide
from d5p4.ops.ties import first_equal, ranked
from d5p4.ops.vocab import vocab_stats
from d5p4.project.children import Draw, Parents, candidates
from d5p4.rng import TOKEN, hash_tokens, mix, uniform
from d5p4.types import Choice, block_of

if TYPE_CHECKING:
    from d5p4.decode.rows import WindowHidden
    from d5p4.decode.view import ForwardView

SCORE = "score"
SEGMENTS = 8  # segments of an answer without blocks, as many as 256 tokens have blocks of 32


@dataclass(frozen=True)
class Drafts:
    """The children of the m parents of P prompts, C per parent: M = m C rows."""

    tokens: Tensor  # [P, M, L] the drafts
    place: Tensor  # [P, M, n] the open positions of the block, in the sequence in which the order would reveal them
    valid: Tensor  # [P, M, n] bool: False at the padding that follows the open positions of a row
    blocks: bool  # whether the answer has blocks
    needed: Tensor  # [P, M] bool: False if no segment begins, or if the parent has no open position in the block
    pool: Pool  # the parents
    view: ForwardView
    step: int

    def logprob(self, count: int) -> Tensor:
        """Mask the first `count` positions of each sequence in the drafts, and run the drafts. Return the
        log-probabilities [P, M, count] of the masked tokens, 0 at the padding."""
        call, rows = self.pool.call, self.view.runner
        assert rows is not None
        place, valid = self.place[..., :count], self.valid[..., :count] & self.needed[..., None]
        masked = torch.zeros_like(self.tokens, dtype=torch.bool).scatter(2, place, valid)
        hidden = self.tokens.masked_fill(masked, call.model.mask_id)
        number = torch.arange(hidden.shape[1], device=place.device)
        name = hash_tokens(hidden, self.pool.positions[:, None])
        name = torch.where(self.needed, name, mix(name, number, -1))  # so that such a row equals no other
        first = first_equal(name) if call.settings.savings else number.expand_as(name)
        fresh = (first == number) & self.needed
        run, nominal = (x.sum(-1) * rows.passes for x in (fresh, self.needed))
        self.view.asked = Cost(run, nominal, run * rows.prompts.attention_mask.sum(-1))
        chosen = fresh.nonzero()  # waits for the device, because the size of the forward depends on the rows
        if not len(chosen):
            return torch.zeros_like(valid, dtype=wide(place.device))
        states = _states(rows, hidden[chosen.unbind(1)], chosen[:, 0])
        slot = (fresh.flatten().cumsum(0) - 1).view_as(fresh).gather(1, first).clamp_min(0)
        given = self.tokens.gather(2, place).reshape(-1, 1)
        picked = states[slot[..., None], place].flatten(0, 2)
        stats = vocab_stats(picked, call.head, (), given)
        finite = (stats["logsumexp"].isfinite().view_as(valid) | ~valid).all(-1)
        owner = torch.ones_like(finite).nonzero()
        call.checks.expect_finite(finite.flatten(), self.pool.names, owner, self.step)
        return torch.where(valid, stats["token"].view_as(valid), 0.0).to(wide(place.device))


def _states(rows: Rows, answers: Tensor, prompt: Tensor) -> Tensor:
    """Run answers [R, L] that are in no pool, without a cache, with the guidance of the last step. Return their states
    [R, L, D]. prompt [R]: the indices of their prompts."""
    parts = []
    for some, owner in zip(*(x.split(rows.conditional.whole.size) for x in (answers, prompt)), strict=True):
        states = rows.conditional.whole.microbatch(some, owner).states
        if rows.guided:
            guided = guide(states, rows.unconditional.whole.microbatch(some, owner).states, rows.scale)
            states = guided if rows.active is None else torch.where(rows.active[owner, None, None], guided, states)
        parts.append(states)
    return torch.cat(parts)


class DraftSearch(Beam):
    """A search whose rows have K children where a segment begins. It rates these and keeps K of all."""

    completes = False
    segments: dict[int, int]  # the segment of each prompt at its last step
    begins: Tensor  # [P] bool, the prompts of which a segment begins at this step

    def segment_of(self, start: int, revealed: int, length: int, block: int | None) -> int:
        raise NotImplementedError

    def rate(self, drafts: Drafts) -> Tensor:
        raise NotImplementedError

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        return pool.stay()._replace(children=k)

    def start(self, call: Call, schedule: Policy, pool: Pool) -> Pool:
        pool = super().start(call, schedule, pool)
        vars(self).update(segments={})
        return replace(pool, state={SCORE: torch.zeros_like(pool.tie, dtype=wide(pool.tie.device))})

    def selecting(self, pool: Pool, now: Step) -> list[bool]:
        """Return for which prompts a segment begins at this step, inside the selection window."""
        settings, names = self.call.settings, pool.names.tolist()
        length, block = self.schedule.length, settings.block_length
        places = [(now.start, now.stop - now.masked)] * len(names)
        if settings.adaptive:
            facts = [Facts(*numbers) for numbers in pool.facts(self.schedule.block).tolist()]
            places = [(fact.start, fact.decoded - -(-fact.left // fact.rows)) for fact in facts]
        inside = now.within(settings.select_window, len(names))
        new = [self.segment_of(*place, length, block) for place in places]
        begins = [x and self.segments.get(name) != n for x, name, n in zip(inside, names, new, strict=True)]
        device = pool.key.device
        vars(self).update(segments=dict(zip(names, new, strict=True)), begins=torch.tensor(begins, device=device))
        return begins

    def selected(self, pool: Pool) -> Tensor:
        return self.begins

    def offspring(self, view: ForwardView, now: Step, choice: Choice) -> Pool:
        """Return the children with the largest scores, as many as there are parents."""
        pool, count = view.pool, choice.children
        children = super().offspring(view, now, choice)
        if count == 1:
            return children
        child = torch.arange(count, device=pool.key.device)
        copies = pick(pool.complete, choice.parents)[..., None] & (child > 0)  # a complete row is its own only child
        drafts = self._drafts(pool, view.hidden, now, choice, view)
        score = children.state[SCORE] + self.rate(drafts)
        best = ranked(score.masked_fill(copies.flatten(1), -torch.inf), children.tie)
        return replace(children, state={SCORE: score}).take(best[:, : choice.parents.shape[1]].sort(-1).values)

    def _drafts(self, pool: Pool, hidden: WindowHidden, step: Step, choice: Choice, view: ForwardView) -> Drafts:
        parents = self.parents(pool, hidden, step, choice)
        place = torch.arange(pool.tokens.shape[2], device=pool.key.device)
        inside = (place >= step.start) & (place < step.stop) if step.starts is None else step.block(len(place))[:, None]
        # In a block-causal model, what is behind the block has no effect on it, and no states in a cache.
        opened = parents.open & inside if block_of(pool.call.model) else parents.open
        tokens, sequence, valid = _drafts(parents, step, self.draw, choice.children, opened)
        return Drafts(
            tokens=tokens.flatten(1, 2),
            place=sequence.flatten(1, 2),
            valid=valid.flatten(1, 2),
            blocks=pool.call.settings.block_length is not None,
            needed=(valid.any(-1) & self.begins[:, None, None]).flatten(1),
            pool=pool,
            view=view,
            step=step.index,
        )


def _drafts(parents: Parents, step: Step, draw: Draw, count: int, opened: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens [P, m, C, L] that `count` children of each parent would have if the step revealed the positions
    opened [P, m, L], the positions [P, m, C, M] of the block in the sequence of the order, and which of them are open.

    A child that is drawn at this step has the tokens of its draft at all positions that the step reveals.
    """
    place = parents.positions[:, None].expand_as(parents.tokens)[..., None]
    child = torch.arange(count, device=place.device)
    u = uniform(parents.keyed(TOKEN)[..., None, None], place, child)  # [P, m, L, C]
    temperature = draw.start if draw.start is not None and step.index == 0 else draw.temperature
    everywhere = torch.arange(place.shape[2], device=place.device).expand_as(parents.tokens)
    token = draw.at(parents, everywhere, None, u, temperature, ())["drawn"]
    token = torch.where(opened[:, :, None], token.view(u.shape).transpose(2, 3), parents.tokens[:, :, None])
    seen = candidates(parents, replace(step, reveal=step.masked), draw, count, temperature)
    return token, seen.place, torch.ones_like(seen.place, dtype=torch.bool) if seen.valid is None else seen.valid
