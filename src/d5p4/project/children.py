"""Children of the chosen parents: drawn (the paper), drawn and distinct, or enumerated (for searches over a tree).

drawn       a token is drawn for every open position of every child. The child reveals the positions that the order
            and the reveal rule accept. The head runs on open positions only
distinct    more children are drawn than needed. The parents take turns in the order of their tie hashes, and each
            keeps its first children that differ from each other and from every child already kept. If these are too
            few, some of them are repeated
enumerated  accepted positions take their most probable token. One more position branches: its children take its most
            probable tokens. This needs an order that looks at the state alone, so that all children differ
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..ops.sample import draw as draw_tokens
from ..ops.sample import filter_logits
from ..ops.ties import coarse
from ..ops.vocab import logits_of
from ..rng import ORDER, TOKEN, mix, uniform
from ..types import Head
from .orders import Order, Seen
from .reveal import Sequence

if TYPE_CHECKING:
    from ..decode.schedule import Step

CHILDREN = ("drawn", "distinct", "enumerated")


@dataclass(frozen=True)
class Parents:
    """The chosen parents whose hidden states are in this process: m per prompt, or a G x q table (see `beams`)."""

    tokens: Tensor  # [P, m, L] the token ids of each parent
    states: Tensor  # [U, L, D] hidden states of U rows at the L positions of the window
    slot: Tensor  # [P, m] the row of `states` that belongs to each parent
    positions: Tensor  # [P, L] each position's distance from the first token that is not padding
    stream: Tensor  # [P, m] seeds of random numbers, mixed from seed, prompt, step, tokens, number among equal parents
    open: Callable[[], Tensor] | None = None  # returns the open positions [P, m, L]; None means all masked ones
    prompt: Tensor | None = None  # [P] the index of each prompt in the tensors of the step

    def keyed(self, purpose: int) -> Tensor:
        """Return one random stream per parent [P, m]. Different values of `purpose` give independent streams."""
        return mix(self.stream, purpose)

    def places(self, step: Step, mask_id: int) -> tuple[Tensor, Tensor | None]:
        """Return the open positions [P, m, M] of the block, and which of them are valid (None: all).

        M is `step.masked`. A row with fewer open positions has other positions behind its open ones, marked as not
        valid, so that the sizes of all tensors are known without reading numbers from the device.
        """
        if step.exact or self.open is None:
            masked = self.tokens[..., step.start : step.stop] == mask_id
            place = masked.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., : step.masked]
            return place + step.start, None
        block = step.block(self.tokens.shape[-1], self.tokens.device)
        inside = block if self.prompt is None or len(block) == 1 else block[self.prompt]
        opened = self.open() & inside[:, None]
        place = opened.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., : step.masked]
        return place, opened.gather(2, place)


@dataclass(frozen=True)
class Draw:
    """The options that say how tokens are drawn and in which order positions are revealed."""

    head: Head
    mask_id: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    order: str = "confidence"
    worth: Callable[[Seen], Tensor] | None = None  # the order with its parameters, if it has any
    order_temperature: float = 0.1
    last_ids: Tensor | None = None  # ids of the tokens to reveal last: end-of-text if eos="last"
    rule: Callable[[Sequence], Tensor] | None = None  # an adaptive reveal rule
    statistics: tuple[str, ...] = ()  # the statistics that the rule reads
    start: float | None = None  # start="entropy": the temperature of the first reveal


class Children(NamedTuple):
    """The C children of each parent."""

    tokens: Tensor  # [P, m, C, L] the token ids of each child
    logprob: Tensor  # [P, m, C, L] log p (temperature 1, unfiltered) of the tokens revealed in this step, 0 elsewhere
    finite: Tensor  # [P, m] bool: whether all logits from which a parent's tokens were drawn are finite


Projection = Callable[[Parents, "Step", Draw, int], Children]
"""`project(parents, step, draw, count)` returns `count` children of each parent."""


def drawn(parents: Parents, step: Step, draw: Draw, count: int) -> Children:
    """Return `count` drawn children of each parent."""
    look = _look(parents, step, draw, count)
    if look.accepted is None:
        best = look.best[..., : step.reveal]
        return look.children(best, None)
    return look.children(look.best, look.accepted)


def enumerated(parents: Parents, step: Step, draw: Draw, count: int) -> Children:
    """Return the children of each parent that take the `count` most probable tokens at the next position.

    A schedule that reveals m positions accepts m - 1 positions, and an adaptive rule accepts what it accepts. The next
    position of the order's sequence branches. A row with fewer tokens than `count` repeats its last child.
    """
    look = _look(parents, step, draw, 1, enumerates=True)
    number = torch.arange(look.best.shape[-1], device=look.best.device)
    accepted = look.accepted
    if accepted is None:
        accepted = (number < step.reveal).expand(look.best.shape)
    last = (accepted * (number + 1)).amax(-1, keepdim=True) - 1  # the last accepted position of the sequence
    branch = last.clamp_min(0)
    if draw.rule is not None:  # the first position that is not accepted branches, if there is one
        waiting = ~accepted if look.valid is None else ~accepted & look.valid[:, :, None].gather(3, look.best)
        branch = torch.where(waiting.any(-1, keepdim=True), waiting.to(torch.uint8).argmax(-1, keepdim=True), branch)
    base = look.children(look.best, accepted & (number != branch))
    place = look.place[:, :, None].gather(3, look.best).gather(3, branch)  # [P, m, 1, 1]
    states = parents.states[parents.slot[..., None], place[:, :, 0]].flatten(0, 2)
    head = draw.head
    logits = logits_of(states, head.weight, head.bias, head.banned)
    best, token = filter_logits(logits, draw.top_k, draw.top_p).topk(min(count, logits.shape[-1]), -1)
    chance = logits.log_softmax(-1).gather(1, token)
    most = (best > -torch.inf).sum(-1, keepdim=True).clamp_min(1) - 1
    child = torch.minimum(torch.arange(count, device=token.device), most)
    token, chance = (x.gather(1, child).view(*parents.slot.shape, count, 1) for x in (token, chance))
    where = place.expand(-1, -1, count, -1)
    rows, logprob = (x.expand(-1, -1, count, -1) for x in (base.tokens, base.logprob))
    done = rows.gather(3, where) != draw.mask_id  # a complete row has nothing to branch
    token = torch.where(done, rows.gather(3, where), token)
    chance = torch.where(done, logprob.gather(3, where), chance.to(logprob.dtype))
    return Children(rows.scatter(3, where, token), logprob.scatter(3, where, chance), base.finite)


class _Look(NamedTuple):
    """The open positions of each parent with drawn tokens, in the sequence of the order."""

    parents: Parents
    shape: tuple[int, int, int]  # P, m, M
    place: Tensor  # [P, m, M]
    valid: Tensor | None  # [P, m, M]
    token: Tensor  # [R, C] with R = P m M
    stats: dict[str, Tensor]
    best: Tensor  # [P, m, C, M] the positions in the sequence of the order
    accepted: Tensor | None  # [P, m, C, M] which positions of the sequence are revealed; None: the first step.reveal

    def table(self, values: Tensor) -> Tensor:
        """Return values [R, C] or [R] as [P, m, C, M]."""
        return values.view(*self.shape, 1 if values.ndim == 1 else values.shape[1]).transpose(2, 3)

    def children(self, best: Tensor, accepted: Tensor | None) -> Children:
        """Return the children that reveal the positions `best`, or those of them that are accepted."""
        count = best.shape[2]
        where = self.place[:, :, None].expand(*self.shape[:2], count, -1).gather(3, best)
        rows = self.parents.tokens[:, :, None].expand(-1, -1, count, -1)
        token, chance = self.table(self.token).gather(3, best), self.table(self.stats["token"]).gather(3, best)
        if accepted is not None:
            token = torch.where(accepted, token, rows.gather(3, where))
            chance = torch.where(accepted, chance, 0.0)
        finite = self.stats["logsumexp"].isfinite().view(self.shape)
        finite = (finite if self.valid is None else finite | ~self.valid).all(-1)
        logprob = self.stats["token"].new_zeros(rows.shape).scatter(3, where, chance)
        return Children(rows.scatter(3, where, token), logprob, finite)


def _look(parents: Parents, step: Step, draw: Draw, count: int, enumerates: bool = False) -> _Look:
    """Draw `count` tokens for each open position, and put the positions into the sequence of the order. An adaptive
    rule accepts at least one position, unless children are enumerated, which takes the likeliest tokens."""
    order: Order = Order.registry[draw.order]
    place, valid = parents.places(step, draw.mask_id)
    shape = (place.shape[0], place.shape[1], place.shape[2])
    child = torch.arange(count, device=place.device)
    position = parents.positions[:, None].expand_as(parents.tokens).gather(2, place)[..., None]

    def keyed_uniform(purpose: int) -> Tensor:
        return uniform(parents.keyed(purpose)[..., None, None], position, child)  # [P, m, M, C]

    start = draw.start is not None and step.index == 0
    want = {*order.statistics, *draw.statistics}
    want |= {"entropy"} if start else set()
    want |= {"best"} if draw.rule is not None and not order.draws_first else set()
    head = draw.head
    token, stats = draw_tokens(
        parents.states[parents.slot[..., None], place].flatten(0, 2),
        head.weight,
        head.bias,
        head.banned,
        keyed_uniform(TOKEN).flatten(0, 2),
        0.0 if enumerates else draw.start if start and draw.start is not None else draw.temperature,
        draw.top_k,
        draw.top_p,
        tuple(sorted(want)),
        head.fixed,
    )
    look = _Look(parents, shape, place, valid, token, stats, place[:, :, None], None)
    tables = {name: look.table(values) for name, values in stats.items() if name in ("token", *want)}
    ends = None if draw.last_ids is None else torch.isin(look.table(token), draw.last_ids)
    worth = (draw.worth or order.worth)(
        Seen(
            tables,
            place[:, :, None],
            lambda: keyed_uniform(ORDER).transpose(2, 3),
            step.reveal,
            draw.order_temperature,
            ends,
        )
    ).expand(*shape[:2], count, -1)
    if ends is not None and order.least is not None:
        worth = worth.masked_fill(ends, order.least)
    if valid is not None:
        worth = worth.masked_fill(~valid[:, :, None], -torch.inf)
    if start:
        least_sure = coarse(tables["entropy"]).argmax(-1, keepdim=True)
        worth = worth.scatter(3, least_sure.expand(*worth.shape[:3], 1), torch.inf)
    best = coarse(worth).sort(dim=-1, descending=True, stable=True).indices
    accepted = _accept(look._replace(best=best), step, draw, order, tables, ends, start, 0 if enumerates else 1)
    return look._replace(best=best, accepted=accepted)


def _accept(
    look: _Look,
    step: Step,
    draw: Draw,
    order: Order,
    tables: dict[str, Tensor],
    ends: Tensor | None,
    start: bool,
    least: int,
) -> Tensor | None:
    """Return which positions of the sequence are revealed, [P, m, C, M], or None for the first `step.reveal`."""
    best = look.best
    number = torch.arange(best.shape[-1], device=best.device)
    valid = None if look.valid is None else look.valid[:, :, None].expand(best.shape).gather(3, best)
    if draw.rule is None:
        return None if valid is None else valid & (number < step.reveal)
    sure = tables["token" if order.draws_first else "best"].exp().clamp_max(1)
    ordered = {name: tables[name].expand(best.shape).gather(3, best) for name in draw.statistics}
    accepted = draw.rule(Sequence(sure.expand(best.shape).gather(3, best), ordered)) & (not start)
    accepted = accepted if valid is None else accepted & valid
    if ends is not None:  # an end-of-text token must wait for every open position before it
        here = torch.zeros_like(accepted).scatter(3, best, accepted)  # in the order of the window
        waiting = ~here if look.valid is None else ~here & look.valid[:, :, None]
        accepted = accepted & ~(ends & (waiting.cumsum(-1) > 0)).gather(3, best)
    first = (number < least).expand(best.shape)
    return accepted | (first if valid is None else first & valid)


def distinct_children(child_hash: Tensor, tie: Tensor, keep: int) -> Tensor:
    """Return the indices [P, m, keep] of kept children among C drawn ones. child_hash is [P, m, C], tie is [P, m]."""
    prompts, parents, drawn = child_hash.shape
    chosen = torch.zeros(prompts, parents, keep, dtype=torch.int64, device=tie.device)
    row = torch.arange(prompts, device=tie.device)
    turn = tie.argsort(dim=-1, stable=True)
    taken = child_hash.new_zeros(prompts, 0)
    taken_ok = taken.bool()
    for place in range(parents):
        parent = turn[:, place]
        hashes = child_hash[row, parent]  # [P, C]
        repeat = (hashes[:, :, None] == hashes[:, None, :]).tril(-1).any(-1)
        seen = ((hashes[:, :, None] == taken[:, None, :]) & taken_ok[:, None, :]).any(-1)
        new = ~(repeat | seen)
        new &= new.cumsum(-1) <= keep
        order = (~new).to(torch.uint8).argsort(dim=-1, stable=True)[:, :keep]  # new children first, in drawn order
        count = new.sum(-1, keepdim=True)
        slot = torch.arange(keep, device=tie.device) % count.clamp_min(1)
        picked = order.gather(1, slot) * (count > 0)
        chosen[row, parent] = picked
        taken = torch.cat([taken, hashes.gather(1, picked)], 1)
        taken_ok = torch.cat([taken_ok, (count > 0).expand(-1, keep)], 1)
    return chosen
