"""Children of the chosen parents: drawn (the paper), or drawn and distinct. `search.enumerated` has those of a tree.

drawn       a token is drawn for every open position of every child. The child reveals the positions that the order
            and the reveal rule accept. The head runs on open positions only
distinct    more children are drawn than needed. The parents take turns in the order of their tie hashes, and each
            keeps its first children that differ from each other and from every child already kept. If these are too
            few, some of them are repeated
ancestral   the rule of MDLM: a step from time t to s < t fills each masked position with chance (t - s)/t. The
            positions are drawn first, so that the head runs only there (about L/steps positions per child)
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..constraint import Matchers
from ..decode.schedule import Steps, sent
from ..errors import D5P4Error
from ..ops.sample import NO_FILTERS, Filters, How
from ..ops.sample import draw as draw_tokens
from ..ops.ties import coarse
from ..rng import ORDER, TOKEN, mix, uniform
from ..types import Head
from .orders import Order, Seen
from .reveal import OpenPositions


@dataclass(frozen=True)
class Parents:
    """The m chosen parents of each prompt. `read` computes numbers from their hidden states."""

    tokens: Tensor  # [P, m, L] the token ids of each parent
    states: Tensor  # [u, L, D] hidden states of u rows at the L positions of the window
    slot: Tensor  # [P, m] the index of each parent among all rows that have states
    positions: Tensor  # [P, L] each position's distance from the first token that is not padding
    stream: Tensor  # [P, m] seeds of random numbers, mixed from seed, prompt, step, tokens, number among equal parents
    open: Tensor  # [P, m, L] bool, the open positions
    state: dict[str, Tensor] = field(default_factory=dict)  # [P, m] values that a method keeps for each row
    opened: Callable[[Tensor], Tensor] = lambda tokens: tokens < 0  # returns the open positions of rows [P, m, C, L]
    ends: Callable[[Tensor], Tensor] = lambda tokens: tokens < 0  # returns the end-of-text tokens behind the prompt
    compute: Callable[..., dict[str, Tensor]] = lambda slot, function, *given: function(slot, *given)  # `WindowHidden`
    masks: Tensor | None = None  # [P, m, M, W] the tokens that a constraint allows at the first M open positions
    matchers: Matchers | None = None  # of the constraint, if a reveal rule may reveal several positions of a row
    child: Tensor | None = None  # [P, m] which child of a parent each row stands for (see `repeat`)

    def read(
        self, slot: Tensor, place: Tensor, function: Callable[..., dict[str, Tensor]], *given: Tensor
    ) -> dict[str, Tensor]:
        """Return function(states [R, D], *given [R, ...]) for positions place [R] of the rows with the slots [R]."""
        return self.compute(slot, lambda row, place, *more: function(self.states[row, place], *more), place, *given)

    def read_table(
        self, place: Tensor, function: Callable[..., dict[str, Tensor]], *given: Tensor
    ) -> dict[str, Tensor]:
        """Do what `read` does, for the R = P m M positions place [P, m, M] of all parents. With a constraint, the
        function gets the masks [R, W], too."""
        if self.masks is not None:
            first = self.open.to(torch.uint8).argmax(-1, keepdim=True)
            number = (place - first).clamp(0, self.masks.shape[2] - 1)
            given = (
                *given,
                self.masks.gather(2, number[..., None].expand(*place.shape, self.masks.shape[3])).flatten(0, 2),
            )
        return self.read(self.slot[..., None].expand_as(place).flatten(), place.flatten(), function, *given)

    def repeat(self, count: int) -> Parents:
        """Return every parent `count` times. Each of these rows stands for one child of the parent."""
        names = ("tokens", "slot", "stream", "open", "masks")
        rows = {name: getattr(self, name).repeat_interleave(count, 1) for name in names}
        state = {name: values.repeat_interleave(count, 1) for name, values in self.state.items()}
        child = torch.arange(rows["slot"].shape[1], device=self.slot.device) % count
        return replace(self, **rows, state=state, child=child.expand_as(rows["slot"]))

    def keyed(self, purpose: int) -> Tensor:
        """Return one random stream per parent [P, m]. Different values of `purpose` give independent streams."""
        return mix(self.stream, purpose)


@dataclass(frozen=True)
class Draw:
    """The options that say how tokens are drawn and in which order positions are revealed."""

    head: Head
    mask_id: int
    temperature: float = 1.0
    filters: Filters = NO_FILTERS
    order: str = "confidence"
    order_temperature: float = 0.1
    priority: Callable[[Seen], Tensor] | None = None  # the order with its parameters, if it has any
    last_ids: Tensor | None = None  # ids of the tokens to reveal last: end-of-text if eos="last"
    rule: Callable[[OpenPositions], Tensor] | None = None  # an adaptive reveal rule
    statistics: tuple[str, ...] = ()  # the statistics that the rule reads
    start: float | None = None  # the temperature of the first reveal with start="entropy"; None at all other steps
    reserve: int = 0  # how many alternatives a row of a tree has; none if no position is ever accepted

    def tokens(self, states: Tensor, u: Tensor, masks: Tensor | None = None, *, how: How) -> dict[str, Tensor]:
        """Draw tokens [R, C] from states [R, D] with uniforms u [R, C]. Return them as "drawn", and statistics."""
        tokens, stats = draw_tokens(states, self.head, u, how, masks)
        return stats | {"drawn": tokens}

    def at(
        self,
        parents: Parents,
        place: Tensor,
        opened: Tensor | None,
        u: Tensor,
        temperature: float,
        statistics: Collection[str],
    ) -> dict[str, Tensor]:
        """Return what `tokens` does, the tokens as "drawn", for window positions place [P, m, M] and uniforms
        u [P, m, M, C]. opened [P, m, M] says which positions are open (None: all). A subclass may draw in another way,
        and return the model's own log-probability of each token as "token_logprob"."""
        draw = partial(self.tokens, how=(temperature, self.filters, statistics))
        return parents.read_table(place, draw, u.flatten(0, 2))


