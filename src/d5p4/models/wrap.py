"""`wrap` turns a module in memory, such as a Llama or Qwen2 of transformers, into a model for decoding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import tokenizers
import torch
from torch import Tensor, nn

from ..errors import D5P4Error
from ..types import Context, Hidden
from .base import WithHead, never_drawn
from .layers import read_padding, shift_right
from .tokenizer import NAMED, Tokenizer

HiddenRows = Callable[[Tensor, Tensor, Tensor], Tensor]  # see `wrap`
SCALED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def wrap(
    module: nn.Module,
    tokenizer: Any,
    *,
    mask_id: int,
    shift: bool = False,
    eos_ids: Sequence[int] = (),
    banned: Sequence[int] | None = None,
    max_length: int | None = None,
    carry_over: bool = False,
    order: str = "confidence",
    name: str | None = None,
    hidden: HiddenRows | None = None,
) -> WrappedModel:
    """Split a module into body and head, so that d5p4 computes the logits itself.

    `module`: a causal model of transformers, or a PEFT model around one. Its mode and its gradients are not changed.
    `tokenizer`: a tokenizer of d5p4 or `tokenizers`, a fast tokenizer of transformers, or None.
    `shift`: whether the output at position i - 1 predicts token i, as in Dream.
    `banned`: ids that are never drawn. The mask and ids without a token are always banned.
    `hidden`: a function from tokens [R, T], attention_mask [R, T] bool and position_ids [R, T] to the head's input rows
    [R, T, D]. Modules that are not causal models of transformers need it.
    """
    if callable(unwrap := getattr(module, "get_base_model", None)):  # PEFT's; the adapters stay in the layers
        prompts = getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False)
        if prompts and hidden is None:
            kind = type(module).__name__
            raise D5P4Error(f"{kind} adds learned prompt tokens, which wrap would ignore: pass hidden=")
        module = unwrap()
    size = _head(module).weight.shape[0]
    for what, ids in (("mask_id", [mask_id]), ("eos_ids", eos_ids), ("banned", banned or ())):
        if isinstance(ids, int):
            raise D5P4Error(f"{what}={ids!r} must be a list of token ids")
        for i in ids:
            if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < size:
                raise D5P4Error(f"{what} has {i!r}, which is not a token id from 0 to {size - 1}")
    rows = hidden or _inner_rows(module)
    if max_length is None:
        max_length = getattr(getattr(module, "config", None), "max_position_embeddings", None)
        if not isinstance(max_length, int):
            raise D5P4Error("max_length=None, but the module's config has no max_position_embeddings: give max_length")
    codec = adapt_tokenizer(tokenizer, mask_id)
    never = never_drawn(size, [mask_id, *(banned or ())], codec)
    name, eos_ids = name or type(module).__name__, tuple(dict.fromkeys(eos_ids))
    return WrappedModel(module, rows, never, name, shift, mask_id, eos_ids, max_length, carry_over, order, codec)


@dataclass(eq=False, repr=False)
class WrappedModel(WithHead):
    """A foreign module with the attributes of `d5p4.types.Model`."""

    architecture: ClassVar[str] = "wrapped"
    module: nn.Module
    hidden: HiddenRows
    banned: Tensor  # [V] bool
    name: str
    shift: bool
    mask_id: int
    eos_ids: tuple[int, ...]
    max_length: int
    carry_over: bool
    default_order: str
    tokenizer: Tokenizer | None
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config: dict[str, Any] = getattr(getattr(self.module, "config", None), "to_dict", dict)()

    @property
    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        linear = _head(self.module)
        self.banned = self.banned.to(linear.weight.device)
        return linear.weight, getattr(linear, "bias", None)

    def body(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Hidden:
        padding = read_padding(tokens, attention_mask)
        visible = torch.ones_like(tokens, dtype=torch.bool) if padding.keys is None else padding.keys[:, 0, 0, :]
        rows = self.hidden(tokens, visible, padding.positions.expand_as(tokens)).to(self.dtype)
        if self.shift:
            rows = shift_right(rows, padding, Context())
        return Hidden(rows, rows)


def adapt_tokenizer(tokenizer: Any, mask_id: int) -> Tokenizer | None:
    """Convert any tokenizer that `wrap` accepts into one that knows the mask id."""
    if tokenizer is None:
        return None
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.for_model(mask_id)
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)  # of a fast tokenizer of transformers
    if not isinstance(backend, tokenizers.Tokenizer):
        advice = "give a fast tokenizer of transformers, one of tokenizers, d5p4.models.Tokenizer.read(FOLDER), or None"
        raise D5P4Error(f"tokenizer is a {type(tokenizer).__name__}: {advice}")
    template = getattr(tokenizer, "chat_template", None)
    template = template.get("default") if isinstance(template, Mapping) else template
    named = {name: str(text) for name in NAMED if (text := getattr(tokenizer, name, None)) is not None}
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    return Tokenizer(copy, chat_template=template, named=named, mask_id=mask_id)


def _head(module: nn.Module) -> Any:
    """Return the module's head, which must be a linear layer with a floating-point weight [V, D]."""
    getter = getattr(module, "get_output_embeddings", None)
    linear = getter() if callable(getter) else None
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        kind = "none" if weight is None else f"{type(linear).__name__} with a {getattr(weight, 'dtype', '?')} weight"
        cure = "the head must be one linear layer with an unquantised weight [V, D]"
        raise D5P4Error(f"{type(module).__name__}.get_output_embeddings() returns {kind}: {cure}")
    if hasattr(linear, "lora_A") and not getattr(linear, "merged", False):
        raise D5P4Error(f"the head of {type(module).__name__} has an unmerged adapter: call merge_adapter() first")
    return linear


def _inner_rows(module: nn.Module) -> HiddenRows:
    """Return a function that computes the last hidden rows of a causal model, but with bidirectional attention."""
    name, config = type(module).__name__, getattr(module, "config", None)
    inner = getattr(module, getattr(module, "base_model_prefix", "") or "base_model", None)
    if inner is None or inner is module or not callable(inner):
        raise D5P4Error(f"{name} has no inner base model: pass hidden=, a function that returns its last hidden rows")
    options = inspect.signature(inner.forward).parameters
    if "position_ids" not in options and all(option.kind is not option.VAR_KEYWORD for option in options.values()):
        advice = "load the checkpoint with d5p4.load, or pass hidden="
        raise D5P4Error(f"{type(inner).__name__}.forward has no position_ids, which padded rows need: {advice}")
    for key in SCALED_LOGITS:
        value = getattr(config, key, None)
        if value not in (None, 1, 1.0):
            raise D5P4Error(f"{name} has {key}={value}, but wrap needs logits that are an affine map of hidden rows")

    def rows(tokens: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        kind = getattr(config, "_attn_implementation", None)
        if kind not in (None, "eager", "sdpa"):
            advice = "load it with attn_implementation='sdpa'"
            raise D5P4Error(f"{name} uses {kind!r} attention, which accepts no bidirectional mask: {advice}")
        # transformers uses a four-dimensional mask unchanged. With any other mask the model would be causal.
        dtype = next(inner.parameters()).dtype
        hide = torch.zeros(attention_mask.shape, dtype=dtype, device=tokens.device)
        hide = hide.masked_fill(~attention_mask, torch.finfo(dtype).min)
        full = hide[:, None, None, :].expand(-1, 1, tokens.shape[1], -1)
        output = inner(input_ids=tokens, attention_mask=full, position_ids=position_ids, use_cache=False)
        return output.last_hidden_state

    return rows
