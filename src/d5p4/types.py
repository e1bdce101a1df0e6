"""The small data types every room speaks: what a model is, what a selector sees and returns, what a call gives back.

Letters in shapes: P prompts, N rows of one prompt's pool, m chosen parents, R flat rows, T padded row length,
L window positions (the positions to be decoded), V vocabulary, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .errors import D5P4Error
from .record import Answers
from .watch import Watch


class Hidden(NamedTuple):
    """What the body of a model gives for a batch of rows."""

    states: Tensor  # [R, T, D] the head's direct input; row i predicts token i
    features: Tensor  # [R, T, D] what similarity is measured on (may be the same tensor)


@dataclass(frozen=True)
class Head:
    """The unembedding: logits = states @ weight.T + bias, minus infinity where banned."""

    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    banned: Tensor  # [V] bool: the mask id and ids without a token
    fixed: bool = False  # products in chunks of one size, so that a row's numbers do not depend on the others

    @cached_property
    def drawable(self) -> int:
        """How many ids can be drawn."""
        return int((~self.banned).sum())

    def counted(self) -> Head:
        """The same head, its drawable ids counted now: counting waits for the device."""
        _ = self.drawable
        return self

    def ban(self, ids: Sequence[int]) -> Head:
        """The same head with more ids banned."""
        if not ids:
            return self
        banned = self.banned.clone()
        banned[list(ids)] = True
        return replace(self, banned=banned)


class TextCodec(Protocol):
    """What the library asks of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        ...

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str | None:
        """The prompt text for a conversation, or None when the model has no chat template."""
        ...


