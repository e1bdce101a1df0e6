"""What the native architectures have in common: the attributes of `d5p4.types.Model` around one nn.Module."""

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
    """Facts that a model draws from its head."""

    config: Mapping[str, Any]
    mask_id: int
    eos_ids: tuple[int, ...]
    banned: Tensor  # [V] bool

    @property
    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        """Weight [V, D] and bias [V] of the head: the parameters themselves."""
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
        """The id written at left padding; its value never matters."""
        pad = self.config.get("pad_token_id")
        if isinstance(pad, int) and 0 <= pad < self.banned.shape[0]:
            return pad
        return self.eos_ids[0] if self.eos_ids else self.mask_id


class NativeModel(WithHead, nn.Module):
    """A model whose parameter names, after `prefix`, are those of the public checkpoints.

    Built from config.json alone it has fresh weights and no tokenizer; `d5p4.models.load` fills both in.
    """

    architecture: ClassVar[str]
    prefix: ClassVar[str]
    head_name: ClassVar[str]  # a checkpoint may store the head under this name even where it is the embedding
    reads_wide: ClassVar[bool] = False  # True: weights are read in at least float32, then brought to their dtype
    recordable = True  # `body` never waits for the device, so that a CUDA graph can hold it
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
        """Hidden rows of tokens [R, T] int64; attention_mask [R, T] is False at left padding."""
        raise NotImplementedError

    def attach(self, name: str, tokenizer: Tokenizer | None, generation: Mapping[str, Any]) -> None:
        """Set what depends on the files beside the weights."""
        self.name, self.tokenizer = name, tokenizer
        defaults = generation.get("d5p4")
        if defaults is not None and not isinstance(defaults, Mapping):
            raise D5P4Error(f"generation_config.json has d5p4={defaults!r}, which should be an object")
        self.generation_defaults = dict(defaults or {})
        self.eos_ids = self.end_ids(generation, tokenizer)
        self.ban(tokenizer)

    def end_ids(self, generation: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[int, ...]:
        """End-of-text ids: from the configs, then the tokenizer's own end-of-turn tokens, then its padding."""
        ids = [*_ids(self.config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))]
        if tokenizer is not None:
            names = [*END_TOKENS, *tokenizer.padding()]
            ids += [i for i in map(tokenizer.special_id, names) if i is not None]
        size = self.unembedding[0].shape[0]
        return tuple(dict.fromkeys(i for i in ids if 0 <= i < size and i != self.mask_id))

    def ban(self, tokenizer: Tokenizer | None = None) -> None:
        """Make `banned`: the mask id, ids past vocab_size, ids the tokenizer has no string for."""
        size = self.unembedding[0].shape[0]
        banned = torch.zeros(size, dtype=torch.bool, device=self.device)
        banned[self.mask_id] = True
        banned[self.config.get("vocab_size", size) :] = True
        if tokenizer is not None:
            banned |= without_token(tokenizer.ids(), size).to(banned.device)
        self.register_buffer("banned", banned, persistent=False)

    def settle(self, dtype: torch.dtype) -> None:
        """Ready for decoding in this dtype: no gradients, evaluation mode."""
        self.to(dtype).eval().requires_grad_(False)


def without_token(ids: Sequence[int] | set[int], size: int) -> Tensor:
    """[size] bool, True at ids outside the given ones."""
    missing = torch.ones(size, dtype=torch.bool)
    missing[[i for i in ids if 0 <= i < size]] = False
    return missing


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
