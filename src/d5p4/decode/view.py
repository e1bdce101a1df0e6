"""What a selector sees of the pools at one step, and how it is computed from the hidden states of a forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple
from weakref import proxy

import torch
from torch import Tensor

from ..errors import D5P4Error
from ..ops import kernels
from ..ops.precision import steady_sum, wide
from ..types import Choice, Selector
from .measures import fill_finished, mean_score, normalise, position_values, similarity
from .pool import Pool
from .rows import Rows, WindowHidden
from .schedule import Step, Watch


class Cost(NamedTuple):
    """What forwards of a step cost, each [P]."""

    rows: Tensor
    nominal: Tensor  # the rows if equal rows ran apart
    tokens: Tensor


class PoolView:
    """The pools of P prompts at one step, as a selector sees them.

    Quality, similarity and raw scores are computed when they are first read, because a selector may not need all three.
    Each of the three may be given as a tensor or as a function without arguments. `score(kind, positions)` returns
    raw scores of other kinds.
    """

    def __init__(
        self,
        *,
        group: Tensor,
        tie: Tensor,
        quality: Tensor | Callable[[], Tensor],
        similarity: Tensor | Callable[[], Tensor],
        raw: Tensor | Callable[[], Tensor] | None = None,
        score: Callable[[str, str], Tensor] | None = None,
        vocabulary: int = 0,
        step: int = 0,
        last: bool = False,
        width: int = 1,
        state: dict[str, Any] | None = None,
        progress: Tensor | None = None,
        awake: Tensor | None = None,
        path: Tensor | Callable[[], Tensor] | None = None,
        start: Tensor | Callable[[], Tensor] | None = None,
    ) -> None:
        self.group = group  # [P, N] int64, the group of each row; for methods with a partition, groups are contiguous
        self.tie = tie  # [P, N] int64, a hash of each row's lineage, which decides between equal values
        self.step = step
        self.last = last
        self.width = width  # w, the number of children of a chosen parent (except at the last step)
        self.vocabulary = vocabulary  # the number of token ids that can be drawn; E-SMC divides by log(vocabulary)
        # A dict in which a method may keep tensors [P, ...] from step to step. Values that it has not set may be zeros.
        self.state = {} if state is None else state
        self.progress = progress  # [P] the share of revealed positions, under adaptive rules
        self.awake = awake  # [P, N] the rows of a tree that do not sleep; None: all rows
        self._quality, self._similarity, self._raw, self._score = quality, similarity, raw, score
        self._path, self._start = path, start

    @property
    def size(self) -> int:
        """The number N of rows in one prompt's pool."""
        return self.group.shape[1]

    @cached_property
    def quality(self) -> Tensor:
        """Q [P, N], normalised and never negative. Higher is better. Q is float32 if the device has no float64."""
        return self._quality() if callable(self._quality) else self._quality

    @cached_property
    def similarity(self) -> Tensor:
        """S [P, N, N], the cosine (or RBF) Gram matrix with a diagonal of exactly 1.

        S is float32 if the Triton kernels compute S (on CUDA, unless the model is float64) or if the device has no
        float64. Otherwise S is float64.
        """
        return self._similarity() if callable(self._similarity) else self._similarity

    @cached_property
    def raw(self) -> Tensor:
        """The raw scores [P, N], from which Q is computed."""
        raw = self.quality if self._raw is None else self._raw
        return raw() if callable(raw) else raw

    @cached_property
    def path(self) -> Tensor:
        """The sum [P, N] of the log-probabilities that the tokens of a row had when they were revealed."""
        if self._path is None:
            raise TypeError("this pool has no log-probabilities; give PoolView path=")
        return self._path() if callable(self._path) else self._path

    @cached_property
    def start(self) -> Tensor | None:
        """The window position [P] at which the block of each prompt starts. None: the window is one block."""
        return self._start() if callable(self._start) else self._start

    def score(self, kind: str, positions: str) -> Tensor:
        """Return raw scores [P, N] over "all" or "masked" positions, by "entropy", "self-certainty" or "logprob"."""
        if self._score is None:
            raise TypeError("this pool has no score function; give PoolView score=")
        return self._score(kind, positions)

    def check(self, choice: Any, after: int | None, watch: Watch) -> Choice:
        """Return the choice, or raise an error that says what is wrong with the choice. The next pool must have `after`
        rows, unless `after` is None.

        If a parent is outside of the pool, `watch` raises the error later. Until then, a row of the pool replaces it.
        """
        parents = getattr(choice, "parents", None)
        if not isinstance(choice, Choice) or not isinstance(parents, Tensor) or parents.dtype != torch.int64:
            raise D5P4Error(f"a selector must return a Choice of int64 parents (pool.keep makes one), not {choice!r}")
        shape, prompts = tuple(parents.shape), self.group.shape[0]
        if len(shape) != 2 or shape[0] != prompts or shape[1] < 1:
            raise D5P4Error(f"the selector chose parents of shape {shape}, not [P, m] with P = {prompts} prompts")
        if not isinstance(choice.children, int) or isinstance(choice.children, bool) or choice.children < 1:
            raise D5P4Error(f"the selector chose {choice.children!r} children per parent, not a whole number above 0")
        if after is not None and choice.children != 1:
            raise D5P4Error(f"the selector chose {choice.children} children per parent at the last step; choose one")
        if after is not None and shape[1] != after:
            raise D5P4Error(f"the selector chose {shape[1]} x 1 rows where {after} are needed")
        inside = parents.clamp(0, self.size - 1)

        def complaint(holds: Tensor) -> D5P4Error:
            return D5P4Error(
                f"the selector chose row {int(parents[~holds][0])} at step {self.step}, which is outside the pool of "
                f"{self.size}"
            )

        watch.expect(parents == inside, complaint)
        return Choice(inside.sort(-1).values, choice.children)

    def keep(self, parents: Tensor) -> Choice:
        """Choose the parents [P, m]. Each parent has w children, or one child at the last step."""
        return Choice(parents, 1 if self.last else self.width)

    def stay(self) -> Choice:
        """Choose every row, with one child each, so that nothing is selected."""
        everyone = torch.arange(self.size, device=self.group.device).expand_as(self.group)
        return Choice(everyone, 1)