class Model(Protocol):
    """A masked diffusion language model, split into body and head.

    `body` takes left-padded rows; positions are counted from the first real token, so that a padded row
    gives the numbers of the unpadded one.
    """

    name: str
    mask_id: int
    eos_ids: tuple[int, ...]
    max_length: int
    carry_over: bool  # True: a revealed token has probability one (MDLM); False: every position is scored
    default_order: str
    generation_defaults: Mapping[str, Any]  # the `d5p4` entry of generation_config.json

    @property
    def head(self) -> Head: ...

    @property
    def tokenizer(self) -> TextCodec | None: ...

    @property
    def pad_id(self) -> int:
        """Written at left padding; its value never matters."""
        ...

    def body(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Hidden: ...


@dataclass(frozen=True)
class Step:
    """One step of a schedule. All prompts of a decode call share it."""

    index: int
    start: int  # the block is window positions start..stop-1
    stop: int
    reveal: int  # positions revealed by an order rule
    move: float  # chance that the ancestral rule unmasks a masked position
    last: bool
    masked: int  # positions of the block still masked before the step, under an order rule


@dataclass(frozen=True)
class Schedule:
    """Which window positions are decoded when. Built by `d5p4.schedule.make_schedule`."""

    length: int
    steps: tuple[Step, ...]


class PoolView:
    """What a selector sees of the pools of P prompts at one step.

    Quality, similarity and raw scores are computed when first asked for, so a selector pays only for what it reads.
    Each may be given as a tensor or as a function without arguments. `score(kind, positions)` gives other raw scores.
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
    ) -> None:
        self.group = group  # [P, N] int64, contiguous for methods with a partition
        self.tie = tie  # [P, N] int64, a hash of lineage; decides between equals
        self.step = step
        self.last = last
        self.width = width  # w: children a chosen parent has when this is not the last step
        self.vocabulary = vocabulary  # tokens that can be drawn (E-SMC normalises by its logarithm)
        self.state = {} if state is None else state  # a method's own memory from step to step
        self._quality, self._similarity, self._raw, self._score = quality, similarity, raw, score

    @property
    def size(self) -> int:
        """N, rows in one prompt's pool."""
        return self.group.shape[1]

    @cached_property
    def quality(self) -> Tensor:
        """Q [P, N] float64 (float32 where the device has no float64), normalised, higher is better, never negative."""
        return self._quality() if callable(self._quality) else self._quality

    @cached_property
    def similarity(self) -> Tensor:
        """S [P, N, N], cosine (or RBF) Gram matrix with a diagonal of exactly 1.

        float64, but float32 where the kernels compute it (CUDA, unless the model is float64) or there is no float64.
        """
        return self._similarity() if callable(self._similarity) else self._similarity

    @cached_property
    def raw(self) -> Tensor:
        """[P, N] the score that Q normalises."""
        raw = self.quality if self._raw is None else self._raw
        return raw() if callable(raw) else raw

    def score(self, kind: str, positions: str) -> Tensor:
        """[P, N] raw score of any kind ("entropy", "self-certainty", "logprob") over "all" or "masked" positions."""
        if self._score is None:
            raise TypeError("this pool was made without a score function")
        return self._score(kind, positions)

    def check(self, choice: Any, after: int | None, watch: Watch) -> Choice:
        """The choice, or an error that says what a selector got wrong; `after`: rows the next pool must have.

        A row outside the pool is an error when `watch` is looked at; until then another stands in.
        """
        parents = getattr(choice, "parents", None)
        if not isinstance(choice, Choice) or not isinstance(parents, Tensor) or parents.dtype != torch.int64:
            raise D5P4Error(f"a selector must return a Choice of int64 parents (pool.keep makes one), not {choice!r}")
        shape, prompts = tuple(parents.shape), self.group.shape[0]
        if len(shape) != 2 or shape[0] != prompts or shape[1] < 1:
            raise D5P4Error(f"the selector chose parents of shape {shape}, not [P, m] with P = {prompts} prompts")
        if not isinstance(choice.children, int) or isinstance(choice.children, bool) or choice.children < 1:
            raise D5P4Error(f"the selector chose {choice.children!r} children per parent, not a whole number from 1 on")
        if after is not None and choice.children != 1:
            raise D5P4Error(f"the selector chose {choice.children} children per parent at the last step; choose one")
        if after is not None and shape[1] * choice.children != after:
            raise D5P4Error(f"the selector chose {shape[1]} x {choice.children} rows where {after} are needed")
        inside = parents.clamp(0, self.size - 1)

        def complaint(holds: Tensor) -> D5P4Error:
            return D5P4Error(
                f"the selector chose row {int(parents[~holds][0])} at step {self.step}, which is outside the pool of "
                f"{self.size}"
            )

        watch.expect(parents == inside, complaint)
        return Choice(inside.sort(-1).values, choice.children)

    def keep(self, parents: Tensor) -> Choice:
        """Choose parents [P, m], each with w children, or one child at the last step."""
        return Choice(parents, 1 if self.last else self.width)

    def stay(self) -> Choice:
        """Choose every row, one child each: no selection."""
        everyone = torch.arange(self.size, device=self.group.device).expand_as(self.group)
        return Choice(everyone, 1)


class Choice(NamedTuple):
    """A selection: the next pool has m * children rows."""

    parents: Tensor  # [P, m] int64 indices into the pool, ascending
    children: int


Selector = Callable[[PoolView, int, Tensor], Choice]
"""`select(pool, k, key)`: key [P] int64 starts each prompt's random stream for this step."""


@dataclass(frozen=True)
class Snapshot:
    """What a callback gets after each step. Tensors must not be changed."""

    step: int
    steps: int
    prompts: Tensor  # [P] which prompts of the call these are
    tokens: Tensor  # [P, N, L] window tokens of the pool that was selected from
    view: PoolView
    choice: Choice
    next_tokens: Tensor  # [P, m * children, L] window tokens of the next pool
    next_logprobs: Tensor  # [P, m * children, L] log-probability of each at its reveal; of no meaning at masks


@dataclass(frozen=True)
class HistoryStep:
    """One step of one prompt, kept when `history=True`."""

    step: int
    tokens: Tensor  # [N, L]
    scores: Tensor  # [N]
    quality: Tensor  # [N]
    similarity: Tensor  # [N, N]
    group: Tensor  # [N]
    parents: Tensor  # [m]
    children: int


Callback = Callable[[Snapshot], Any]
"""May return an iterable of prompt numbers to drop (cancelled requests); None goes on. After the last step it is too
late. A snapshot's view holds the step's hidden states: keep what you read from it, not the snapshot."""


@dataclass(eq=False, repr=False)
class Result:
    """k answers for each of P prompts, best score first (with `spare`, repeated texts come last).

    A dropped prompt has empty lists and NaN scores.

    answers         [P][k] token ids, cut at the first end-of-text (an answer may be empty)
    texts           [P][k] the answer; the whole filled text when holes were filled
    sequences       [P, k, T] prompt and answer, left-padded; attention_mask [P, T] is True at real tokens
    score           [P, k] comparable between prompts; `score_kind` says what it is
    similarity      [P, k, k] S of the chosen rows at the last forward; logdet [P] its log determinant
    distinct        [P] how many of the k answers differ
    lineage         [P] of [k, steps]: index of each answer's ancestor in the pool of every step
    seed            the seed used
    nfe             [P] steps with a forward; rows [P] distinct rows that needed one
    rows_nominal    [P] rows the paper would count
    logprobs        [P][k] log-probability of each token at its reveal; reveal_step [P][k] the step (logprobs=True)
    history         [P][steps] of HistoryStep (history=True)
    settings        the resolved Settings
    """

    answers: list[list[list[int]]]
    texts: list[list[str]]
    sequences: Tensor
    attention_mask: Tensor
    score: Tensor
    score_kind: str
    logdet: Tensor
    similarity: Tensor
    distinct: Tensor
    lineage: list[Tensor]
    seed: int
    nfe: Tensor
    rows: Tensor
    rows_nominal: Tensor
    logprobs: list[list[list[float]]] | None = None
    reveal_step: list[list[list[int]]] | None = None
    history: list[list[HistoryStep]] | None = None
    settings: Any = None

    def __repr__(self) -> str:
        answers = sum(map(len, self.answers))
        rows, nominal = int(self.rows.sum()), int(self.rows_nominal.sum())
        return (
            f"Result({len(self.texts)} prompts, {answers} answers, {int(self.distinct.sum())} distinct, "
            f"{rows} of {nominal} rows, seed {self.seed}; texts[0][:1]={self.texts[0][:1] if self.texts else []})"
        )

    def __len__(self) -> int:
        """Prompts."""
        return len(self.texts)

    def __getitem__(self, prompt: int) -> Answers:
        """The answers to one prompt, as plain numbers."""
        return Answers(self, range(len(self))[prompt])

    def __iter__(self) -> Iterator[Answers]:
        return (self[prompt] for prompt in range(len(self)))

    def to_dict(self) -> dict[str, Any]:
        """Everything but tensors, ready for JSON."""
        shared = {"seed": self.seed, "method": self.settings.method, "settings": self.settings.to_dict()}
        own = [{name: x for name, x in answers.to_dict().items() if name not in shared} for answers in self]
        return shared | {"prompts": own}

    def _repr_html_(self) -> str:
        """A table per prompt, for notebooks."""
        row = "<tr><td>{}</td><td>{}</td><td>{}</td><td style='text-align:left;white-space:pre-wrap'>{}</td></tr>"
        head = "<tr><th>#</th><th>score</th><th>distance</th><th>answer</th></tr>"
        tables = []
        for answers in self:
            numbers = zip(answers.score, answers.distance, answers.texts, strict=True)
            rows = [row.format(i + 1, *map(_cell, cells)) for i, cells in enumerate(numbers)]
            tables.append(f"<table>{head}{''.join(rows)}</table>")
        return "".join(tables)


def _cell(value: float | str | None) -> str:
    return "–" if value is None else escape(value) if isinstance(value, str) else f"{value:.3f}"


@dataclass(frozen=True)
class Final:
    """What a method may look at after the last projection, when it still holds more than k rows."""

    tie: Tensor  # [P, N]
    score: Callable[[str, str], Tensor]  # [P, N] raw scores of each row's parent at the last forward
    logprob: Callable[[], Tensor]  # [P, N] mean log-probability of the final tokens
    texts: Callable[[], list[list[str]]]  # [P][N]
    prompts: Tensor  # [P] which prompts of the call these are


class Kept(NamedTuple):
    """What a finish keeps."""

    rows: Tensor  # [P, k] of the final pool
    score: Tensor | None = None  # [P, k] a score to show and sort by instead of the model's own


Finish = Callable[[Final, int], Kept]
"""`finish(final, k)` chooses k rows of the final pool."""
