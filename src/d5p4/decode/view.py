"""What a selector sees of the pools at one step, and how it is computed from the hidden states of a forward."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..errors import D5P4Error
from ..ops import kernels
from ..ops.precision import steady_sum, wide
from ..types import Choice, Selector
from .measures import fill_finished, mean_score, normalise, pooled_features, position_values, similarity
from .pool import Call, Pool, starting_at
from .rows import Rows, WindowHidden
from .schedule import Checks, Steps, sent
from .texts import Prompts

SPENT = "spent"  # the name in `Pool.memory` of what `ForwardView.run` has cost each prompt so far


@dataclass(eq=False)
class PoolView:
    """The pools of P prompts at one step, as a selector sees them. In the loop, quality, similarity and the values from
    `raw` on are computed when they are first read, because a selector may not need them."""

    group: Tensor  # [P, N] int64, the group of each row; for methods with a partition, groups are contiguous
    tie: Tensor  # [P, N] int64, a hash of each row's lineage, which decides between equal values
    quality: Tensor  # [P, N] Q, normalised and never negative; higher is better; float32 if there is no float64
    # [P, N, N] S, the cosine (or RBF) Gram matrix with a diagonal of exactly 1; float32 if the Triton kernels compute S
    # (on CUDA, unless the model is float64) or if the device has no float64, otherwise float64
    similarity: Tensor
    step: int = 0  # the number of steps that these prompts have taken
    last: bool = False
    width: int = 1  # w, the number of children of a chosen parent (except at the last step)
    vocabulary: int = 0  # the number of token ids that can be drawn; E-SMC divides by log(vocabulary)
    # A dict in which a method may keep tensors [P, ...] from step to step. Those of a prompt that joins are 0.
    state: dict[str, Any] = field(default_factory=dict)
    progress: Tensor | None = None  # [P] the share of revealed positions, under adaptive rules
    awake: Tensor | None = None  # [P, N] the rows of a tree that do not sleep; None: all rows
    raw: Tensor | None = None  # [P, N] the raw scores, from which Q is computed
    path: Any = None  # [P, N] the sum of the log-probabilities that a row's tokens had at their reveal
    # score(kind, positions) returns raw scores [P, N] by "entropy", "self-certainty" or "logprob", over the positions
    # that are "all" or "masked"
    score: Any = None
    start: Tensor | None = None  # [P] the window position at which the block starts; None: the window is one block

    @property
    def size(self) -> int:
        """The number N of rows in one prompt's pool."""
        return self.group.shape[1]

    def check(self, choice: Any, after: int | None, checks: Checks) -> Choice:
        """Return the choice, or raise an error that says what is wrong with the choice. The next pool must have `after`
        rows, unless `after` is None.

        If a parent is outside of the pool, `checks` raises the error later. Until then, a row of the pool replaces it.
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

        checks.expect(parents == inside, complaint)
        return Choice(inside.sort(-1).values, choice.children)

    def keep(self, parents: Tensor) -> Choice:
        """Choose the parents [P, m]. Each parent has w children, or one child at the last step."""
        return Choice(parents, 1 if self.last else self.width)

    def stay(self) -> Choice:
        """Choose every row, with one child each, so that nothing is selected."""
        everyone = torch.arange(self.size, device=self.group.device).expand_as(self.group)
        return Choice(everyone, 1)


class ForwardView(PoolView):
    """The view of a pool after a forward. Quality, similarity and scores are computed from the hidden states. Equal
    rows get equal scores."""

    def __init__(self, call: Call, pool: Pool, hidden: WindowHidden, now: Steps, given: Prompts) -> None:
        settings, drawable = call.settings, call.head.drawable
        self.group, self.tie, self.awake = pool.group, pool.tie, pool.awake
        self.last, self.vocabulary = now.last, drawable
        self.width = min(settings.width, drawable) if settings.reserve else settings.width
        self.state = dict(pool.memory)
        self.progress = pool.progress(torch.get_default_dtype()) if settings.adaptive else None
        self.call, self.pool, self.hidden, self.given = call, pool, hidden, given
        self.now = now
        self.forward = pool.step  # [P] the number of the step whose forward gave the states
        self._values: dict[str, Tensor] = {}
        self._counts: dict[bool, Tensor | None] = {}

    @property
    def step(self) -> int:  # type: ignore[override]
        if any(one.index != self.now.by_prompt[0].index for one in self.now.by_prompt):
            raise D5P4Error("these prompts are at different steps; a search that reads `step` must not be `timeless`")
        return self.now.by_prompt[0].index

    @cached_property
    def _block(self) -> Steps:
        return self.now.of(self.hidden.owner[:, 0])

    @cached_property
    def quality(self) -> Tensor:  # type: ignore[override]
        raw, settings = self.raw.to(wide(self.raw.device)), self.call.settings
        return normalise(raw, settings.normalise, settings.quality, self.vocabulary)

    @cached_property
    def similarity(self) -> Tensor:  # type: ignore[override]
        return self.compare()

    @cached_property
    def raw(self) -> Tensor:  # type: ignore[override]
        return self.score(self.call.settings.quality, self.call.settings.positions)

    @cached_property
    def path(self) -> Tensor:
        own = self.pool.logprob[..., : self.pool.tokens.shape[-1] - self.call.extra]
        if self.pool.end is not None:
            own = own.masked_fill(starting_at(self.pool.end, own), 0)
        return steady_sum(own.to(wide(own.device)))

    @cached_property
    def start(self) -> Tensor | None:  # type: ignore[override]
        if not self.call.settings.block_length:
            return None
        return torch.full_like(self.pool.key, self.now.start) if self.now.starts is None else self.now.starts

    def part(self, places: list[int]) -> ForwardView:
        """Return the view of some prompts. This method waits for the device."""
        at = sent(places, self.tie.device)
        now, given = self.now.keep(places, at.device), self.given.take(at)
        return ForwardView(self.call, self.pool.keep(at), self.hidden.take(at), now, given)

    @property
    def costs(self) -> Tensor:
        """What the forward has cost, [P, 4], in the sequence of `result.COUNTS`."""
        hidden = self.hidden
        nominal = (~self.pool.complete).sum(-1) if self.call.early else torch.full_like(hidden.fresh, self.size)
        counts = hidden.fresh, nominal * hidden.passes + hidden.contexts, hidden.tokens, (hidden.fresh > 0).long()
        return torch.stack([torch.as_tensor(x) for x in counts], -1)

    def run(self, pool: Pool) -> WindowHidden:
        """Return the hidden states of a pool that the search has made for itself, run without a cache. The cost is
        counted if the next pool has `state` in its `memory`."""
        call = replace(self.call, settings=replace(self.call.settings, cache="none"))
        hidden = Rows(call, self.given, self.hidden.ranks).run(pool, self.now)
        own = ForwardView(call, pool, hidden, self.now, self.given)
        self.state[SPENT] = self.state.get(SPENT, 0) + own.costs
        return hidden

    def choose(self, select: Selector, last: bool) -> Choice:
        """Return the parents that the method chooses. `last`: the next pool has the answers."""
        call, groups = self.call, self.call.settings.groups
        try:
            chosen = select(self, groups, self.pool.keys())
        except Exception:
            call.checks.read()  # if the cause is that logits are not finite, this raises an error that says so
            raise
        return self.check(chosen, groups if last else None, call.checks)

    def score(self, kind: str, positions: str, shown: bool = False) -> Tensor:
        """Return the raw score [P, N] of each row over the positions of the block, or of the window for complete rows.

        `shown`: leave out the positions behind the end of the text, even if `stop` is off.
        """
        pool, call, hidden = self.pool, self.call, self.hidden
        carry_over = call.model.carry_over
        if kind not in self._values:
            states, tokens = self._cut(hidden.states), self._tokens
            masked = self._masked if carry_over else tokens == call.model.mask_id
            rows = states, tokens[hidden.here], masked[hidden.here]
            values = position_values(kind, *rows, call.head, carry_over)
            self._values[kind], logsumexp = hidden.join(*values)
            call.checks.expect_finite(logsumexp.sum(-1).isfinite(), pool.names, hidden.owner, self.forward)
        mean = mean_score(kind, positions, self._values[kind], self._masked, carry_over, self._counted(shown))
        return fill_finished(mean[hidden.slot])

    def compare(self, shown: bool = False) -> Tensor:
        """Return the similarity S [P, N, N] from the features of the distinct rows. `shown` is as in `score`."""
        settings, hidden = self.call.settings, self.hidden
        features = self._cut(hidden.features if settings.feature_layer == "model" else hidden.states)
        counted, here = self._counted(shown), hidden.here
        counted = None if counted is None else counted[here]
        (features,) = hidden.join(pooled_features(features, self._masked[here], settings.features, counted))
        matrix = similarity(features, hidden.slot, settings.similarity, settings.gamma)
        return matrix if kernels.usable(matrix, matrix.shape[-1]) else matrix.to(wide(matrix.device))

    def _own(self, rows: Tensor) -> Tensor:
        """Return the values [U, B] of the distinct rows at the positions of the block, from rows [P, N, L]."""
        return self._block.cut(rows[self.hidden.owner[:, 0], self.hidden.owner[:, 1]])

    def _cut(self, rows: Tensor) -> Tensor:
        """Return the positions [u, B, D] of the block, given the distinct rows [u, L, D] that this rank has."""
        return self.now.of(self.hidden.owner[self.hidden.here, 0]).cut(rows)

    @cached_property
    def _tokens(self) -> Tensor:
        return self._own(self.pool.tokens)

    @cached_property
    def _masked(self) -> Tensor:
        """Which positions [U, B] were masked at the forward."""
        return self._tokens == self.call.model.mask_id

    def _counted(self, shown: bool) -> Tensor | None:
        """Return which positions [U, B] count, or None if all do."""
        if shown not in self._counts:
            inside = self._block.inside()
            before = self.call.counted(self.pool.tokens, self.pool, shown)
            if before is not None:
                inside = self._own(before) if inside is None else self._own(before) & inside
            self._counts[shown] = inside
        return self._counts[shown]