class Children(NamedTuple):
    """The C children of each parent."""

    tokens: Tensor  # [P, m, C, L] the token ids of each child
    logprob: Tensor  # [P, m, C, L] log p (temperature 1, unfiltered) of the tokens revealed in this step, 0 elsewhere
    finite: Tensor  # [P, m] bool: whether all logits from which a parent's tokens were drawn are finite
    comparable: Tensor | None = None  # [P, m] bool: whether the order gave every open position a number
    state: dict[str, Tensor] = {}  # [P, m, C] values that a method keeps for each row

    def take(self, index: Tensor) -> Children:
        """Return the children with the indices [P, m, c] among the C children of each parent."""
        index = index[..., None].expand(*index.shape, self.tokens.shape[-1])
        rows = {"tokens": self.tokens.gather(2, index), "logprob": self.logprob.gather(2, index)}
        return self._replace(**rows, state={name: x.gather(2, index[..., 0]) for name, x in self.state.items()})


Projection = Callable[[Parents, "Steps", Draw, int], Children]
"""`project(parents, step, draw, count)` returns `count` children of each parent."""


def drawn(parents: Parents, step: Steps, draw: Draw, count: int) -> Children:
    """Return `count` drawn children of each parent."""
    if parents.matchers is not None and count > 1:  # the masks of later positions depend on the child
        alone = drawn(parents.repeat(count), step, draw, 1)
        shape = *parents.slot.shape, count
        state = {name: values.view(shape) for name, values in alone.state.items()}
        tokens, logprob = (x.view(*shape, -1) for x in (alone.tokens, alone.logprob))
        return Children(tokens, logprob, alone.finite.view(shape).all(-1), state=state)
    seen = candidates(parents, step, draw, count, draw.start)
    accepted = seen.accepted
    if accepted is not None and seen.valid is not None:  # a row reveals at least its first position
        first = torch.arange(accepted.shape[-1], device=accepted.device) == 0
        accepted = accepted | (seen.valid & first)
    children = seen.reveal(parents, accepted)
    return children if accepted is None else children._replace(state=seen.carried(parents, accepted))


def ancestral(parents: Parents, step: Steps, draw: Draw, count: int) -> Children:
    """Return `count` children of each parent, drawn by the ancestral rule."""
    masked, move = step.block(parents.open), step.move
    child = torch.arange(count, device=masked.device)[:, None]
    position = parents.positions[:, None, None]
    u = uniform(parents.keyed(ORDER)[..., None, None], position, child)  # [P, m, C, L]
    moves = (u < (move.view(-1, 1, 1, 1) if isinstance(move, torch.Tensor) else move)) & masked[:, :, None]
    drawn = moves.any(2)  # [P, m, L]
    prompt, parent, place = drawn.nonzero(as_tuple=True)
    u = uniform(parents.keyed(TOKEN)[prompt, parent][:, None], parents.positions[prompt, place][:, None], child[:, 0])
    how = draw.temperature, draw.filters, ()
    stats = parents.read(parents.slot[prompt, parent], place, partial(draw.tokens, how=how), u)
    token = stats["drawn"]
    tokens = parents.tokens[:, :, None].expand(moves.shape).clone()
    logprob = stats["token"].new_zeros(moves.shape)
    tokens[prompt, parent, :, place] = torch.where(moves[prompt, parent, :, place], token, draw.mask_id)
    logprob[prompt, parent, :, place] = torch.where(moves[prompt, parent, :, place], stats["token"], 0.0)
    finite = torch.ones_like(drawn)
    finite[prompt, parent, place] = stats["logsumexp"].isfinite()
    return Children(tokens, logprob, finite.all(-1))