class Look(PoolView):
    """The view of a pool after a forward. Quality, similarity and scores are computed from the hidden states. Equal
    rows get equal scores."""

    def __init__(
        self,
        pool: Pool,
        hidden: WindowHidden,
        step: Step,
        state: dict[str, Any] | None = None,
        runner: Rows | None = None,
    ) -> None:
        # A proxy, because the states of a view that refers to itself would stay until Python searches for such cycles.
        settings, me = pool.call.settings, proxy(self)
        super().__init__(
            group=pool.group,
            tie=pool.tie,
            quality=lambda: me._compute_quality(),
            similarity=lambda: me.compare(),
            raw=lambda: me.score(settings.quality, settings.positions),
            vocabulary=pool.call.head.drawable,
            step=step.index,
            last=step.last,
            width=min(settings.width, pool.call.head.drawable) if settings.reserve else settings.width,
            state=state,
            progress=pool.progress if not step.exact and settings.adaptive else None,
            awake=pool.awake,
            path=lambda: pool.call.beams.gather(steady_sum(pool.logprob.to(wide(pool.logprob.device)))),
            start=partial(_block_start, pool, step) if settings.block_length else None,
        )
        self.pool, self.hidden, self.runner = pool, hidden, runner
        self.asked: Cost | None = None  # what the forwards cost that the method asked for
        self._block = step.of(hidden.owner[:, 0])
        self._values: dict[str, Tensor] = {}
        self._counts: dict[bool, Tensor | None] = {}

    def choose(self, select: Selector, step: int, last: bool) -> Choice:
        """Return the parents that the method chooses on the first rank. `last`: the next pool has the answers."""
        call, groups = self.pool.call, self.pool.call.settings.groups
        try:
            chosen = select(self, groups, self.pool.keys(step))
        except Exception:
            call.watch.check()  # if the cause is that logits are not finite, this raises an error that says so
            raise
        return call.beams.agree(self.check(chosen, groups if last else None, call.watch))

    def score(self, kind: str, positions: str, shown: bool = False) -> Tensor:
        """Return the raw score [P, N] of each row over the positions of the block, or of the window for complete rows.

        `shown`: leave out the positions behind the end of the text, even if `stop` is off.
        """
        pool, call, hidden = self.pool, self.pool.call, self.hidden
        carry_over = call.model.carry_over
        if kind not in self._values:
            states, tokens = self._block.cut(hidden.states), self._tokens
            masked = self._masked if carry_over else tokens == call.model.mask_id
            self._values[kind], logsumexp = position_values(kind, states, tokens, masked, call.head, carry_over)
            first = call.beams.rank * hidden.slot.shape[1]
            call.watch.expect_finite(logsumexp.sum(-1).isfinite(), pool.names, hidden.owner, self.step, first)
        mean = mean_score(kind, positions, self._values[kind], self._masked, carry_over, self._counted(shown))
        scores = call.beams.gather(mean[hidden.slot])
        return fill_finished(call.beams.alike(scores, self._names))

    def compare(self, shown: bool = False) -> Tensor:
        """Return the similarity S [P, N, N] from the features of the distinct rows. `shown` is as in `score`."""
        settings, hidden = self.pool.call.settings, self.hidden
        features = self._block.cut(hidden.features if settings.feature_layer == "model" else hidden.states)
        how = settings.features, settings.similarity, settings.gamma
        gram = partial(self.pool.call.beams.cosine, row_hash=self._names)
        matrix = similarity(features, self._masked, hidden.slot, *how, gram, self._counted(shown))
        return matrix if kernels.usable(matrix, matrix.shape[-1]) else matrix.to(wide(matrix.device))

    def _compute_quality(self) -> Tensor:
        raw, settings = self.raw.to(wide(self.raw.device)), self.pool.call.settings
        return normalise(raw, settings.normalise, settings.quality, self.vocabulary)

    def _own(self, rows: Tensor) -> Tensor:
        """Return the values [U, B] of the distinct rows at the positions of the block, from rows [P, n, L]."""
        return self._block.cut(rows[self.hidden.owner[:, 0], self.hidden.owner[:, 1]])

    @property
    def _names(self) -> Tensor:
        """Names [P, N] of rows. Rows with equal names have equal scores."""
        return self.pool.row_hash

    @cached_property
    def _tokens(self) -> Tensor:
        return self._own(self.pool.tokens)

    @cached_property
    def _masked(self) -> Tensor:
        """Which positions [U, B] were masked at the forward."""
        return self._tokens == self.pool.call.model.mask_id

    def _counted(self, shown: bool) -> Tensor | None:
        """Return which positions [U, B] count, or None if all do."""
        if shown not in self._counts:
            inside = self._block.inside()
            before = self.pool.call.counted(self.pool.tokens, self.pool.appended, shown)
            if before is not None:
                inside = self._own(before) if inside is None else self._own(before) & inside
            self._counts[shown] = inside
        return self._counts[shown]


def _block_start(pool: Pool, step: Step) -> Tensor:
    return torch.full_like(pool.key, step.start) if step.starts is None else step.starts
