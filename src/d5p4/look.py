"""Looking at a pool after its forward: raw scores, Q and S, each computed when first asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import NonFiniteLogits
from .ops.width import wide
from .pool import Pool, pick
from .quality import fill_finished, mean_score, normalise, position_values
from .rows import WindowHidden
from .settings import Settings
from .similarity import similarity
from .types import Head, Model, PoolView, Step


def check_finite(logsumexp: Tensor, owner: Tensor, prompts: Tensor, step: int) -> None:
    """Raise when a log-sum-exp [R] is not finite; owner [R, 2] says whose row that was."""
    bad = (~logsumexp.isfinite()).nonzero()
    if len(bad):
        prompt, row = owner[bad[0, 0]].tolist()
        raise NonFiniteLogits(
            f"the model gave logits that are not finite at step {step}, prompt {int(prompts[prompt])}, row {row}; "
            "check the weights and guidance, or load them in float32"
        )


class Look:
    """One pool, its hidden rows and what can be read off them. Equal rows get equal numbers by construction."""

    def __init__(
        self,
        pool: Pool,
        hidden: WindowHidden,
        states: Tensor,
        step: Step,
        settings: Settings,
        model: Model,
        head: Head,
        prompts: Tensor,
    ) -> None:
        self.pool, self.hidden, self.step, self.settings = pool, hidden, step, settings
        self.states = states  # [U, L, D] after guidance; features stay those of the conditional rows
        self.model, self.head, self.prompts = model, head, prompts
        self._values: dict[tuple[str, int, int], tuple[Tensor, Tensor]] = {}

    def score(self, kind: str, positions: str, whole: bool = False) -> Tensor:
        """[P, N] raw score over the block (or the whole window)."""
        start, stop = (0, self.states.shape[1]) if whole else (self.step.start, self.step.stop)
        if (kind, start, stop) not in self._values:
            owner = self.hidden.owner
            tokens = self.pool.tokens[owner[:, 0], owner[:, 1], start:stop]
            masked = tokens == self.model.mask_id
            values, logsumexp = position_values(
                kind, self.states[:, start:stop], tokens, masked, self.head, self.model.carry_over
            )
            check_finite(logsumexp.sum(-1), owner, self.prompts, self.step.index)
            self._values[kind, start, stop] = values, masked
        values, masked = self._values[kind, start, stop]
        mean = mean_score(kind, positions, values, masked, self.model.carry_over)
        return fill_finished(mean[self.hidden.slot])

    def similarity(self) -> Tensor:
        """S [P, N, N]: the Gram matrix of the distinct rows, spread over the pool."""
        first, settings = self.hidden.first, self.settings
        is_first = first == torch.arange(first.shape[1], device=first.device)
        rank = (is_first.cumsum(-1) - 1).gather(1, first)  # which distinct row of its prompt a row is
        distinct = first.new_zeros(first.shape[0], int(rank.max()) + 1).scatter(1, rank, first)
        features = self.hidden.features if settings.feature_layer == "model" else self.hidden.states
        span = slice(self.step.start, self.step.stop)
        masked = pick(self.pool.tokens[..., span] == self.model.mask_id, distinct)
        rows = features[self.hidden.slot.gather(1, distinct)][:, :, span]
        small = similarity(rows, masked, settings.features, settings.similarity, settings.gamma)
        return pick(pick(small, rank).transpose(1, 2), rank).to(wide(small.device))

    def view(self, state: dict[str, Any]) -> PoolView:
        """What the selector sees."""
        settings = self.settings

        def quality() -> Tensor:
            raw = view.raw.to(wide(view.raw.device))
            return normalise(raw, settings.normalise, settings.quality, self.head.drawable)

        view = PoolView(
            group=self.pool.group,
            tie=self.pool.tie,
            quality=quality,
            similarity=self.similarity,
            raw=lambda: self.score(settings.quality, settings.positions),
            score=self.score,
            vocabulary=self.head.drawable,
            step=self.step.index,
            last=self.step.last,
            width=settings.w,
            state=state,
        )
        return view
