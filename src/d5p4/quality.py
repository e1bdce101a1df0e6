"""Quality Q: one number per candidate, from the guided, unfiltered, temperature-1 distributions of its window.

    entropy          -H_j                          mean over positions
    self-certainty   -(1/V) Σ_v log p_j(v)         mean over positions
    logprob          log p_j(token) where revealed, max log p_j where masked

A model that carries revealed tokens over (MDLM) has a one-hot distribution at revealed positions: entropy 0,
log-probability 0, no self-certainty. Its head runs on masked positions only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .ops.precision import steady_mean, steady_sum, wide
from .ops.vocab import vocab_stats
from .types import Head

KINDS = ("entropy", "self-certainty", "logprob")
POSITIONS = ("all", "masked")
NORMALISERS = ("minmax", "absolute", "zscore")
_STATISTIC = {"entropy": "entropy", "self-certainty": "certainty", "logprob": "best"}


def position_values(
    kind: str, states: Tensor, tokens: Tensor, masked: Tensor, head: Head, carry_over: bool
) -> tuple[Tensor, Tensor]:
    """Return the value and the log-sum-exp [U, B] of each position, for states [U, B, D], tokens [U, B], masked [U, B].

    Positions on which the head does not run have value 0 and log-sum-exp 0.
    """
    rows = states.flatten(0, 1)
    if carry_over:
        place = masked.flatten().nonzero()[:, 0]
        rows = rows[place]
    given = tokens.reshape(-1, 1) if kind == "logprob" and not carry_over else None
    stats = vocab_stats(rows, head.weight, head.bias, head.banned, (_STATISTIC[kind],), given, head.fixed)
    values, normalisers = stats[_STATISTIC[kind]], stats["logsumexp"]
    if kind == "entropy":
        values = -values
    elif given is not None:
        values = torch.where(masked.flatten(), values, stats["token"][:, 0])
    if carry_over:
        nothing = values.new_zeros(masked.numel())
        values, normalisers = (nothing.index_copy(0, place, seen) for seen in (values, normalisers))
    return values.view(masked.shape), normalisers.view(masked.shape)


def mean_score(kind: str, positions: str, values: Tensor, masked: Tensor, carry_over: bool) -> Tensor:
    """Return the mean [U] of the values over the positions that count. Self-certainty without such positions is NaN.

    The mean is in the widest float of the device, and its bits do not depend on the other rows.
    """
    if positions == "all" and not (carry_over and kind == "self-certainty"):
        return steady_mean(values)
    count = masked.sum(-1)
    mean = steady_sum((values * masked).to(wide(values.device))) / count.clamp_min(1)
    return mean.masked_fill(count == 0, torch.nan) if kind == "self-certainty" else mean


def fill_finished(raw: Tensor) -> Tensor:
    """Replace NaN scores [P, N] by the pool's best score: a finished row is as certain as the most certain row."""
    best = raw.nan_to_num(nan=-torch.inf).amax(-1, keepdim=True)
    best = best.masked_fill(best == -torch.inf, 0)
    return torch.where(raw.isnan(), best, raw)


def normalise(raw: Tensor, how: str, kind: str, vocabulary: int) -> Tensor:
    """Return Q [P, N] >= 0 from raw scores s.

    minmax    (s - min) / (max - min) over the pool, as in the paper; 0 where the spread is rounding noise
    zscore    (s - min) / std, 0 where the spread is rounding noise; the shift keeps the kernel positive semidefinite
    absolute  independent of the pool: 1 - H/log V, e^(mean log p), or 1 - e^-(self-certainty - log V)
    """
    if how == "absolute":
        if kind == "entropy":
            return (1 + raw / math.log(max(vocabulary, 2))).clamp(0, 1)
        if kind == "logprob":
            return raw.exp()
        return -torch.expm1(-(raw - math.log(vocabulary)).clamp_min(0))
    low = raw.amin(-1, keepdim=True)
    spread = raw.amax(-1, keepdim=True) - low
    noise = spread <= 1e-6 * raw.mean(-1, keepdim=True).abs().clamp_min(1)
    scale = spread
    if how == "zscore":
        scale = steady_mean((raw - steady_mean(raw)[..., None]).square())[..., None].sqrt()
    return ((raw - low) / scale.masked_fill(noise, 1)).masked_fill(noise, 0)