class Candidates(NamedTuple):
    """The M positions of each child that may be revealed, with drawn tokens, in the sequence of the order."""

    place: Tensor  # [P, m, C, M] indices into the window
    token: Tensor  # [P, m, C, M]
    token_logprob: Tensor  # [P, m, C, M] the log-probability of the token
    valid: Tensor | None  # [P, m, C, M] which of the positions are open; None: all
    accepted: Tensor | None  # [P, m, C, M] which positions the reveal rule accepts; None: all
    finite: Tensor  # [P, m]
    comparable: Tensor  # [P, m]
    stats: dict[str, Tensor]  # [P, m, C, M] the statistics that the caller asked for
    allowed: Tensor | None = None  # [P, m, C, M] the log-probability of all tokens that a constraint allows
    masks: Tensor | None = None  # [P, m, M, W] these tokens (see `Parents`)

    def carried(self, parents: Parents, revealed: Tensor) -> dict[str, Tensor]:
        """Return the values of the parents' state for children that reveal these positions [P, m, C, M], for each of
        which `log_z` gets a term."""
        state = {name: values[..., None].expand(revealed.shape[:3]) for name, values in parents.state.items()}
        if self.allowed is not None:
            state["log_z"] = state["log_z"] + self.allowed.masked_fill(~revealed, 0).sum(-1)
        return state

    def expand(self, count: int) -> Candidates:
        """Return the candidates of one child as those of `count` children."""
        own = (self.place, self.token, self.token_logprob)
        place, token, token_logprob = (x.expand(-1, -1, count, -1) for x in own)
        return self._replace(place=place, token=token, token_logprob=token_logprob)

    def reveal(self, parents: Parents, accepted: Tensor | None) -> Children:
        """Return the children that reveal the accepted positions (None: all positions)."""
        rows = parents.tokens[:, :, None].expand(-1, -1, self.place.shape[2], -1)
        token, token_logprob = self.token, self.token_logprob
        if accepted is not None:
            token = torch.where(accepted, token, rows.gather(3, self.place))
            token_logprob = torch.where(accepted, token_logprob, 0.0)
        logprob = token_logprob.new_zeros(rows.shape).scatter(3, self.place, token_logprob)
        return Children(rows.scatter(3, self.place, token), logprob, self.finite, self.comparable)


def _open_places(parents: Parents, step: Steps, exact: bool) -> tuple[Tensor, Tensor | None]:
    """Return the open positions [P, m, M] of the block, and which of them are valid (None: all, if `exact`).

    M is `step.masked`. A row with fewer open positions has other positions behind its open ones, marked as not
    valid, so that the sizes of all tensors are known without reading numbers from the device.
    """
    if step.starts is None:
        first, opened = step.start, parents.open[..., step.start : step.stop]
    else:
        first, opened = 0, step.block(parents.open)
    place = opened.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., : step.masked]
    return place + first, None if exact else opened.gather(2, place)


