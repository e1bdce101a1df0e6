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
With `Head.fixed`, every chunk has the same number of rows, and the last is filled up with zeros. Matrix products of
the same shape give a row the same bits at any place in the product; products of different shapes may not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import kernels
from .precision import working_dtype

if TYPE_CHECKING:
    from ..types import Head

CHUNK = 1 << 24  # at most this many logits are in one chunk
KERNEL_CHUNK = 1 << 28  # the same limit for the kernels (1 GiB); it is larger, because they do not copy the logits
FIXED_CHUNK = 1 << 26  # the kernels' limit if `fixed` is on: smaller, because the last chunk is filled up
_HAS_OUT_DTYPE = tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 8)


def chunk_rows(vocabulary: int, chunk: int) -> int:
    """Return the number of rows, at least one, whose logits are at most `chunk` numbers."""
    size = max(1, chunk // vocabulary)
    return size - size % 256 if size > 256 else size  # a multiple of the tile size of the GPU's matrix units


def fixed_rows(vocabulary: int, fast: bool) -> int:
    """Return the number of rows of every chunk under `fixed`: a power of two that depends on the vocabulary alone."""
    wanted = (FIXED_CHUNK if fast else CHUNK) // vocabulary
    return 1 << (min(max(wanted, 64), 4096).bit_length() - 1)


def filled(x: Tensor, rows: int) -> Tensor:
    """Append rows of zeros to x [R, ...] so that x has at least `rows` rows."""
    return x if len(x) >= rows else torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def logits_of(states: Tensor, weight: Tensor, bias: Tensor | None, banned: Tensor) -> Tensor:
    """Return the logits [R, V] of states [R, D] in max(float32, dtype), minus infinity at banned ids."""
    logits = wide_product(states, weight)
    if bias is not None:
        logits = logits + bias
    return logits.masked_fill(banned, -torch.inf)


def wide_product(states: Tensor, weight: Tensor) -> Tensor:
    """Return states [R, D] @ weight.T, accumulated and kept in max(float32, dtype). Float32 states (from guidance) are
    split into two half-precision parts for half-precision weights; together, the parts keep 16 bits."""
    if not len(states):  # no rows need no product
        return states.new_zeros(0, weight.shape[0], dtype=working_dtype(weight.dtype))
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
    """Append rows of zeros to a half-precision weight [V, D] so that 64 divides V, unless 8 divides V. If rows of a
    product are not aligned to 16 bytes (as for V = 50,258), cuBLAS takes three times as long."""
    uneven = weight.element_size() == 2 and weight.shape[0] % 8
    return torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % 64)) if uneven else weight


def plain_stats(
    logits: Tensor, banned: Tensor, want: Collection[str], tokens: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the wanted statistics and "logsumexp" of logits [R, V], which are minus infinity at banned ids. If tokens
    [R, C] are given, add "token" [R, C]."""
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


def token_logprob(logits: Tensor, offset: Tensor, tokens: Tensor, lse: Tensor) -> Tensor:
    """Return log p [R, C] of tokens [R, C]."""
    return logits.gather(1, tokens).float() + offset[tokens] - lse[:, None]


def kernel_stats(logits: Tensor, offset: Tensor, want: Collection[str], tokens: Tensor | None) -> dict[str, Tensor]:
    from .kernels.vocab import block_stats, join_blocks

    stats = join_blocks(block_stats(logits, offset, want), want, offset)
    if tokens is not None:
        stats["token"] = token_logprob(logits, offset, tokens, stats["logsumexp"])
    return stats


def unpack(masks: Tensor, vocabulary: int) -> Tensor:
    """Return masks [R, W] int32 as bools [R, V]. Bit b of word w says whether token 32 w + b is allowed."""
    bits = masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=masks.device) & 1
    return bits.flatten(1)[:, :vocabulary].bool()


def vocab_stats(
    states: Tensor, head: Head, want: Collection[str] = (), tokens: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the wanted statistics of states [R, D], each [R] ("token" [R, C])."""

    def measure(logits: Tensor, offset: Tensor | None, given: Tensor | None) -> dict[str, Tensor]:
        if offset is not None:
            return kernel_stats(logits, offset, want, given)
        return plain_stats(logits, head.banned, want, given)

    return over_chunks(measure, states, head, tokens)


Measure = Callable[[Tensor, Tensor | None, Any], dict[str, Tensor]]


def over_chunks(
    measure: Measure, states: Tensor, head: Head, given: Tensor | None, masks: Tensor | None = None
) -> dict[str, Tensor]:
    """Call measure(logits [r, V], offset, given [r, C]) for each chunk of r rows, and join what it returns.

    The logits of the kernels lack the offset [V]. The logits of the plain version are complete, and offset is None.
    masks [R, W]: the tokens that each row allows (see `unpack`). The logits of all others are minus infinity, and the
    result has "allowed", the logarithm of the probability that the allowed tokens had together, but 0 if there is only
    one, which is taken whatever the model says. No kernel is used then.
    """
    weight, (vocabulary, count) = head.weight, (len(head.weight), len(states))
    fast = masks is None and weight.is_cuda and kernels.usable(weight) and kernels.usable(states)
    offset, even = (offset_of(head.bias, head.banned), even_rows(weight)) if fast else (None, weight)
    size = fixed_rows(vocabulary, fast) if head.fixed else chunk_rows(vocabulary, KERNEL_CHUNK if fast else CHUNK)
    least = size if head.fixed and count else 0
    parts = []
    for start in range(0, max(1, count), size):
        rows = slice(start, start + size)
        some, more = filled(states[rows], least), None if given is None else filled(given[rows], least)
        if fast:  # the logits have no name here, so that their memory is freed early
            parts.append(measure(wide_product(some, even)[:, :vocabulary], offset, more))
            continue
        logits, whole = logits_of(some, weight, head.bias, head.banned), None
        if masks is not None:
            whole = logits.logsumexp(-1)
            fits = unpack(filled(masks[rows], least), vocabulary)
            logits = logits.masked_fill(~fits, -torch.inf)
        parts.append(measure(logits, None, more))
        if whole is not None:
            parts[-1]["allowed"] = (logits.logsumexp(-1) - whole).masked_fill(fits.sum(-1) == 1, 0)
    return {name: torch.cat([part[name] for part in parts])[:count] for name in parts[0]}
