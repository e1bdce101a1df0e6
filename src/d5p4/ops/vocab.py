"""One pass over the vocabulary: hidden rows in, a few numbers per row out.

With x = W h + b (minus infinity at banned ids), p = softmax(x) and V' ids that are not banned:
    logsumexp    log Σ e^x
    entropy      H = -Σ p log p            (nats; 0 log 0 = 0)
    best         max log p
    margin       largest minus second largest p
    certainty    -(1/V') Σ log p           (self-certainty of Kang et al., 2025)
    token        log p of given tokens
O(R V D) time. Rows go through in chunks of bounded size, so nothing of size R x V exists. Everything is computed in
max(float32, the model's dtype). On CUDA, float64 apart, a chunk's statistics are one read of it (`kernels.vocab`),
within 2e-6 of these in a log-sum-exp of size 10. With `fixed`, every chunk has one number of rows, the last filled up
with zeros: a matrix product of one shape gives a row the same bits wherever it stands, one of another shape need not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from . import kernels

CHUNK = 1 << 24  # logits in one chunk
KERNEL_CHUNK = 1 << 28  # the same for the kernels, which make no copies of it: 1 GiB, and few reads of the weights
FIXED_CHUNK = 1 << 26  # the same for chunks of a fixed size: the last one is filled up, so they are small
_HAS_OUT_DTYPE = tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 8)


def row_chunks(rows: int, vocabulary: int, chunk: int | None = None) -> Iterator[slice]:
    """Slices of rows that together with the vocabulary stay within CHUNK (or `chunk`) numbers."""
    size = max(1, (chunk or CHUNK) // vocabulary)
    size -= size % 256 if size > 256 else 0  # whole tiles of the matrix units
    for start in range(0, rows, size):
        yield slice(start, min(rows, start + size))


def fixed_rows(vocabulary: int, fast: bool) -> int:
    """Rows of every chunk under `fixed`: a power of two that follows from the vocabulary alone."""
    wanted = (FIXED_CHUNK if fast else CHUNK) // vocabulary
    return 1 << (min(max(wanted, 64), 4096).bit_length() - 1)


def head_chunks(rows: int, vocabulary: int, fast: bool, fixed: bool) -> Iterator[tuple[slice, int]]:
    """Slices of rows for products with the head, and how many rows each product must have."""
    if fixed:
        size = fixed_rows(vocabulary, fast)
        yield from ((slice(start, min(rows, start + size)), size) for start in range(0, rows, size))
    else:
        for part in row_chunks(rows, vocabulary, KERNEL_CHUNK if fast else None):
            yield part, part.stop - part.start


def filled(x: Tensor, rows: int) -> Tensor:
    """x [R, ...] filled up with rows of zeros to `rows` rows."""
    return x if len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def logits_of(states: Tensor, weight: Tensor, bias: Tensor | None, banned: Tensor) -> Tensor:
    """states [R, D] -> logits [R, V] in max(float32, dtype), minus infinity at banned ids."""
    logits = wide_product(states, weight)
    if bias is not None:
        logits = logits + bias
    return logits.masked_fill(banned, -torch.inf)


def wide_product(states: Tensor, weight: Tensor) -> Tensor:
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


def even_rows(weight: Tensor) -> Tensor:
    """weight [V, D], in half precision with rows of zeros up to a multiple of 64 ids.

    Rows of a product that are not aligned to 16 bytes send cuBLAS to kernels three times slower (V = 50,258 is such).
    """
    uneven = weight.element_size() == 2 and weight.shape[0] % 8
    return torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % 64)) if uneven else weight


def row_stats(logits: Tensor, banned: Tensor, want: Collection[str], tokens: Tensor | None = None) -> dict[str, Tensor]:
    """The wanted statistics of logits [R, V]; "logsumexp" always, "token" [R, C] where tokens [R, C] are given."""
    if kernels.usable(logits):
        return _kernel_stats(logits, offset_of(None, banned), want, tokens)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(banned, -torch.inf)
    return plain_stats(logits, banned, want, tokens)


def plain_stats(
    logits: Tensor, banned: Tensor, want: Collection[str], tokens: Tensor | None = None
) -> dict[str, Tensor]:
    """`row_stats` of logits that are wide and minus infinity at banned ids already."""
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


def offset_of(bias: Tensor | None, banned: Tensor) -> Tensor:
    """[V] float32 to add to a product of the head: its bias, minus infinity at banned ids."""
    offset = torch.zeros(banned.shape, device=banned.device) if bias is None else bias.float()
    return offset.masked_fill(banned, -torch.inf)


def token_logprob(logits: Tensor, offset: Tensor, tokens: Tensor, lse: Tensor, rows: Tensor | None = None) -> Tensor:
    """log p [R, C] of tokens [R, C]; rows [R]: which rows of logits they belong to."""
    place = torch.arange(len(tokens), device=tokens.device) if rows is None else rows
    return logits[place[:, None], tokens].float() + offset[tokens] - lse[:, None]


def _kernel_stats(logits: Tensor, offset: Tensor, want: Collection[str], tokens: Tensor | None) -> dict[str, Tensor]:
    from .kernels.vocab import block_stats, join_blocks

    stats = join_blocks(block_stats(logits, offset, want), want, offset)
    if tokens is not None:
        stats["token"] = token_logprob(logits, offset, tokens, stats["logsumexp"])
    return stats


def vocab_stats(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    banned: Tensor,
    want: Collection[str] = (),
    tokens: Tensor | None = None,
    fixed: bool = False,
) -> dict[str, Tensor]:
    """states [R, D] -> the wanted statistics, each [R] ("token" [R, C]); with `fixed`, whatever the other rows are."""
    fast, vocabulary = kernels.usable(weight) and kernels.usable(states), weight.shape[0]
    offset, even = (offset_of(bias, banned), even_rows(weight)) if fast else (None, weight)
    parts = []
    for rows, size in head_chunks(states.shape[0], vocabulary, fast, fixed):
        given = None if tokens is None else filled(tokens[rows], size)
        some = filled(states[rows], size)
        if offset is not None:
            parts.append(_kernel_stats(wide_product(some, even)[:, :vocabulary], offset, want, given))
        else:
            parts.append(plain_stats(logits_of(some, weight, bias, banned), banned, want, given))
    if not parts:
        empty = states.new_zeros(0, dtype=torch.promote_types(states.dtype, torch.float32))
        stats = dict.fromkeys(("logsumexp", *want), empty)
        return stats if tokens is None else stats | {"token": empty.new_zeros(tokens.shape)}
    return {name: torch.cat([part[name] for part in parts])[: len(states)] for name in parts[0]}
