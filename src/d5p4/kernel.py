"""The kernel L of the determinantal point process, which weighs the quality of candidates against their similarity.

In both forms, a larger beta asks for more diversity, and beta = 0 means quality alone (greedy beam search).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .errors import D5P4Error

KERNELS = ("additive", "multiplicative")


def additive(quality: Tensor, similarity: Tensor, beta: float) -> Tensor:
    """Return L = diag(Q) + beta S [P, N, N] for quality [P, N] and similarity [P, N, N]."""
    check_beta(beta)
    return torch.diag_embed(quality) + beta * similarity


def multiplicative(quality: Tensor, similarity: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return L = diag(e^{Q/beta}) S diag(e^{Q/beta}) as S [P, N, N] and log_gain = 2 Q / beta [P, N], without overflow.

    det(L_A) = det(S_A) exp(sum of log_gain over A).
    """
    check_beta(beta)
    if beta == 0:
        raise D5P4Error("the multiplicative kernel divides by beta, got beta = 0; use method='greedy-beam'")
    return similarity, 2 * quality / beta


def build(kind: str, quality: Tensor, similarity: Tensor, beta: float) -> tuple[Tensor, Tensor | None]:
    """Return the kernel [P, N, N] and log_gain [P, N] (None if additive) of the form that is named `kind`."""
    check_kind(kind)
    if kind == "additive":
        return additive(quality, similarity, beta), None
    return multiplicative(quality, similarity, beta)


def check_beta(beta: float) -> None:
    if not (math.isfinite(beta) and beta >= 0):
        raise D5P4Error(f"beta must be a finite number >= 0, got {beta}")


def check_kind(kind: str) -> None:
    if kind not in KERNELS:
        raise D5P4Error(f"kernel must be one of {', '.join(KERNELS)}, got {kind!r}")
