"""The data types that all parts of the library share: models, schedules, pools, choices and results.

Letters in shapes: P prompts, N rows of one prompt's pool, m chosen parents, R rows of a batch, T padded row length, L
window positions (the positions to be decoded), V vocabulary, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .errors import D5P4Error
from .record import Answers
from .watch import Watch


class Hidden(NamedTuple):
    """The output of a model's body for a batch of rows."""

    states: Tensor  # [R, T, D] the input of the head; the state at position i predicts the token at position i
    features: Tensor  # [R, T, D] the similarity compares these features; they may be the same tensor as `states`


@dataclass(frozen=True)
class Head:
    """The unembedding: logits = states @ weight.T + bias. The logits of banned ids are minus infinity."""

    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    banned: Tensor  # [V] bool, True for the mask id and for ids without a token
    fixed: bool = False  # whether all matrix products have the same shape, so that no row's bits depend on other rows

    @cached_property
    def drawable(self) -> int:
        """The number of token ids that can be drawn."""
        return int((~self.banned).sum())

    def counted(self) -> Head:
        """Count the drawable ids, and return this head. Counting the ids later would mean waiting for the device."""
        _ = self.drawable
        return self

    def ban(self, ids: Sequence[int]) -> Head:
        """Return a head that also bans these ids."""
        if not ids:
            return self
        banned = self.banned.clone()
        banned[list(ids)] = True
        return replace(self, banned=banned)


class TextCodec(Protocol):
    """The methods of a tokenizer that the library uses."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text without special tokens."""
        ...

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str | None:
        """Return the prompt text for a conversation, or None if the model has no chat template."""
        ...


class Model(Protocol):
    """A masked diffusion language model, split into body and head.

    `body` takes left-padded rows. Positions are counted from the first token after the padding, so that padding does
    not change the output of a row.
    """

    name: str
    mask_id: int
    eos_ids: tuple[int, ...]
    max_length: int
    carry_over: bool  # whether a revealed token has probability 1 (MDLM), or is scored like other tokens
    default_order: str
    generation_defaults: Mapping[str, Any]  # the entry `d5p4` of generation_config.json

    @property
    def head(self) -> Head: ...

    @property
    def tokenizer(self) -> TextCodec | None: ...

    @property
    def pad_id(self) -> int:
        """The token id that fills the padding. No result depends on this id."""
        ...

    def body(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Hidden: ...


@dataclass(frozen=True)
class Step:
    """One step of a schedule, which all prompts of a decode call share."""

    index: int
    start: int  # the step reveals positions of one block, the window positions start..stop-1
    stop: int
    reveal: int  # the number of positions to reveal in this step, if an order rule (such as confidence) picks them
    move: float  # the probability with which the ancestral rule unmasks a masked position
    last: bool
    masked: int  # the number of masked positions of the block before the step, if an order rule picks positions


@dataclass(frozen=True)
class Schedule:
    """The steps that decode `length` window positions. `d5p4.schedule.make_schedule` makes a schedule."""

    length: int
    steps: tuple[Step, ...]


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
    ) -> None:
        self.group = group  # [P, N] int64, the group of each row; for methods with a partition, groups are contiguous
        self.tie = tie  # [P, N] int64, a hash of each row's lineage, which decides between equal values
        self.step = step
        self.last = last
        self.width = width  # w, the number of children of a chosen parent (except at the last step)
        self.vocabulary = vocabulary  # the number of token ids that can be drawn; E-SMC divides by log(vocabulary)
        self.state = {} if state is None else state  # a dict in which a method may keep values from step to step
        self._quality, self._similarity, self._raw, self._score = quality, similarity, raw, score

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
        """Choose the parents [P, m]. Each parent has w children, or one child at the last step."""
        return Choice(parents, 1 if self.last else self.width)

    def stay(self) -> Choice:
        """Choose every row, with one child each, so that nothing is selected."""
        everyone = torch.arange(self.size, device=self.group.device).expand_as(self.group)
        return Choice(everyone, 1)


class Choice(NamedTuple):
    """The m parents that a selector has chosen. The next pool has m * children rows."""

    parents: Tensor  # [P, m] int64 indices into the pool, ascending
    children: int


Selector = Callable[[PoolView, int, Tensor], Choice]
"""A function `select(pool, k, key)`. key [P] int64 selects the random stream of each prompt for this step."""