def candidates(
    parents: Parents, step: Steps, draw: Draw, count: int, temperature: float | None, statistics: Collection[str] = ()
) -> Candidates:
    """Draw `count` tokens for each open position, and put the positions into the sequence of the order. `temperature`
    replaces that of `draw`, if it is given. The result has the `statistics` that are named."""
    order: Order = Order.registry[draw.order]
    place, valid = _open_places(parents, step, step.exact and draw.rule is None)
    child = torch.arange(count, device=place.device) if parents.child is None else parents.child[..., None, None]
    position = parents.positions[:, None].expand_as(parents.tokens).gather(2, place)[..., None]

    def keyed_uniform(purpose: int) -> Tensor:
        return uniform(parents.keyed(purpose)[..., None, None], position, child).transpose(2, 3)  # [P, m, C, M]

    def table(values: Tensor) -> Tensor:
        """Return values [P m M, C] or [P m M] as [P, m, C or 1, M]."""
        return values.view(*place.shape, values.shape[1] if values.ndim == 2 else 1).transpose(2, 3)

    start = draw.start is not None
    temperature = draw.temperature if temperature is None else temperature
    want = {*order.statistics, *draw.statistics, *statistics}
    want |= {"entropy"} if start else set()
    want |= {"best"} if draw.rule is not None and not order.draws_first else set()
    given = keyed_uniform(TOKEN).transpose(2, 3), temperature, tuple(sorted(want))
    if parents.matchers is None or valid is None:
        stats, run, masks = draw.at(parents, place, valid, *given), None, parents.masks
    else:
        stats, place, valid, run, masks = _one_by_one(parents, draw, place, valid, *given)
    token, tables = table(stats["drawn"]), {name: table(stats[name]) for name in ("token", *want)}
    token_logprob = table(stats["token_logprob"]) if "token_logprob" in stats else tables["token"]
    ends = None if draw.last_ids is None else torch.isin(token, draw.last_ids)
    opened, noise = None if valid is None else valid[:, :, None], partial(keyed_uniform, ORDER)
    seen = Seen(tables, place[:, :, None], noise, step.reveal, draw.order_temperature, ends, opened, step.reveals)
    priority = _priority(draw, seen, valid, start).expand(token.shape)
    comparable = ~priority.isnan().flatten(2).any(-1)
    best = coarse(priority).sort(dim=-1, descending=True, stable=True).indices[..., : step.reveal]

    def ordered(values: Tensor) -> Tensor:
        """Return values [P, m, C or 1, M] in the sequence of the order."""
        return values.expand(token.shape).gather(3, best)

    finite = stats["logsumexp"].isfinite().view(place.shape)
    accepted = None
    if valid is not None and opened is not None:
        finite = finite | ~valid
        accepted = opened = ordered(opened)
        if step.reveals is not None:
            accepted = opened & (torch.arange(best.shape[-1], device=best.device) < step.reveals.view(-1, 1, 1, 1))
    if draw.rule is not None and valid is not None and opened is not None:
        sure = tables["token" if order.draws_first else "best"].exp().clamp_max(1)
        sequence = OpenPositions(ordered(sure), {name: ordered(tables[name]) for name in draw.statistics}, opened)
        accepted = _accepted(draw.rule, sequence) & (not start) if run is None else ordered(run[:, :, None])
        if ends is not None:  # an end-of-text token must wait for every open position before it
            here = torch.zeros_like(accepted).scatter(3, best, accepted)  # in the order of the window
            waiting = (~here & valid[:, :, None]).cumsum(-1) > 0
            accepted = accepted & ~ordered(ends & waiting)
    wanted = {name: ordered(tables[name]) for name in statistics}
    drawn = ordered(place[:, :, None]), ordered(token), ordered(token_logprob)
    allowed = ordered(table(stats["allowed"])) if "allowed" in stats else None
    return Candidates(*drawn, opened, accepted, finite.all(-1), comparable, wanted, allowed, masks)


