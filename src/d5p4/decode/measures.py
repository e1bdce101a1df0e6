"""The numbers by which candidates are chosen: the quality Q of a candidate and the similarity S of two candidates.

Quality Q is one number per candidate. It is computed from the token distributions p_j at the candidate's window
positions j, with guidance, at temperature 1, without top_k, top_p and min_p.

    entropy          the mean over positions of -H_j
    self-certainty   the mean over positions of -(1/V) Σ_v log p_j(v)
    logprob          the mean of log p_j(token) at revealed positions and max log p_j at masked positions

A model that carries revealed tokens over (MDLM) has a one-hot distribution at revealed positions. There, entropy and
log-probability are 0, and self-certainty is not defined. The head of such a model runs on masked positions only.

The similarity S between candidates. The features of a candidate's window positions are pooled into one vector:

    flatten      the features of all positions, one after the other (as in the paper)
    mean         the mean of the features over all positions
    masked       the mean of the features over masked positions
    non-masked   the mean of the features over revealed positions

These vectors are scaled to unit vectors e_i. The cosine similarity of two candidates is e_i · e_j. Their rbf similarity
is exp(-γ |e_i - e_j|²) = exp(-2γ (1 - cos)).
"""

import math

import torch
from torch import Tensor

from ..ops.gram import pool_gram
from ..ops.precision import steady_mean, steady_sum, wide
from ..ops.vocab import vocab_stats
from ..types import Head

_STATISTIC = {"entropy": "entropy", "self-certainty": "certainty", "logprob": "best"}


def position_values(
    kind: str, states: Tensor, tokens: Tensor, masked: Tensor, head: Head, carry_over: bool
) -> tuple[Tensor, Tensor]:
    """Compute the value and the log-sum-exp [U, B] of each position from states [U, B, D], tokens and masked [U, B].

    The value is what `kind` averages over positions. Where the head does not run, value and log-sum-exp are 0.
    """
    rows = states.flatten(0, 1)
    if carry_over:
        place = masked.flatten().nonzero()[:, 0]
        rows = rows[place]
    given = tokens.reshape(-1, 1) if kind == "logprob" and not carry_over else None
    stats = vocab_stats(rows, head, (_STATISTIC[kind],), given)
    values, normalisers = stats[_STATISTIC[kind]], stats["logsumexp"]
    if kind == "entropy":
        values = -values
    elif given is not None:
        values = torch.where(masked.flatten(), values, stats["token"][:, 0])
    if carry_over:
        nothing = values.new_zeros(masked.numel())
        values, normalisers = (nothing.index_copy(0, place, seen) for seen in (values, normalisers))
    return values.view(masked.shape), normalisers.view(masked.shape)


def mean_score(
    kind: str, positions: str, values: Tensor, masked: Tensor, carry_over: bool, counted: Tensor | None = None
) -> Tensor:
    """Average the values [U, B] of each row over all its positions, or over its masked positions. Return the means [U].

    counted [U, B] bool, if given: other positions do not count. If self-certainty is averaged over masked positions, a
    row without masked positions has the mean NaN. The mean has the widest float type of the device. The mean of a row
    does not depend on the other rows.
    """
    if positions == "all" and not (carry_over and kind == "self-certainty"):
        if counted is None:
            return steady_mean(values)
        masked = counted
    elif counted is not None:
        masked = masked & counted
    count = masked.sum(-1)
    mean = steady_sum((values * masked).to(wide(values.device))) / count.clamp_min(1)
    return mean.masked_fill(count == 0, torch.nan) if kind == "self-certainty" else mean


def fill_finished(raw: Tensor) -> Tensor:
    """Replace each NaN in the scores [P, N] by the best score of the pool. A finished row (no masks) has the score
    NaN, and counts as being as certain as the most certain row."""
    best = raw.nan_to_num(nan=-torch.inf).amax(-1, keepdim=True)
    best = best.masked_fill(best == -torch.inf, 0)
    return torch.where(raw.isnan(), best, raw)


def normalise(raw: Tensor, how: str, kind: str, vocabulary: int) -> Tensor:
    """Compute the quality Q [P, N], which is never negative, from the raw scores s.

    minmax    (s - min) / (max - min) over the pool, as in the paper
    zscore    (s - min) / std over the pool; min replaces the mean, so that the kernel is positive semidefinite
    absolute  does not depend on the pool: 1 - H/log V, e^(mean log p), or 1 - e^-(self-certainty - log V)

    For minmax and zscore, Q is 0 if the scores of the pool differ only by rounding.
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


FEATURES = ("flatten", "mean", "masked", "non-masked")


def pooled_features(features: Tensor, masked: Tensor, pooling: str, counted: Tensor | None = None) -> Tensor:
    """Return the vectors to compare, [U, B, D] or [U, 1, D], of features [U, B, D] and masked [U, B].

    counted [U, B] bool, if given: other positions do not count.
    """
    if pooling == "flatten":
        return features if counted is None else features * counted[..., None]
    weight = torch.ones_like(masked) if pooling == "mean" else masked if pooling == "masked" else ~masked
    weight = weight if counted is None else weight & counted
    features = features.to(torch.promote_types(features.dtype, torch.float32))
    return (steady_sum(features * weight[..., None], 1) / weight.sum(-1, keepdim=True).clamp_min(1))[:, None]


def similarity(features: Tensor, slot: Tensor, kind: str, gamma: float) -> Tensor:
    """Compute S [P, N, N] from pooled features [U, B, D] and slot [P, N]. The features of row i in the pool of prompt p
    are features[slot[p, i]]."""
    cosine = pool_gram(features, slot)
    if kind == "cosine":
        return cosine
    apart = (1 - cosine).to(wide(cosine.device))
    # gamma is at most 1e30: a gamma too large for float32 is infinite, and infinity times the distance 0 is NaN.
    return torch.exp(-2 * min(gamma, 1e30) * apart).to(cosine.dtype)
