"""Distinct branching, an option that changes results: every parent keeps children that differ from each other.

Most children are duplicates, and a duplicate wastes a place in the pool. So more children than needed are drawn. The
parents take turns in the order of their tie hashes. Each parent keeps its first children that differ from each other
and from every child already kept in the prompt's pool. If these children are too few, some of them are repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..beams import Beams, Seats
from ..rng import hash_tokens
from .base import Children, Parents


def distinct_children(
    children: Children, parents: Parents, tie: Tensor, keep: int, seats: Seats, beams: Beams
) -> Children:
    """Keep each parent's first `keep` drawn children that no parent has kept yet. tie [P, m] orders the parents."""
    names = beams.everyone(hash_tokens(children.tokens, parents.positions[:, None, None]), seats)
    kept = seats.of(keep_distinct(names, tie, keep))
    index = kept[..., None].expand(*kept.shape, children.tokens.shape[-1])
    return children._replace(tokens=children.tokens.gather(2, index), logprob=children.logprob.gather(2, index))


def keep_distinct(child_hash: Tensor, tie: Tensor, keep: int) -> Tensor:
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
