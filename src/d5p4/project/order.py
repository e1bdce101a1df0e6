"""Unmask-by-order (LLaDA, Dream): draw a token for every masked position, reveal the best few, mask the rest again.

    confidence   probability of the drawn token
    margin       largest minus second largest probability
    entropy      minus the entropy
    random       a keyed uniform
    tempered     of the 2m most confident positions, m drawn without replacement by softmax(confidence / T)

All are taken from the temperature-1, unfiltered distribution, so temperature does not corrupt the order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..ops.sample import draw as draw_tokens
from ..ops.ties import coarse
from ..rng import ORDER, TOKEN, gumbel, uniform
from ..types import Step
from .base import Children, Draw, Parents

ORDERS = ("confidence", "random", "tempered", "margin", "entropy")
_STATISTIC = {"margin": ("margin",), "entropy": ("entropy",)}


def by_order(parents: Parents, step: Step, draw: Draw, count: int) -> Children:
    """`count` children of each parent, each with `step.reveal` more positions of the block revealed."""
    masked = parents.tokens == draw.mask_id
    masked[..., : step.start] = False
    masked[..., step.stop :] = False
    prompt, parent, place = masked.nonzero(as_tuple=True)
    child = torch.arange(count, device=masked.device)
    position = parents.positions[prompt, place][:, None]
    u = uniform(parents.keyed(TOKEN)[prompt, parent][:, None], position, child)  # [R, C]
    head = draw.head
    want = _STATISTIC.get(draw.order, ())
    token, stats = draw_tokens(
        parents.rows(masked), head.weight, head.bias, head.banned, u, draw.temperature, draw.top_k, draw.top_p, want
    )
    noise = uniform(parents.keyed(ORDER)[prompt, parent][:, None], position, child)
    worth = _worth(draw, token, stats, noise)
    shape = (*masked.shape[:2], count, masked.shape[2])
    dense = worth.new_full(shape, -torch.inf)
    dense[prompt, parent, :, place] = worth
    if draw.order == "tempered" and draw.order_temperature > 0:
        dense = _temper(dense, noise, (prompt, parent, place), step.reveal, draw.order_temperature)
    best = coarse(dense).sort(dim=-1, descending=True, stable=True).indices[..., : step.reveal]
    reveal = torch.zeros(shape, dtype=torch.bool, device=masked.device).scatter(-1, best, True) & (dense > -torch.inf)
    filled = torch.full(shape, draw.mask_id, device=masked.device, dtype=torch.int64)
    filled[prompt, parent, :, place] = token
    logprob = stats["token"].new_zeros(shape)
    logprob[prompt, parent, :, place] = stats["token"]
    tokens = torch.where(reveal, filled, parents.tokens[:, :, None])
    return Children(tokens, torch.where(reveal, logprob, 0.0), stats["logsumexp"], masked)


def _worth(draw: Draw, token: Tensor, stats: dict[str, Tensor], noise: Tensor) -> Tensor:
    """[R, C] larger is revealed earlier; tokens that must come last get the least a rule can give."""
    least = 0.0
    if draw.order == "random":
        worth = noise
    elif draw.order == "margin":
        worth = stats["margin"][:, None].expand_as(noise)
    elif draw.order == "entropy":
        worth, least = -stats["entropy"][:, None].expand_as(noise), -math.log(draw.head.weight.shape[0])
    else:
        worth = stats["token"].exp()
    if draw.last_ids:
        last = torch.isin(token, torch.tensor(draw.last_ids, device=token.device))
        worth = worth.masked_fill(last, least)
    return worth


def _temper(
    dense: Tensor, noise: Tensor, where: tuple[Tensor, Tensor, Tensor], reveal: int, temperature: float
) -> Tensor:
    """Gumbel top-m over the 2m most confident: the law of m draws without replacement."""
    prompt, parent, place = where
    keep = coarse(dense).sort(dim=-1, descending=True, stable=True).indices[..., : 2 * reveal]
    support = torch.zeros_like(dense, dtype=torch.bool).scatter(-1, keep, True)
    shaken = (dense.to(noise.dtype) - dense.amax(-1, keepdim=True)) / temperature
    shaken[prompt, parent, :, place] += gumbel(noise)
    return shaken.masked_fill(~support, -torch.inf)