def _one_by_one(
    parents: Parents, draw: Draw, place: Tensor, valid: Tensor, u: Tensor, temperature: float, want: Collection[str]
) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor, Tensor]:
    """Do what `Draw.at` does for a run of positions, those that a reveal rule accepts under a constraint, and the one
    behind it. The mask of a position depends on the tokens before it, so the positions are asked one after the other,
    and the host waits for each. u is [P, m, M, 1].

    Return the statistics, the positions, which of them are valid, which are accepted, and their masks [P, m, M, W].
    """
    matchers, rule, known = parents.matchers, draw.rule, valid[..., 0]
    assert matchers is not None and rule is not None and parents.masks is not None
    if "value" in parents.state:  # there is no row at a place of a tree that has the value -inf
        known = known & (parents.state["value"] > -torch.inf)
    p, m = known.nonzero().unbind(1)
    rows = zip(parents.tokens[p, m].tolist(), place[p, m, 0].tolist(), strict=True)
    prefixes = [tuple(ids[:first]) for ids, first in rows]
    ask = partial(draw.tokens, how=(temperature, draw.filters, want))
    masks, inside, run, tables = [parents.masks[:, :, 0]], [known], list[Tensor](), list[dict[str, Tensor]]()
    columns = {name: torch.zeros(len(p), 0, device=place.device) for name in ("best", *draw.statistics)}
    for j in range(place.shape[2]):
        stats = parents.read(parents.slot[p, m], place[p, m, j], ask, u[p, m, j], masks[-1][p, m])
        tables.append({n: x.new_zeros(*known.shape, *x.shape[1:]).index_put((p, m), x) for n, x in stats.items()})
        columns = {name: torch.cat([x, stats[name][:, None]], 1) for name, x in columns.items()}
        read = {name: x[:, None, None] for name, x in columns.items()}  # [R, 1, 1, j + 1]
        seen = OpenPositions(read["best"].exp().clamp_max(1), read, torch.ones_like(read["best"], dtype=torch.bool))
        accepted = _accepted(rule, seen)[:, 0, 0, -1]
        run.append(torch.zeros_like(known).index_put((p, m), accepted))
        more = accepted & valid[p, m, min(j + 1, place.shape[2] - 1)]
        flags, tokens = torch.stack([more.long(), stats["drawn"][:, 0]]).tolist()
        longer = {i: (*prefixes[i], tokens[i]) for i, flag in enumerate(flags) if flag}
        ends = matchers.constraint.vocabulary.ends
        longer = {i: ids for i, ids in longer.items() if ids[-1] not in ends and matchers.words(ids).any()}
        if not longer or j + 1 == place.shape[2]:
            break
        index, prefixes = sent([*longer], place.device), [*longer.values()]
        p, m, columns = p[index], m[index], {name: x[index] for name, x in columns.items()}
        masks.append(torch.full_like(masks[0], -1).index_put((p, m), matchers.masks(prefixes).to(place.device)))
        inside.append(torch.zeros_like(known).index_put((p, m), torch.ones_like(p, dtype=torch.bool)))
    stats = {name: torch.stack([table[name] for table in tables], 2).flatten(0, 2) for name in tables[0]}
    return stats, place[..., : len(run)], torch.stack(inside, 2), torch.stack(run, 2), torch.stack(masks, 2)


def _priority(draw: Draw, seen: Seen, valid: Tensor | None, start: bool) -> Tensor:
    """Return the priorities of the positions that are valid (None: all); all others come last. At the `start` of
    start="entropy", the position of the highest entropy comes first."""
    order: Order = Order.registry[draw.order]
    priority = (draw.priority or order.priority)(seen)
    if not isinstance(priority, Tensor) or priority.shape[-1] != seen.place.shape[-1]:
        raise D5P4Error(f"order {draw.order!r} must return a tensor with one number per open position")
    priority = priority.to(torch.promote_types(priority.dtype, torch.float32))
    if seen.last is not None and order.least is not None:
        priority = torch.where(seen.last, order.least, priority)
    if valid is not None:
        priority = priority.masked_fill(~valid[:, :, None], -torch.inf)
    if start:
        entropy = coarse(seen.stats["entropy"])
        entropy = entropy if valid is None else entropy.masked_fill(~valid[:, :, None], -torch.inf)
        number = torch.arange(entropy.shape[-1], device=entropy.device)
        priority = torch.where(number == entropy.argmax(-1, keepdim=True), torch.inf, priority)
    return priority


def _accepted(rule: Callable[[OpenPositions], Tensor], seen: OpenPositions) -> Tensor:
    """Return the open positions that a reveal rule accepts."""
    accepted = rule(seen)
    if not isinstance(accepted, Tensor) or accepted.dtype != torch.bool:
        raise D5P4Error("a reveal rule must return a tensor of bools, one per position of the sequence")
    return accepted & seen.open


def distinct_children(child_hash: Tensor, tie: Tensor, keep: int) -> Tensor:
    """Return the indices [P, m, keep] of kept children among C drawn ones. child_hash is [P, m, C], tie is [P, m]."""
    prompts, parents, drawn = child_hash.shape
    chosen = torch.zeros(prompts, parents, keep, dtype=torch.int64, device=tie.device)
    row = torch.arange(prompts, device=tie.device)
    turn = tie.argsort(dim=-1, stable=True)
    taken = child_hash.new_zeros(prompts, 0)
    for place in range(parents):
        parent = turn[:, place]
        hashes = child_hash[row, parent]  # [P, C]
        repeat = (hashes[:, :, None] == hashes[:, None, :]).tril(-1).any(-1)
        new = ~(repeat | (hashes[:, :, None] == taken[:, None, :]).any(-1))
        new &= new.cumsum(-1) <= keep
        order = (~new).to(torch.uint8).argsort(dim=-1, stable=True)[:, :keep]  # new children first, in drawn order
        count = new.sum(-1, keepdim=True)
        slot = torch.arange(keep, device=tie.device) % count.clamp_min(1)
        chosen[row, parent] = order.gather(1, slot)
        taken = torch.cat([taken, hashes.gather(1, chosen[row, parent])], 1)
    return chosen