@dataclass(frozen=True)
class Snapshot:
    """What a callback gets after each step: the pools and the choice. A callback must not change the tensors."""

    step: int
    steps: int
    prompts: Tensor  # [P] the numbers by which callbacks and errors name these prompts
    tokens: Tensor  # [P, N, L] window tokens of the pool from which the parents were chosen
    view: PoolView
    choice: Choice
    next_tokens: Tensor  # [P, m * children, L] window tokens of the next pool
    next_logprobs: Tensor  # [P, m * children, L] log-probability of each token at its reveal (not of masks)


@dataclass(frozen=True)
class HistoryStep:
    """The values of one prompt at one step, which a result keeps if `history=True`."""

    step: int
    tokens: Tensor  # [N, L]
    scores: Tensor  # [N]
    quality: Tensor  # [N]
    similarity: Tensor  # [N, N]
    group: Tensor  # [N]
    parents: Tensor  # [m]
    children: int


Callback = Callable[[Snapshot], Any]
"""A function that is called after each step. It may return the numbers of prompts to drop, or None to drop no prompt.
After the last step no prompt can be dropped. Do not keep snapshots, because they hold the hidden states of a step."""


@dataclass(eq=False, repr=False)
class Result:
    """k answers for each of P prompts. The answer with the best score comes first. With `spare`, answers that repeat a
    text come last. A dropped prompt has empty lists and NaN scores.

    answers         [P][k] token ids before the first end-of-text token (an answer may be empty)
    texts           [P][k] text of the answer, or the whole filled text if the prompt had holes
    sequences       [P, k, T] prompt and answer, left-padded; attention_mask [P, T] is True at real tokens
    score           [P, k] scores, which can be compared between prompts; `score_kind` says what a score means
    similarity      [P, k, k] similarity S of the chosen rows at the last forward; logdet [P] is log det S
    distinct        [P] how many of the k answers differ
    lineage         [P] tensors [k, steps]: index of each answer's ancestor in the pool of every step
    seed            the seed of the random numbers
    nfe             [P] number of steps with a forward; rows [P] is the number of distinct rows in these forwards
    rows_nominal    [P] number of rows that the paper would count, which includes equal rows
    logprobs        [P][k] log-probability of each token at its reveal; reveal_step [P][k] is the step (logprobs=True)
    history         [P][steps] a HistoryStep for each step (history=True)
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
        prompts = f"{len(self)} prompt{'s' * (len(self) != 1)}"
        return (
            f"Result({prompts}, {answers} answers, {int(self.distinct.sum())} distinct, "
            f"{rows} of {nominal} rows, seed {self.seed}; texts[0][:1]={self.texts[0][:1] if self.texts else []})"
        )

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self.texts)

    def __getitem__(self, prompt: Any) -> Any:
        """Return the answers to one prompt or, for a slice, a list with the answers to each prompt."""
        if isinstance(prompt, slice):
            return list(self)[prompt]
        if not isinstance(prompt, int) or not -len(self) <= prompt < len(self):
            raise IndexError(f"there is no prompt {prompt!r}; this result has {len(self)}, counted from 0")
        return Answers(self, prompt % len(self))

    def __iter__(self) -> Iterator[Answers]:
        return (Answers(self, prompt) for prompt in range(len(self)))

    def to_dict(self) -> dict[str, Any]:
        """Return the answers and settings as a dict of Python values, without tensors, ready for JSON."""
        shared = {"seed": self.seed, "method": self.settings.method, "settings": self.settings.to_dict()}
        own = [{name: x for name, x in answers.to_dict().items() if name not in shared} for answers in self]
        return shared | {"prompts": own}

    def _repr_html_(self) -> str:
        """Return a table per prompt, for notebooks."""
        return "".join(answers._repr_html_() for answers in self)


@dataclass(frozen=True)
class Final:
    """The values that a method may use after the last step, to choose k of the N rows that are left."""

    tie: Tensor  # [P, N]
    score: Callable[[str, str], Tensor]  # returns raw scores [P, N] of the rows' parents at the last forward
    logprob: Callable[[], Tensor]  # returns the mean log-probability [P, N] of the final tokens
    texts: Callable[[], list[list[str]]]  # returns the texts [P][N] of all rows
    prompts: Tensor  # [P] the numbers by which callbacks and errors name these prompts


class Kept(NamedTuple):
    """The rows that a finish function keeps."""

    rows: Tensor  # [P, k] indices of rows of the final pool
    score: Tensor | None = None  # [P, k] scores to show and sort by; None means the scores of the model


Finish = Callable[[Final, int], Kept]
"""A function `finish(final, k)` that chooses k rows of the final pool."""
