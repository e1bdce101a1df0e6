"""The pool of candidates of P prompts."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from .beams import Beams, Seats
from .ops.ties import occurrence
from .rng import hash_tokens, mix

HELD = ("tokens", "logprob", "revealed")


def pick(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows of x [P, N, ...] at index [P, m], as [P, m, ...]."""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], index]


@dataclass(frozen=True)
class Pool:
    """N candidates for each of P prompts. This process holds the tokens of n of them (all, unless ranks share work)."""

    tokens: Tensor  # [P, n, L] window tokens
    logprob: Tensor  # [P, n, L] log-probability of each token at its reveal, 0 while masked
    revealed: Tensor  # [P, n, L] the step that revealed each token, -1 while masked
    row_hash: Tensor  # [P, N]
    tie: Tensor  # [P, N] hash of the row, its parent, the parent's number among equal rows and the place among siblings
    group: Tensor  # [P, N]

    @staticmethod
    def start(tokens: Tensor, positions: Tensor, rows: int, k: int, dtype: torch.dtype) -> Pool:
        """Return the first pool: `rows` rows in k contiguous groups. tokens [P, n, L] are the masked rows held here."""
        prompts = len(tokens)
        row_hash = hash_tokens(tokens[:, :1], positions[:, None]).expand(prompts, rows)
        place = torch.arange(rows, device=tokens.device).expand(prompts, rows)
        return Pool(
            tokens=tokens,
            logprob=torch.zeros(tokens.shape, dtype=dtype, device=tokens.device),
            revealed=torch.full_like(tokens, -1),
            row_hash=row_hash,
            tie=mix(row_hash, place),
            group=place // (rows // k),
        )

    def take(self, parents: Tensor, seats: Seats) -> Pool:
        """Return the pool of the parents [P, m], with the tokens [G, q, L] of the parents at `seats`."""
        return Pool(
            **{
                f.name: seats.here(getattr(self, f.name)) if f.name in HELD else pick(getattr(self, f.name), parents)
                for f in fields(self)
            }
        )

    def keep(self, prompts: Tensor) -> Pool:
        """Return the pool of these prompts only."""
        return Pool(**{f.name: getattr(self, f.name)[prompts] for f in fields(self)})

    def whole(self, beams: Beams) -> Pool:
        """Return the pool with the tokens of all its rows held here."""
        return replace(self, **{name: beams.gather(getattr(self, name)) for name in HELD})

    def branch(
        self, tokens: Tensor, logprob: Tensor, positions: Tensor, step: int, regroup: bool, seats: Seats, beams: Beams
    ) -> Pool:
        """Return the pool of the children of this pool, whose rows are the m parents.

        tokens, logprob [G, q, C, L] are those of the children drawn here; positions [P, L]. With `regroup`, each parent
        starts a group of the next pool; otherwise children stay in the group of their parent.
        """
        prompts, parents = self.row_hash.shape
        children = tokens.shape[2]
        new = tokens != self.tokens[:, :, None]
        tokens, logprob, revealed = (
            beams.settle(rows, seats).flatten(1, 2)
            for rows in (
                tokens,
                torch.where(new, logprob, self.logprob[:, :, None]),
                torch.where(new, step, self.revealed[:, :, None]),
            )
        )
        row_hash = beams.gather(hash_tokens(tokens, positions[:, None]))
        mother = torch.arange(parents, device=tokens.device).repeat_interleave(children).expand(prompts, -1)
        place = torch.arange(children, device=tokens.device).repeat(parents)
        number = occurrence(self.row_hash, self.tie)
        return Pool(
            tokens=tokens,
            logprob=logprob,
            revealed=revealed,
            row_hash=row_hash,
            tie=mix(row_hash, self.row_hash.gather(1, mother), number.gather(1, mother), place),
            group=mother if regroup else self.group.gather(1, mother),
        )
