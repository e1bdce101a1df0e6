"""One pass over the vocabulary: hidden rows in, a few numbers per row out.

With x = W h + b (minus infinity at banned ids), p = softmax(x) and V' ids that are not banned:
    logsumexp    log Σ e^x
    entropy      H = -Σ p log p            (nats; 0 log 0 = 0)
    best         max log p
    margin       largest minus second largest p
    certainty    -(1/V') Σ log p           (self-certainty of Kang et al., 2025)
    token        log p of given tokens
O(R V D) time. Rows go through in chunks of at most CHUNK logits, so nothing of size R x V exists.
Everything is computed in max(float32, the model's dtype).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

CHUNK = 1 << 24
_HAS_OUT_DTYPE = tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 8)


def row_chunks(rows: int, vocabulary: int) -> Iterator[slice]:
    """Slices of rows that together with the vocabulary stay within CHUNK numbers."""
    size = max(1, CHUNK // vocabulary)
    for start in range(0, rows, size):
        yield slice(start, min(rows, start + size))


def logits_of(states: Tensor, weight: Tensor, bias: Tensor | None, banned: Tensor) -> Tensor:
    """states [R, D] -> logits [R, V] in max(float32, dtype), minus infinity at banned ids."""
    logits = _wide_product(states, weight)
    if bias is not None:
        logits = logits + bias
    return logits.masked_fill(banned, -torch.inf)


def _wide_product(states: Tensor, weight: Tensor) -> Tensor:
    """states [R, D] @ weight.T accumulated and kept in max(float32, dtype), so that our rounding is not the model's.

    Half-precision weights meet float32 states (guidance) as two halves of the states, which keeps 16 bits of them.
    """
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return states.to(weight.dtype) @ weight.T
    if weight.is_cuda and _HAS_OUT_DTYPE:
        high = states.to(weight.dtype)
        product = torch.mm(high, weight.T, out_dtype=torch.float32)
        if states.dtype != weight.dtype:
            low = (states - high).to(weight.dtype)
            product += torch.mm(low, weight.T, out_dtype=torch.float32)
        return product
    tile = max(1, CHUNK // weight.shape[1])
    wide = states.float()
    return torch.cat([wide @ part.float().T for part in weight.split(tile)], -1)


def row_stats(logits: Tensor, banned: Tensor, want: Collection[str], tokens: Tensor | None = None) -> dict[str, Tensor]:
    """The wanted statistics of logits [R, V]; "logsumexp" always, "token" [R, C] where tokens [R, C] are given."""
    lse = torch.logsumexp(logits, -1)
    stats = {"logsumexp": lse}
    if "entropy" in want:
        p = torch.exp(logits - lse[:, None])
        stats["entropy"] = (lse - (p * logits.masked_fill(p == 0, 0)).sum(-1)).clamp_min(0)
    if "best" in want:
        stats["best"] = logits.amax(-1) - lse
    if "margin" in want:
        two = torch.exp(logits.topk(min(2, logits.shape[-1]), -1).values - lse[:, None])
        stats["margin"] = two[:, 0] - (two[:, 1] if two.shape[1] > 1 else 0)
    if "certainty" in want:
        stats["certainty"] = lse - logits.masked_fill(banned, 0).sum(-1) / (~banned).sum()
    if tokens is not None:
        stats["token"] = logits.gather(-1, tokens) - lse[:, None]
    return stats


def vocab_stats(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    banned: Tensor,
    want: Collection[str] = (),
    tokens: Tensor | None = None,
) -> dict[str, Tensor]:
    """states [R, D] -> the wanted statistics, each [R] ("token" [R, C])."""
    parts = []
    for rows in row_chunks(states.shape[0], weight.shape[0]):
        logits = logits_of(states[rows], weight, bias, banned)
        parts.append(row_stats(logits, banned, want, None if tokens is None else tokens[rows]))
    if not parts:
        empty = states.new_zeros(0, dtype=torch.promote_types(states.dtype, torch.float32))
        stats = dict.fromkeys(("logsumexp", *want), empty)
        return stats if tokens is None else stats | {"token": empty.new_zeros(tokens.shape)}
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
