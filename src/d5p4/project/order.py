"""Unmask-by-order (LLaDA, Dream): draw a token for every masked position, reveal the best few, mask the rest again.

The order decides which m positions are best. The first four orders take the positions with the largest value:
    confidence   probability of the drawn token
    margin       largest minus second largest probability
    entropy      minus the entropy
    random       a keyed uniform number
    tempered     m of the 2m most confident positions, drawn without replacement by softmax(confidence / T)

All values are taken from the temperature-1, unfiltered distribution, so that temperature does not change the order.
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
    """Return `count` children of each parent. Each child has `step.reveal` more positions of the block revealed.

    Every row has exactly `step.masked` masked positions in the block, so the sizes of all tensors are known without
    reading numbers from the device.
    """
    masked = parents.tokens[..., step.start : step.stop] == draw.mask_id
    place = masked.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., : step.masked] + step.start
    shape = place.shape  # [P, m, M]
    child = torch.arange(count, device=masked.device)
    position = parents.positions[:, None].expand_as(parents.tokens).gather(2, place)[..., None]

    def keyed_uniform(purpose: int) -> Tensor:
        return uniform(parents.keyed(purpose)[..., None, None], position, child)  # [P, m, M, C]

    head = draw.head
    token, stats = draw_tokens(
        parents.states[parents.slot[..., None], place].flatten(0, 2),
        head.weight,
        head.bias,
        head.banned,
        keyed_uniform(TOKEN).flatten(0, 2),
        draw.temperature,
        draw.top_k,
        draw.top_p,
        _STATISTIC.get(draw.order, ()),
        head.fixed,
    )
    tempered = draw.order == "tempered" and draw.order_temperature > 0
    noise = keyed_uniform(ORDER) if tempered or draw.order == "random" else None
    worth = _worth(draw, token, stats, noise).view(*shape, count).transpose(2, 3)  # [P, m, C, M]
    if tempered and noise is not None:
        worth = _temper(worth, noise.transpose(2, 3), step.reveal, draw.order_temperature)
    best = coarse(worth).sort(dim=-1, descending=True, stable=True).indices[..., : step.reveal]

    def revealed(values: Tensor) -> Tensor:
        """Select the values at the best positions: from [R, C] to [P, m, C, reveal]."""
        return values.view(*shape, count).transpose(2, 3).gather(3, best)

    where = place[:, :, None].expand(*shape[:2], count, -1).gather(3, best)
    rows = parents.tokens[:, :, None].expand(-1, -1, count, -1)
    logprob = stats["token"].new_zeros(rows.shape).scatter(3, where, revealed(stats["token"]))
    finite = stats["logsumexp"].isfinite().view(shape).all(-1)
    return Children(rows.scatter(3, where, revealed(token)), logprob, finite)


def _worth(draw: Draw, token: Tensor, stats: dict[str, Tensor], noise: Tensor | None) -> Tensor:
    """Return a value [R, C] per drawn token. Tokens of large value are revealed first, those in `last_ids` last."""
    least = 0.0
    if draw.order == "random" and noise is not None:
        worth = noise.view(token.shape)
    elif draw.order == "margin":
        worth = stats["margin"][:, None].expand_as(token)
    elif draw.order == "entropy":
        worth, least = -stats["entropy"][:, None].expand_as(token), -math.log(draw.head.weight.shape[0])
    else:
        worth = stats["token"].exp()
    if draw.last_ids is not None:
        worth = worth.masked_fill(torch.isin(token, draw.last_ids), least)
    return worth


def _temper(worth: Tensor, noise: Tensor, reveal: int, temperature: float) -> Tensor:
    """Return worth [P, m, C, M] / temperature + Gumbel noise. All but the 2 * reveal best positions get minus infinity.

    The `reveal` positions with the largest results are then a draw without replacement by softmax(worth / T).
    """
    keep = coarse(worth).sort(dim=-1, descending=True, stable=True).indices[..., : 2 * reveal]
    support = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, keep, True)
    shaken = (worth.to(noise.dtype) - worth.amax(-1, keepdim=True)) / temperature + gumbel(noise)
    return shaken.masked_fill(~support, -torch.inf)
