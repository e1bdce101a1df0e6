"""Statistics and draws from logits that are in memory, for benchmarks. A decode never stores its logits."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from d5p4.ops import kernels
from d5p4.ops.precision import working_dtype
from d5p4.ops.sample import kernel_draw, plain_draw
from d5p4.ops.vocab import kernel_stats, offset_of, plain_stats


def row_stats(logits: Tensor, banned: Tensor, want: Collection[str]) -> dict[str, Tensor]:
    """Return the wanted statistics and "logsumexp" of logits [R, V], as `vocab_stats` does for hidden rows."""
    if kernels.usable(logits):
        return kernel_stats(logits, offset_of(None, banned), want, None)
    return plain_stats(_complete(logits, banned), banned, want)


def draw_logits(
    logits: Tensor,
    banned: Tensor,
    u: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    want: Collection[str] = (),
    rows: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Draw as `ops.sample.draw` does, but from logits [R', V]. rows [R] are the rows to use (or all, in order)."""
    how, logits = (temperature, top_k, top_p, want), logits if rows is None else logits[rows]
    if kernels.usable(logits):
        return kernel_draw(logits, offset_of(None, banned), u, how)
    return plain_draw(_complete(logits, banned), banned, u, how)


def _complete(logits: Tensor, banned: Tensor) -> Tensor:
    return logits.to(working_dtype(logits.dtype)).masked_fill(banned, float("-inf"))
