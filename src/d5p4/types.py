"""The data types that all parts of the library share: models, what selectors see and return, and the result of a call.

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

    states: Tensor  # [R, T, D] the head's direct input; row i predicts token i
    features: Tensor  # [R, T, D] similarity compares these (may be the same tensor)


@dataclass(frozen=True)
class Head:
    """The unembedding: logits = states @ weight.T + bias, minus infinity where banned."""

    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    banned: Tensor  # [V] bool: the mask id and ids without a token
    fixed: bool = False  # all products have the same size, so that a row's numbers do not depend on other rows

    @cached_property
    def drawable(self) -> int:
        """The number of ids that can be drawn."""
        return int((~self.banned).sum())

    def counted(self) -> Head:
        """Return this head with its drawable ids counted, because counting later would wait for the device."""
        _ = self.drawable
        return self

    def ban(self, ids: Sequence[int]) -> Head:
        """Return this head with more ids banned."""
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

    `body` takes left-padded rows. Positions are counted from the first real token, so that a padded row gives the same
    numbers as the row without padding.
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
        """The id written at left padding. Its value never matters."""
        ...

    def body(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Hidden: ...


@dataclass(frozen=True)
class Step:
    """One step of a schedule, which all prompts of a decode call share."""

    index: int
    start: int  # the block is window positions start..stop-1
    stop: int
    reveal: int  # positions revealed by an order rule
    move: float  # chance that the ancestral rule unmasks a masked position
    last: bool
    masked: int  # masked positions of the block before the step, under an order rule


@dataclass(frozen=True)
class Schedule:
    """The steps at which window positions are decoded. `d5p4.schedule.make_schedule` builds it."""

    length: int
    steps: tuple[Step, ...]


class PoolView:
    """What a selector sees of the pools of P prompts at one step.

    Quality, similarity and raw scores are computed when first read, so that a selector pays only for what it reads.
    Each of the three may be given as a tensor or as a function without arguments. `score(kind, positions)` returns
    other raw scores.
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
        self.tie = tie  # [P, N] int64, a hash of the lineage, which decides between equal values
        self.step = step
        self.last = last
        self.width = width  # w: children of a chosen parent, except at the last step
        self.vocabulary = vocabulary  # number of tokens that can be drawn (E-SMC divides by its logarithm)
        self.state = {} if state is None else state  # a method's own memory from step to step
        self._quality, self._similarity, self._raw, self._score = quality, similarity, raw, score

    @property
    def size(self) -> int:
        """The number N of rows in one prompt's pool."""
        return self.group.shape[1]

    @cached_property
    def quality(self) -> Tensor:
        """Q [P, N], normalised and never negative; higher is better. float64 (float32 if the device has no float64)."""
        return self._quality() if callable(self._quality) else self._quality

    @cached_property
    def similarity(self) -> Tensor:
        """S [P, N, N], the cosine (or RBF) Gram matrix with a diagonal of exactly 1.

        S is float64. It is float32 where the kernels compute it (CUDA, unless the model is float64) or there is no
        float64.
        """
        return self._similarity() if callable(self._similarity) else self._similarity

    @cached_property
    def raw(self) -> Tensor:
        """The score [P, N] from which Q is normalised."""
        raw = self.quality if self._raw is None else self._raw
        return raw() if callable(raw) else raw

    def score(self, kind: str, positions: str) -> Tensor:
        """Return a raw score [P, N] ("entropy", "self-certainty" or "logprob") over "all" or "masked" positions."""
        if self._score is None:
            raise TypeError("this pool has no score function; give PoolView score=")
        return self._score(kind, positions)

    def check(self, choice: Any, after: int | None, watch: Watch) -> Choice:
        """Return the choice, or raise an error that says what the selector got wrong. The next pool needs `after` rows.

        A row outside the pool raises its error when `watch` is checked. Until then, a row of the pool replaces it.
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
        """Choose parents [P, m], each with w children, or one child at the last step."""
        return Choice(parents, 1 if self.last else self.width)

    def stay(self) -> Choice:
        """Choose every row with one child each, which means no selection."""
        everyone = torch.arange(self.size, device=self.group.device).expand_as(self.group)
        return Choice(everyone, 1)


class Choice(NamedTuple):
    """A selection. The next pool has m * children rows."""

    parents: Tensor  # [P, m] int64 indices into the pool, ascending
    children: int


Selector = Callable[[PoolView, int, Tensor], Choice]
"""`select(pool, k, key)`, where key [P] int64 starts each prompt's random stream for this step."""


