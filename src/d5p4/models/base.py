"""The base classes of our architectures. They add the attributes of `d5p4.types.Model` to an nn.Module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import D5P4Error
from ..types import Head, Hidden
from .tokenizer import Tokenizer

END_TOKENS = ("<|eot_id|>", "<|im_end|>", "<|endoftext|>")


class WithHead:
    """Properties of a model that follow from its head: its device, its dtype and its padding id."""

    config: Mapping[str, Any]
    mask_id: int
    eos_ids: tuple[int, ...]
    banned: Tensor  # [V] bool

    @property
    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        """The weight [V, D] and the bias [V] of the head. They are the model's own parameters, not copies."""
        raise NotImplementedError

    @property
    def head(self) -> Head:
        weight, bias = self.unembedding
        return Head(weight, bias, self.banned)

    @property
    def device(self) -> torch.device:
        return self.unembedding[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.unembedding[0].dtype

    @property
    def pad_id(self) -> int:
        """The id that is written at left padding. Attention hides these positions, so any valid id works."""
        pad = self.config.get("pad_token_id")
        if isinstance(pad, int) and 0 <= pad < self.banned.shape[0]:
            return pad
        return self.eos_ids[0] if self.eos_ids else self.mask_id


class NativeModel(WithHead, nn.Module):
    """A model whose parameters have the names of the public checkpoint, without the checkpoint's `prefix`.

    A new model has random weights and no tokenizer. `d5p4.models.load` sets the weights and the tokenizer.
    """

    architecture: ClassVar[str]
    prefix: ClassVar[str]
    head_name: ClassVar[str]  # the head's weight; a checkpoint may store it even if it equals the embedding
    reads_wide: ClassVar[bool] = False  # whether weights are first read in float32 or wider, then converted
    recordable = True  # `body` never waits for the device, so a CUDA graph can record it
    carry_over = False
    default_order = "confidence"
    max_length: int

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = dict(config)
        self.name = self.architecture
        self.tokenizer: Tokenizer | None = None
        self.eos_ids: tuple[int, ...] = ()
        self.generation_defaults: Mapping[str, Any] = {}

    def body(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Hidden:
        """Return the hidden states of `tokens` [R, T] int64. `attention_mask` [R, T] is False at left padding."""
        raise NotImplementedError

    def attach(self, name: str, tokenizer: Tokenizer | None, generation: Mapping[str, Any]) -> None:
        """Set the name, the tokenizer and everything that depends on the tokenizer and on generation_config.json."""
        self.name, self.tokenizer = name, tokenizer
        defaults = generation.get("d5p4")
        if defaults is not None and not isinstance(defaults, Mapping):
            raise D5P4Error(f"generation_config.json has d5p4={defaults!r}, which should be a JSON object")
        self.generation_defaults = dict(defaults or {})
        self.eos_ids = self.end_ids(generation, tokenizer)
        self.ban(tokenizer)

    def end_ids(self, generation: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[int, ...]:
        """Return the ids that end a text: those in the configs, and the tokenizer's ids of `END_TOKENS` and padding."""
        ids = [*_ids(self.config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))]
        if tokenizer is not None:
            names = [*END_TOKENS, *tokenizer.padding()]
            ids += [i for i in map(tokenizer.special_id, names) if i is not None]
        size = self.unembedding[0].shape[0]
        return tuple(dict.fromkeys(i for i in ids if 0 <= i < size and i != self.mask_id))

    def ban(self, tokenizer: Tokenizer | None = None) -> None:
        """Ban the mask id, ids from vocab_size upwards, and ids without a token in the tokenizer."""
        size = self.unembedding[0].shape[0]
        banned = torch.zeros(size, dtype=torch.bool, device=self.device)
        banned[self.mask_id] = True
        banned[self.config.get("vocab_size", size) :] = True
        if tokenizer is not None:
            banned |= without_token(tokenizer.ids(), size).to(banned.device)
        self.register_buffer("banned", banned, persistent=False)

    def settle(self, dtype: torch.dtype) -> None:
        """Prepare the model for decoding: set its dtype and the evaluation mode, and switch gradients off."""
        self.to(dtype).eval().requires_grad_(False)


def without_token(ids: Sequence[int] | set[int], size: int) -> Tensor:
    """Return bool [size] that is False at the given ids and True at all other ids."""
    missing = torch.ones(size, dtype=torch.bool)
    missing[[i for i in ids if 0 <= i < size]] = False
    return missing


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
