"""The pool of candidates of P prompts."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .ops.equal import occurrence
from .rng import hash_tokens, mix


def pick(x: Tensor, index: Tensor) -> Tensor:
    """x [P, N, ...] at index [P, m] -> [P, m, ...]."""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], index]


@dataclass(frozen=True)
class Pool:
    """N candidates for each of P prompts."""

    tokens: Tensor  # [P, N, L] window tokens
    row_hash: Tensor  # [P, N]
    tie: Tensor  # [P, N] hash of the row, its parent, its parent's occurrence and its place among the siblings
    group: Tensor  # [P, N]
    logprob: Tensor  # [P, N, L] of each token at its reveal, 0 while masked
    revealed: Tensor  # [P, N, L] step of each token's reveal, -1 while masked

    @staticmethod
    def start(tokens: Tensor, positions: Tensor, k: int, dtype: torch.dtype) -> Pool:
        """The first pool: equal rows [P, N, L] of masks, in k contiguous groups."""
        prompts, rows, _ = tokens.shape
        row_hash = hash_tokens(tokens, positions[:, None])
        place = torch.arange(rows, device=tokens.device).expand(prompts, rows)
        return Pool(
            tokens=tokens,
            row_hash=row_hash,
            tie=mix(row_hash, place),
            group=place // (rows // k),
            logprob=torch.zeros(tokens.shape, dtype=dtype, device=tokens.device),
            revealed=torch.full_like(tokens, -1),
        )

    def take(self, rows: Tensor) -> Pool:
        """The pool of rows [P, m]."""
        return Pool(**{f.name: pick(getattr(self, f.name), rows) for f in fields(self)})

    def keep(self, prompts: Tensor) -> Pool:
        """The pool of these prompts only."""
        return Pool(**{f.name: getattr(self, f.name)[prompts] for f in fields(self)})

    def branch(self, tokens: Tensor, logprob: Tensor, positions: Tensor, step: int, regroup: bool) -> Pool:
        """The next pool, when this one holds the m parents: tokens, logprob [P, m, C, L].

        `regroup`: the parents found the groups of the next pool; otherwise children stay in their parent's group.
        """
        prompts, parents, children, _ = tokens.shape
        flat = tokens.flatten(1, 2)
        row_hash = hash_tokens(flat, positions[:, None])
        mother = torch.arange(parents, device=tokens.device).repeat_interleave(children).expand(prompts, -1)
        place = torch.arange(children, device=tokens.device).repeat(parents)
        number = occurrence(self.row_hash, self.tie)
        new = flat != self.tokens.repeat_interleave(children, 1)
        return Pool(
            tokens=flat,
            row_hash=row_hash,
            tie=mix(row_hash, self.row_hash.gather(1, mother), number.gather(1, mother), place),
            group=mother if regroup else self.group.gather(1, mother),
            logprob=torch.where(new, logprob.flatten(1, 2), self.logprob.repeat_interleave(children, 1)),
            revealed=torch.where(new, step, self.revealed.repeat_interleave(children, 1)),
        )
