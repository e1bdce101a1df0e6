"""One pass over the vocabulary that turns each hidden row into a few statistics.

With x = W h + b (minus infinity at banned ids), p = softmax(x) and V' the number of ids that are not banned:
    logsumexp    log Σ e^x
    entropy      H = -Σ p log p            (nats; 0 log 0 = 0)
    best         max log p
    margin       largest minus second largest p
    certainty    -(1/V') Σ log p           (self-certainty of Kang et al., 2025)
    token        log p of given tokens
The time is O(R V D). Rows are processed in chunks of bounded size, so that no tensor of size R x V exists. Everything
is computed in max(float32, the model's dtype). On CUDA, except in float64, `kernels.vocab` reads the logits of a chunk
only once. The kernel's statistics differ from the plain version's by at most 2e-6 if the log-sum-exp is about 10.
With `fixed`, every chunk has the same number of rows, and the last chunk is filled up with zeros. Matrix products of
the same shape give a row the same bits at any place in the product; products of different shapes may not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from . import kernels

CHUNK = 1 << 24  # at most this many logits are in one chunk
KERNEL_CHUNK = 1 << 28  # the same limit for the kernels (1 GiB); it is larger, because they do not copy the logits
FIXED_CHUNK = 1 << 26  # the kernels' limit if `fixed` is on: smaller, because the last chunk is filled up
_HAS_OUT_DTYPE = tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 8)


def row_chunks(rows: int, vocabulary: int, chunk: int | None = None) -> Iterator[slice]:
    """Yield slices of the rows. The logits of one slice are at most CHUNK (or `chunk`) numbers."""
    size = max(1, (chunk or CHUNK) // vocabulary)
    size -= size % 256 if size > 256 else 0  # a multiple of the tile size of the GPU's matrix units
    for start in range(0, rows, size):
        yield slice(start, min(rows, start + size))


def fixed_rows(vocabulary: int, fast: bool) -> int:
    """Return the number of rows of every chunk under `fixed`: a power of two that depends on the vocabulary alone."""
    wanted = (FIXED_CHUNK if fast else CHUNK) // vocabulary
    return 1 << (min(max(wanted, 64), 4096).bit_length() - 1)


def head_chunks(rows: int, vocabulary: int, fast: bool, fixed: bool) -> Iterator[tuple[slice, int]]:
    """Yield (slice of rows, number of rows to fill it up to) for each product of hidden rows with the head."""
    if fixed:
        size = fixed_rows(vocabulary, fast)
        yield from ((slice(start, min(rows, start + size)), size) for start in range(0, rows, size))
    else:
        for part in row_chunks(rows, vocabulary, KERNEL_CHUNK if fast else None):
            yield part, part.stop - part.start


def filled(x: Tensor, rows: int) -> Tensor:
    """Append rows of zeros to x [R, ...] so that x has `rows` rows."""
    return x if len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def logits_of(states: Tensor, weight: Tensor, bias: Tensor | None, banned: Tensor) -> Tensor:
    """Return the logits [R, V] of states [R, D] in max(float32, dtype), minus infinity at banned ids."""
    logits = wide_product(states, weight)
    if bias is not None:
        logits = logits + bias
    return logits.masked_fill(banned, -torch.inf)


def wide_product(states: Tensor, weight: Tensor) -> Tensor:
    """Return states [R, D] @ weight.T, accumulated and kept in max(float32, dtype), without half-precision rounding.

    If the states are float32 (from guidance) and the weights are half precision, the states are split into two
    half-precision parts, which together keep 16 bits of the states.
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
    """Append rows of zeros to a half-precision weight [V, D] so that 64 divides V. Do nothing if 8 divides V.

    If rows of a product are not aligned to 16 bytes (as for V = 50,258), cuBLAS takes three times as long.
    """
    uneven = weight.element_size() == 2 and weight.shape[0] % 8
    return torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % 64)) if uneven else weight


def row_stats(logits: Tensor, banned: Tensor, want: Collection[str], tokens: Tensor | None = None) -> dict[str, Tensor]:
    """Return the wanted statistics and "logsumexp" of logits [R, V]. If tokens [R, C] are given, add "token" [R, C]."""
    if kernels.usable(logits):
        return _kernel_stats(logits, offset_of(None, banned), want, tokens)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(banned, -torch.inf)
    return plain_stats(logits, banned, want, tokens)


def plain_stats(
    logits: Tensor, banned: Tensor, want: Collection[str], tokens: Tensor | None = None
) -> dict[str, Tensor]:
    """Return `row_stats` of logits that already have dtype max(float32, dtype) and are minus infinity at banned ids."""
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
    """Return what to add to a product with the head, [V] float32: the head's bias, but minus infinity at banned ids."""
    offset = torch.zeros(banned.shape, device=banned.device) if bias is None else bias.float()
    return offset.masked_fill(banned, -torch.inf)


def token_logprob(logits: Tensor, offset: Tensor, tokens: Tensor, lse: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return log p [R, C] of tokens [R, C]. rows [R]: which row of the logits to read for each (default: 0..R-1)."""
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
    """Return the wanted statistics of states [R, D], each [R] ("token" [R, C]). The file's top explains `fixed`."""
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
