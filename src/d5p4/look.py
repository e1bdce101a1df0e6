"""`Look` computes a pool's raw scores, quality Q and similarity S after a forward, each when it is first needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from .beams import Beams
from .errors import NonFiniteLogits
from .ops import kernels
from .ops.precision import wide
from .options import Settings
from .pool import Pool
from .quality import fill_finished, mean_score, normalise, position_values
from .rows import WindowHidden
from .similarity import similarity
from .types import Head, Model, PoolView, Step
from .watch import Watch


def not_finite(prompts: Tensor, owner: Tensor, step: int, first_row: int = 0) -> Callable[[Tensor], NonFiniteLogits]:
    """Return a function that makes the error about rows whose logits are not finite. The function takes a bool [R] that
    is True for rows with finite logits. For each of the R rows, owner [R, 2] has the index of its prompt in `prompts`
    and its index among this process's rows. `first_row` is the pool index of the first of these rows."""

    def complaint(finite: Tensor) -> NonFiniteLogits:
        wrong = owner[~finite]
        numbers = prompts[wrong[:, 0]].tolist()
        place = f"step {step}, prompt {numbers[0]}, row {first_row + int(wrong[0, 1])}"
        cure = "check the weights and guidance, or load them in float32"
        reason = f"the model gave logits that are not finite at {place}; {cure}"
        return NonFiniteLogits(reason, prompts=sorted(set(numbers)))

    return complaint


class Look:
    """A pool, the hidden states of its rows, and scores computed from these states. Equal rows get equal scores."""

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
        watch: Watch,
        beams: Beams,
    ) -> None:
        self.pool, self.hidden, self.step, self.settings = pool, hidden, step, settings
        self.states = states  # [U, L, D] of the U distinct rows, with guidance; the features have no guidance
        self.model, self.head, self.prompts, self.watch, self.beams = model, head, prompts, watch, beams
        self._values: dict[tuple[str, int, int], tuple[Tensor, Tensor]] = {}

    def score(self, kind: str, positions: str, whole: bool = False) -> Tensor:
        """Return the raw score [P, N] of each row over the positions of the block, or over the window if `whole`."""
        start, stop = (0, self.states.shape[1]) if whole else (self.step.start, self.step.stop)
        if (kind, start, stop) not in self._values:
            owner = self.hidden.owner
            tokens = self.pool.tokens[owner[:, 0], owner[:, 1], start:stop]
            masked = tokens == self.model.mask_id
            values, logsumexp = position_values(
                kind, self.states[:, start:stop], tokens, masked, self.head, self.model.carry_over
            )
            complaint = not_finite(self.prompts, owner, self.step.index, self.first_row)
            self.watch.expect(logsumexp.sum(-1).isfinite(), complaint)
            self._values[kind, start, stop] = values, masked
        values, masked = self._values[kind, start, stop]
        mean = mean_score(kind, positions, values, masked, self.model.carry_over)
        scores = self.beams.gather(mean[self.hidden.slot])
        return fill_finished(self.beams.alike(scores, self.pool.row_hash))

    def similarity(self) -> Tensor:
        """Compute the similarity S [P, N, N] from the features of the distinct rows."""
        settings, owner = self.settings, self.hidden.owner
        features = self.hidden.features if settings.feature_layer == "model" else self.hidden.states
        span = slice(self.step.start, self.step.stop)
        masked = self.pool.tokens[owner[:, 0], owner[:, 1], span] == self.model.mask_id
        how = settings.features, settings.similarity, settings.gamma
        gram = partial(self.beams.cosine, row_hash=self.pool.row_hash)
        matrix = similarity(features[:, span], masked, self.hidden.slot, *how, gram)
        return matrix if kernels.usable(matrix, matrix.shape[-1]) else matrix.to(wide(matrix.device))

    @property
    def first_row(self) -> int:
        """The index, in the pool, of the first row that this process holds."""
        return self.beams.rank * self.hidden.slot.shape[1]

    def view(self, state: dict[str, Any]) -> PoolView:
        """Return the view of the pool that is passed to the selector."""
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