@dataclass(frozen=True)
class Snapshot:
    """The argument of a callback after each step. Its tensors must not be changed."""

    step: int
    steps: int
    prompts: Tensor  # [P] the numbers of these prompts in the call
    tokens: Tensor  # [P, N, L] window tokens of the pool that was selected from
    view: PoolView
    choice: Choice
    next_tokens: Tensor  # [P, m * children, L] window tokens of the next pool
    next_logprobs: Tensor  # [P, m * children, L] log-probability of each token at its reveal; meaningless at masks


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
"""May return prompt numbers to drop (cancelled requests), except after the last step. None drops nothing.
A snapshot's view holds the step's hidden states, so keep what you read from it and not the snapshot."""


@dataclass(eq=False, repr=False)
class Result:
    """k answers for each of P prompts, best score first (with `spare`, repeated texts come last).

    A dropped prompt has empty lists and NaN scores.

    answers         [P][k] token ids up to the first end-of-text (an answer may be empty)
    texts           [P][k] text of the answer, or the whole filled text if the prompt had holes
    sequences       [P, k, T] prompt and answer, left-padded; attention_mask [P, T] is True at real tokens
    score           [P, k] comparable between prompts; `score_kind` says what the score is
    similarity      [P, k, k] S of the chosen rows at the last forward; logdet [P] is its log determinant
    distinct        [P] how many of the k answers differ
    lineage         [P] tensors [k, steps]: index of each answer's ancestor in the pool of every step
    seed            the seed of the random numbers
    nfe             [P] number of steps with a forward; rows [P] is the number of distinct rows in these forwards
    rows_nominal    [P] number of rows that the paper would count
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
        """Return the answers to one prompt, or a list of them for a slice."""
        if isinstance(prompt, slice):
            return list(self)[prompt]
        if not isinstance(prompt, int) or not -len(self) <= prompt < len(self):
            raise IndexError(f"there is no prompt {prompt!r}; this result has {len(self)}, counted from 0")
        return Answers(self, prompt % len(self))

    def __iter__(self) -> Iterator[Answers]:
        return (Answers(self, prompt) for prompt in range(len(self)))

    def to_dict(self) -> dict[str, Any]:
        """Return everything but tensors, ready for JSON."""
        shared = {"seed": self.seed, "method": self.settings.method, "settings": self.settings.to_dict()}
        own = [{name: x for name, x in answers.to_dict().items() if name not in shared} for answers in self]
        return shared | {"prompts": own}

    def _repr_html_(self) -> str:
        """Return a table per prompt, for notebooks."""
        return "".join(answers._repr_html_() for answers in self)


@dataclass(frozen=True)
class Final:
    """The values that a method may use after the last projection, when there are still more than k rows."""

    tie: Tensor  # [P, N]
    score: Callable[[str, str], Tensor]  # [P, N] raw scores of each row's parent at the last forward
    logprob: Callable[[], Tensor]  # [P, N] mean log-probability of the final tokens
    texts: Callable[[], list[list[str]]]  # [P][N]
    prompts: Tensor  # [P] the numbers of these prompts in the call


class Kept(NamedTuple):
    """The rows that a finish function keeps."""

    rows: Tensor  # [P, k] indices of rows of the final pool
    score: Tensor | None = None  # [P, k] a score to show and sort by instead of the model's own


Finish = Callable[[Final, int], Kept]
"""`finish(final, k)` chooses k rows of the final pool."""
