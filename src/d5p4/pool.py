"""The pool: the partial answers (candidates) from which each decoding step chooses, for P prompts."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from .beams import Beams, Seats
from .ops.ties import occurrence
from .rng import hash_tokens, mix

HELD = ("tokens", "logprob", "revealed")


def pick(x: Tensor, index: Tensor) -> Tensor:
    """Return m rows of each prompt, [P, m, ...], given x [P, N, ...]. index [P, m] says which of the N rows."""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], index]


@dataclass(frozen=True)
class Pool:
    """N candidates for each of P prompts. This process holds the tokens of n of the N candidates. n is less than N only
    if several ranks share the pool."""

    tokens: Tensor  # [P, n, L] the tokens of the held candidates
    logprob: Tensor  # [P, n, L] the log-probability of each token when it was revealed; 0 where masked
    revealed: Tensor  # [P, n, L] the index of the step that revealed each token; -1 where masked
    row_hash: Tensor  # [P, N]
    tie: Tensor  # [P, N] a hash of the lineage (see `branch`), which decides between candidates of equal value
    group: Tensor  # [P, N]

    @staticmethod
    def start(tokens: Tensor, positions: Tensor, rows: int, k: int, dtype: torch.dtype) -> Pool:
        """Return the first pool, with `rows` masked rows per prompt in k contiguous groups. `tokens` [P, n, L] are the
        rows that this process holds."""
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
        """Return a pool of the rows at indices parents [P, m], with the tokens [G, q, L] of the parents in `seats`."""
        return Pool(
            **{
                f.name: seats.here(getattr(self, f.name)) if f.name in HELD else pick(getattr(self, f.name), parents)
                for f in fields(self)
            }
        )

    def keep(self, prompts: Tensor) -> Pool:
        """Return a pool of only those prompts whose indices are in `prompts`."""
        return Pool(**{f.name: getattr(self, f.name)[prompts] for f in fields(self)})

    def whole(self, beams: Beams) -> Pool:
        """Return the pool with the tokens of all N rows in this process."""
        return replace(self, **{name: beams.gather(getattr(self, name)) for name in HELD})

    def branch(
        self, tokens: Tensor, logprob: Tensor, positions: Tensor, step: int, regroup: bool, seats: Seats, beams: Beams
    ) -> Pool:
        """Return the next pool. The rows of this pool are the m parents, and those of the next pool are the children.

        tokens and logprob [G, q, C, L] belong to the children that this process has drawn; positions is [P, L]. With
        `regroup`, the children of each parent form a group. Otherwise a child stays in the group of its parent.
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
