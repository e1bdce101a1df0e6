"""Order-Token Search, a beam search over orders and tokens together (Shen et al., 2026, arXiv 2601.20339).

K beams start as K equal rows of masks. At the first step of every block, each beam has K children instead of one, all
drawn from the same forward: the draws of a child decide its tokens and, by their probabilities, its positions. The
draft x̂ of a child takes the child's draws at all masked positions. A child is scored by one forward in which only the
block b of its draft is masked:

    score = score of the beam + Σ_{i in b} log p(x̂_i | x̂ without b)

The K children with the largest scores go on. All other steps are ordinary: one child per beam. The answers are the K
beams at the end, the best score first. With S steps and L / B blocks this takes S K + (L / B) K^2 rows. Equal rows run
only once, as everywhere.

If there are no blocks, or if `segment` is given, the children are drawn whenever `segment` more positions are revealed,
and b consists of the `segment` positions that the order would reveal next, given the draws of the child.

Where the model is sure, the children of a beam are equal, so those of the best beam take all places, and the K answers
are one text.

The paper returns only the best beam, `k=1, spare=K-1`, with blocks of 32, L = 256, S = 128 and a tuned temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from d5p4 import D5P4Error, Final, Kept, Option, Settings
from d5p4.ops.precision import steady_sum
from d5p4.ops.ties import coarse, ranked
from d5p4.options import LARGEST_POOL, Checked

from .drafts import SEGMENTS, Drafts, DraftSearch


@dataclass(frozen=True)
class OrderTokenSearch(Checked, DraftSearch):
    """Chooses every row. Where a segment begins, each row has K children, and the K best of all children are kept."""

    segment: Annotated[
        int | None,
        Option("Positions between two searches.", least=1, unset="a block, or 1/8 of the answer without blocks"),
    ] = None

    score_kind: ClassVar[str] = "log-probability of the segments in the drafts of an answer"

    def check(self, settings: Settings) -> None:
        """Raise an error if children may not be drawn one by one, or if they are too many."""
        if settings.groups**2 > LARGEST_POOL:
            reason = f"with spare={settings.spare} makes {settings.groups**2} children per search"
            raise D5P4Error(f"{reason}, more than {LARGEST_POOL}; lower one of them", option="k", value=settings.k)
        if settings.distinct:
            reason = "does not fit method ots, whose children are told apart by their drafts; leave it out"
            raise D5P4Error(reason, option="distinct", value=True)

    def cost(self, settings: Settings, steps: int) -> tuple[int, int]:
        """Return the forwards of a pool in all searches, and that no step compares candidates (see `Method`)."""
        length = max(steps, settings.gen_length or 0)  # segments count positions, of which a step may reveal several
        size = self.segment or settings.block_length or -(-length // SEGMENTS)
        return settings.groups * min(steps, -(-length // size)), 0

    def segment_of(self, start: int, revealed: int, length: int, block: int | None) -> int:
        """Return a number that changes where a segment begins (see `drafts`)."""
        if block is not None and self.segment is None:
            return start
        return revealed // (self.segment or -(-length // SEGMENTS))

    def rate(self, drafts: Drafts) -> Tensor:
        """Return Σ log p over the segment of each draft."""
        whole = drafts.blocks and self.segment is None
        size = drafts.place.shape[-1] if whole else self.segment or -(-drafts.tokens.shape[-1] // SEGMENTS)
        return steady_sum(drafts.logprob(size))

    def finish(self, final: Final, k: int) -> Kept:
        """Return the k rows with the largest scores. One beam has no children to compare, so nothing was scored."""
        if final.tie.shape[1] == 1:
            return Kept(ranked(torch.zeros_like(final.tie), final.tie))
        score = coarse(final.state["score"])  # rounded, so that scores that count as tied are equal
        rows = ranked(score, final.tie)[:, :k]
        return Kept(rows, score.gather(1, rows))
