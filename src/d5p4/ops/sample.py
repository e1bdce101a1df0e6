"""Token draws: one keyed uniform through the inverse CDF, in vocabulary order, of the tempered, filtered distribution.

Temperature, top-k and top-p shape only the draw; the log-probability that comes back is that of the plain distribution.
The cumulative sum runs in float64, so the tail of a vocabulary of 10^5 keeps its mass (float32 would lose about 1e-6).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from .vocab import logits_of, row_chunks, row_stats
from .width import wide


def filter_logits(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Minus infinity outside the top-k tokens, then outside the smallest set with mass >= top_p.

    Tokens that tie with the k-th stay; tokens that tie at the border of top-p enter in vocabulary order.
    """
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k, -1).values[:, -1:], -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, index = logits.sort(dim=-1, descending=True, stable=True)
        p = torch.softmax(ordered, -1)
        outside = (p.cumsum(-1) - p) >= top_p
        outside[:, 0] = False
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(-1, index, outside), -torch.inf)
    return logits


def _tempered(logits: Tensor, banned: Tensor, temperature: float) -> Tensor:
    """Logits over the temperature. The maximum comes off first and banned ids are set again, so that none makes NaN."""
    logits = (logits - logits.amax(-1, keepdim=True)).to(wide(logits.device))
    return (logits / max(temperature, torch.finfo(logits.dtype).tiny)).masked_fill(banned, -torch.inf)


def inverse_cdf(logits: Tensor, u: Tensor) -> Tensor:
    """Tokens [R, C]: the first index whose cumulative probability reaches u [R, C]; never a token of probability 0."""
    cdf = torch.softmax(logits.to(wide(logits.device)), -1).cumsum(-1)
    return torch.searchsorted(cdf, u.to(cdf.dtype) * cdf[:, -1:]).clamp_max(logits.shape[-1] - 1)


def draw(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    banned: Tensor,
    u: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    want: Collection[str] = (),
) -> tuple[Tensor, dict[str, Tensor]]:
    """C draws a row: states [R, D], uniforms u [R, C] -> tokens [R, C] and `vocab.row_stats`, "token" among them.

    Temperature 0 takes the most probable token (the lowest id among equals).
    """
    tokens, parts = [], []
    for rows in row_chunks(states.shape[0], weight.shape[0]):
        logits = logits_of(states[rows], weight, bias, banned)
        if temperature == 0:
            token = logits.argmax(-1, keepdim=True).expand(u[rows].shape)
        else:
            token = inverse_cdf(filter_logits(_tempered(logits, banned, temperature), top_k, top_p), u[rows])
        tokens.append(token)
        parts.append(row_stats(logits, banned, want, token))
    if not parts:
        empty = states.new_zeros(0, dtype=torch.promote_types(states.dtype, torch.float32))
        nothing = torch.zeros(u.shape, dtype=torch.int64, device=u.device)
        return nothing, dict.fromkeys(("logsumexp", *want), empty) | {"token": empty.new_zeros(u.shape)}
    return torch.cat(tokens), {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
