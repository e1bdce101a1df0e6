"""The baseline of our comparisons: selection and sampling as the paper describes them, in plain torch.

The baseline computes the full log-softmax and the entropy in fp32, copies the hidden rows to fp32, runs greedy MAP from
every candidate (the paper's appendix), and draws from a float64 softmax at all positions of the parents. The baseline
handles one prompt at a time, and the host never waits for the device.
Letters in shapes: N candidates in k groups of w, L positions of the answer, T positions of prompt and answer together,
V tokens of the vocabulary, D width of a hidden row.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.nn import functional as F

from d5p4.ops import kernels
from d5p4.ops.precision import working_dtype
from d5p4.ops.sample import kernel_draw, plain_draw
from d5p4.ops.vocab import kernel_stats, offset_of, plain_stats
from d5p4.types import Hidden, Model

BETA = 10.0  # beta in the kernel diag(Q) + beta S, the same in all comparisons
_SMALLEST_PIVOT = 1e-10


def quality(logits: Tensor) -> Tensor:
    """Return the quality Q [N] of logits [N, L, V]: the mean negative entropy, min-max normalised over the pool."""
    log_p = torch.log_softmax(logits.float(), -1)
    score = (log_p.exp() * log_p).sum(-1).mean(-1)
    return (score - score.min()) / (score.max() - score.min() + 1e-12)


def unit_rows(features: Tensor) -> Tensor:
    """Return the embeddings [N, L D] of features [N, L, D]: flattened and normalised in fp32."""
    return F.normalize(features.flatten(1).float(), dim=-1)


def similarity(features: Tensor) -> Tensor:
    """Return S [N, N]: the cosines of features [N, L, D]."""
    rows = unit_rows(features)
    return rows @ rows.T


def greedy_map(kernel: Tensor, k: int) -> Tensor:
    """Run greedy MAP on kernel [N, N] from each of the N items, and return the best set [k] in ascending order.

    Each run updates a Cholesky factorisation in k steps of O(k N). The state of all N runs is [N, k, N].
    """
    size = kernel.shape[0]
    start = torch.arange(size, device=kernel.device)
    group = start // (size // k)
    variance = kernel.diagonal().repeat(size, 1)  # [N, N] the variance of each item in each run, given the run's picks
    rows = kernel.new_zeros(size, k, size)
    taken = torch.zeros(size, size, dtype=torch.bool, device=kernel.device)
    log_det = kernel.new_zeros(size)
    picks = []
    for t in range(k):
        pick = start if t == 0 else variance.masked_fill(taken, -torch.inf).argmax(-1)
        pivot = variance[start, pick].clamp_min(_SMALLEST_PIVOT)
        log_det = log_det + pivot.log()
        picks.append(pick)
        if t < k - 1:
            past = rows[:, :t]
            explained = torch.einsum("st,stn->sn", past[start, :, pick], past)
            rows[:, t] = (kernel[pick] - explained) / pivot.sqrt()[:, None]
            variance = variance - rows[:, t] ** 2
            taken = taken | (group == group[pick][:, None])
    return _best_start(picks, log_det)


def mmr_from_embeddings(quality: Tensor, embeddings: Tensor, k: int, alpha: float) -> Tensor:
    """Return the set of `mmr`, given normalised embeddings [N, D] instead of their similarity.

    This is the paper's diverse beam search: each pick computes the penalties <mean of the earlier picks, x_i> anew from
    the embeddings. The time is O(k N^2 D), and there is no Gram matrix.
    """
    return mmr(quality, embeddings, k, alpha, lambda total: total @ embeddings.T)


def mmr(
    quality: Tensor, rows: Tensor, k: int, alpha: float, penalties: Callable[[Tensor], Tensor] = lambda total: total
) -> Tensor:
    """Pick items greedily by Q_i - alpha * mean similarity to earlier picks, from N starts. Return the best set.

    `quality` is [N], and `rows` is the similarity [N, N]. The set [k] is in ascending order. The time is O(k N^2),
    because the similarities of the picks are only added up. `penalties` maps the sum of the rows of earlier picks to
    [N starts, N items].
    """
    size = quality.shape[0]
    start = torch.arange(size, device=quality.device)
    group = start // (size // k)
    pick, value, total = start, quality, rows
    taken = group == group[:, None]
    picks = [pick]
    for t in range(1, k):
        gain = (quality - alpha / t * penalties(total)).masked_fill(taken, -torch.inf)
        pick = gain.argmax(-1)
        value = value + gain[start, pick]
        total = total + rows[pick]
        taken = taken | (group == group[pick][:, None])
        picks.append(pick)
    return _best_start(picks, value)


def _best_start(picks: list[Tensor], value: Tensor) -> Tensor:
    """Return the k picks of the run with the largest value [N], ascending. `picks` has k tensors [N], one per pick."""
    return torch.stack(picks, -1).index_select(0, value.argmax()[None])[0].sort().values


def select(logits: Tensor, features: Tensor, k: int, beta: float) -> Tensor:
    """Return the indices [k] of the parents, given logits [N, L, V] and features [N, L, D] of the candidates."""
    return greedy_map(torch.diag(quality(logits)) + beta * similarity(features), k)


def select_diverse_beam(logits: Tensor, features: Tensor, k: int, alpha: float) -> Tensor:
    """Return the parents [k] of the paper's diverse beam search, which has no Gram matrix. See `select`."""
    return mmr_from_embeddings(quality(logits), unit_rows(features), k, alpha)


def sample(logits: Tensor, w: int) -> Tensor:
    """Draw w tokens per position [k, T, w] from logits [k, T, V]."""
    p = torch.softmax(logits.double(), -1)
    return torch.multinomial(p.flatten(0, 1), w, replacement=True).view(*p.shape[:2], w)


def step(
    logits: Tensor, features: Tensor, k: int, w: int, beta: float, prompt_logits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the parents [k] and the drawn tokens [k, T, w], given logits [N, L, V] and prompt_logits [N, T - L, V].

    The prompt's positions are sampled too, as in the authors' code.
    """
    parents = select(logits, features, k, beta)
    rows = logits[parents]
    if prompt_logits is not None:
        rows = torch.cat([prompt_logits[parents], rows], 1)
    return parents, sample(rows, w)


def eager_body(model: Model, tokens: Tensor) -> Hidden:
    """Run the body on tokens [R, T] in plain eager torch."""
    with kernels.off():
        return model.body(tokens)


# ---- our operations on logits that are in memory; a decode never stores its logits


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
    min_p: float | None = None,
    want: Collection[str] = (),
    rows: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Draw as `ops.sample.draw` does, but from logits [R', V]. rows [R] are the rows to use (or all, in order)."""
    how, logits = (temperature, (top_k, top_p, min_p), want), logits if rows is None else logits[rows]
    if kernels.usable(logits):
        return kernel_draw(logits, offset_of(None, banned), u, how)
    return plain_draw(_complete(logits, banned), banned, u, how)


def _complete(logits: Tensor, banned: Tensor) -> Tensor:
    return logits.to(working_dtype(logits.dtype)).masked_fill(banned, float("-inf"))
