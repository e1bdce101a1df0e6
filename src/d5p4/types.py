"""The data types that all parts of the library share: models, choices of parents, and what callbacks and methods get.

Letters in shapes: P prompts, N rows of one prompt's pool, m chosen parents, R rows of a batch, T padded row length, L
window positions (the positions to be decoded), V vocabulary, D hidden width, K key heads, d head width, C stored
positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from .decode.view import PoolView


class Hidden(NamedTuple):
    """The output of a model's body for a batch of rows."""

    states: Tensor  # [R, T, D] the input of the head; the state at position i predicts the token at position i
    features: Tensor  # [R, T, D] the similarity compares these features; they may be the same tensor as `states`
    kept: Sequence[tuple[Tensor, Tensor]] | None = None  # per layer, keys and values [R, T, K, d]; see `Context.keep`
    edge: Tensor | None = None  # [R, D] the state that predicts the token after the last one, if states are shifted


def map_hidden(function: Callable[..., Tensor], *hidden: Hidden) -> Hidden:
    """Apply a function to the states and to the features. If these are one tensor, so is the result."""
    states = function(*(x.states for x in hidden))
    if all(x.features is x.states for x in hidden):
        return Hidden(states, states)
    return Hidden(states, function(*(x.features for x in hidden)))


class Store(NamedTuple):
    """Keys and values of earlier forwards, and which of them the rows of a forward read.

    Row r reads the positions 0..length[r]-1 of the slot slot[r], except those from hole[r, 0] to hole[r, 1] - 1.
    """

    kv: Tensor  # [layers, 2, slots, C, K, d] keys (rotated to their positions) and values of C positions
    slot: Tensor  # [R]
    length: Tensor  # [R]
    hole: Tensor | None = None  # [R, 2]


class Context(NamedTuple):
    """What a forward reads besides its own tokens. Given a context with `first`, each row of tokens is a part of a
    longer row. A token attends to all tokens of its part and to the positions that the stores name."""

    first: Tensor | None = None  # [R] the position of each row's first token; None: whole rows, which may be padded
    stores: tuple[Store, ...] = ()
    edge: Tensor | None = None  # [R, D] `Hidden.edge` of the forward of the tokens before these, for shifted models
    keep: bool = False  # whether the forward returns its keys and values, and the edge of its last token


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

    A model whose attention is block-causal has the attribute `block`, the number of tokens per block. A token of such a
    model attends to all tokens of its own block and of earlier blocks. Blocks are counted from the first token after
    the padding. A model that can continue from stored keys and values has the attribute `cache_shape` (layers, key
    heads, head width), and its `body` takes a third argument, a `Context`. If the output at position i - 1 predicts
    token i, `body` moves the states, and the attribute `shifted` is True. With the attribute `next_token_first`, the
    first token of a block is a next-token prediction: it is revealed alone, before the other tokens of its block.
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


def block_of(model: Model) -> int | None:
    """Return the number of tokens per block of a block-causal model, or None if the model has full attention."""
    return getattr(model, "block", None)


class Choice(NamedTuple):
    """The m parents that a selector has chosen. The next pool has m * children rows."""

    parents: Tensor  # [P, m] int64 indices into the pool, ascending
    children: int


Selector = Callable[["PoolView", int, Tensor], Choice]
"""A function `select(pool, k, key)`. key [P] int64 selects the random stream of each prompt for this step."""


@dataclass(frozen=True)
class Snapshot:
    """What a callback gets after each step: the pools and the choice. A callback must not change the tensors."""

    taken: list[int]  # [P] the number of steps that each prompt has taken before this one
    most: list[int]  # [P] the number of its steps or, under adaptive reveal rules, the most steps that there can be
    prompts: Tensor  # [P] the numbers by which callbacks and errors name these prompts
    tokens: Tensor  # [P, N, L] window tokens of the pool from which the parents were chosen
    view: PoolView
    choice: Choice
    next_tokens: Tensor  # [P, m * children, L] window tokens of the next pool
    next_logprobs: Tensor  # [P, m * children, L] log-probability of each token at its reveal (not of masks)
    shares: list[float | None]  # [P] the share of positions that were revealed before the step; None in a schedule
    source: Tensor  # [P, rows of the next pool] the index in this pool of each row's parent
    ends: Tensor | None = None  # [P] tokens from this window position on belong to no answer; None: all belong to one
    awake: Tensor | None = None  # [P, N] the rows of this pool that the tree runs or has finished; None: all rows
    next_awake: Tensor | None = None  # the same for the next pool

    def length(self, place: int) -> int:
        """Return the number of window positions of a prompt. Others may have longer windows."""
        return self.tokens.shape[-1] if self.ends is None else int(self.ends[place])

    def done(self, place: int) -> float:
        """Return the share of the work that is done after this step, for the prompt at an index of `prompts`."""
        steps, share = (self.taken[place] + 1) / self.most[place], self.shares[place]
        return min(1.0, steps if share is None else max(steps, share))

    @property
    def step(self) -> int:
        """The number of this step, for prompts that have begun together."""
        return self.taken[0]

    @property
    def steps(self) -> int:
        """The number of steps, or the most that there can be, for prompts that have begun together."""
        return max(self.most)


Callback = Callable[[Snapshot], Any]
"""A function that is called after each step. It may return the numbers of prompts to drop, or None to drop no prompt.
After the last step no prompt can be dropped. Do not keep snapshots, because they hold the hidden states of a step."""


class Kept(NamedTuple):
    """The rows that `Search.finish` keeps. Without `exists`, they are sorted by their scores."""

    rows: Tensor  # [P, k] indices of rows of the final pool
    score: Tensor | None = None  # [P, k] scores to show and sort by; None means the scores of the model
    exists: Tensor | None = None  # [P, k] bool: False at places without an answer; None: all are answers
    similarity: Tensor | None = None  # [P, k, k] the similarity of the answers; None means that of the model's features
    extras: Mapping[str, Tensor] = {}  # what `Search.extras` names, for each prompt [P] or each of the rows [P, k]
