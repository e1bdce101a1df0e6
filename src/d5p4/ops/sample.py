"""Token draws. A uniform number selects a token by the inverse CDF of the distribution after temperature and filters.

The tokens of the CDF are in vocabulary order. Temperature, top-k, top-p and min-p shape only the draw; the returned
log-probability is that of the plain distribution. The cumulative sum runs in float64, so that the tail of a vocabulary
of 10^5 tokens keeps its mass. On CUDA, except in float64, `kernels.sample` computes the inverse CDF in two levels. Both
versions give the same token for the same u, unless u lies within about 1e-7 of the border between two tokens.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .precision import wide
from .vocab import KERNEL_CHUNK, chunk_rows, over_chunks, plain_stats, token_logprob

if TYPE_CHECKING:
    from ..types import Head

Filters = tuple[int | None, float | None, float | None]  # top_k, top_p, min_p
How = tuple[float, Filters, Collection[str]]  # temperature, filters, wanted statistics
NO_FILTERS: Filters = (None, None, None)


def filter_logits(
    logits: Tensor, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
) -> Tensor:
    """Set logits to minus infinity outside the top-k tokens, then outside the smallest set with mass >= top_p, then of
    tokens with a probability below min_p times the largest one.

    Tokens as likely as the k-th token stay. Equally likely tokens at the border of top-p enter in vocabulary order.
    """
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k, -1).values[:, -1:], -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, index = logits.sort(dim=-1, descending=True, stable=True)
        p = torch.softmax(ordered, -1)
        outside = (p.cumsum(-1) - p) >= top_p
        outside[:, 0] = False
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(-1, index, outside), -torch.inf)
    if min_p:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(min_p), -torch.inf)
    return logits


def inverse_cdf(logits: Tensor, u: Tensor) -> Tensor:
    """Return tokens [R, C]: the first id with cumulative probability >= u [R, C], never an id of probability 0."""
    cdf = torch.softmax(logits.to(wide(logits.device)), -1).cumsum(-1)
    goal = (u.to(cdf.dtype) * cdf[:, -1:]).clamp_min(torch.finfo(cdf.dtype).tiny)  # > 0: no id of mass 0 is drawn
    return torch.searchsorted(cdf, goal).clamp_max(logits.shape[-1] - 1)


def draw(
    states: Tensor, head: Head, u: Tensor, how: How = (1.0, NO_FILTERS, ()), masks: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Draw C tokens for each row of states [R, D] with uniforms u [R, C]. Return tokens [R, C] and the statistics of
    `vocab.vocab_stats`, including "token". Temperature 0 takes the most probable token (of equal ones, the lowest id).
    masks [R, W]: the tokens that may be drawn (see `vocab.over_chunks`). All statistics are of these tokens alone.
    """

    def measure(logits: Tensor, offset: Tensor | None, given: Any) -> dict[str, Tensor]:
        if offset is not None:
            tokens, stats = kernel_draw(logits, offset, given, how)
        else:
            tokens, stats = plain_draw(logits, head.banned, given, how)
        return stats | {"drawn": tokens}

    stats = over_chunks(measure, states, head, u, masks)
    return stats.pop("drawn"), stats


def plain_draw(logits: Tensor, banned: Tensor, u: Tensor, how: How) -> tuple[Tensor, dict[str, Tensor]]:
    """Draw tokens with plain torch from logits [R, V]. The logits are minus infinity at banned ids."""
    temperature, filters, want = how
    if temperature == 0:
        token = logits.argmax(-1, keepdim=True).expand(u.shape)
    else:  # the maximum is subtracted before the division, which could give NaN otherwise
        tempered = (logits - logits.amax(-1, keepdim=True)).to(wide(logits.device))
        tempered = (tempered / max(temperature, torch.finfo(tempered.dtype).tiny)).masked_fill(banned, -torch.inf)
        token = inverse_cdf(filter_logits(tempered, *filters), u)
    return token, plain_stats(logits, banned, want, token)


def kernel_draw(logits: Tensor, offset: Tensor, u: Tensor, how: How) -> tuple[Tensor, dict[str, Tensor]]:
    """Draw tokens with the Triton kernels from logits [R, V] + offset [V]."""
    temperature, filters, want = how
    from .kernels.sample import draw_tokens
    from .kernels.vocab import block_stats, join_blocks

    plain = block_stats(logits, offset, want)
    if temperature == 0 or filters != NO_FILTERS:
        drawn = []
        size = chunk_rows(logits.shape[1], KERNEL_CHUNK // 16)  # sorting a chunk takes memory
        for start in range(0, max(1, len(u)), size):
            part = slice(start, start + size)
            whole = logits[part].float() + offset
            if temperature == 0:
                drawn.append(whole.argmax(-1, keepdim=True).expand(u[part].shape))
                continue
            whole = filter_logits((whole - whole.amax(-1, keepdim=True)) / max(temperature, 1e-30), *filters)
            drawn.append(draw_tokens(whole, None, block_stats(whole, None), u[part]))
        token = torch.cat(drawn)
    else:
        tempered = plain if temperature == 1 else block_stats(logits, offset, (), temperature)
        token = draw_tokens(logits, offset, tempered, u, temperature)
    stats = join_blocks(plain, want, offset)
    stats["token"] = token_logprob(logits, offset, token, stats["logsumexp"])
    return token, stats
