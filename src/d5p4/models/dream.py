"""Dream: a Qwen2-shaped body with bidirectional attention whose row i - 1 predicts token i."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import D5P4Error
from ..ops.body import silu_gate
from ..types import Hidden
from .base import NativeModel
from .config import divides, flag, number, only, token, whole
from .layers import Padding, RMSNorm, Rotary, any_shape, attend, read_padding, rotary


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        kv_width = width // heads * kv_heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, kv_width)
        self.v_proj = nn.Linear(width, kv_width)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, angles: Rotary, padding: Padding) -> Tensor:
        mixed = attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), angles, padding.keys)
        return self.o_proj(mixed)


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_gate(self.gate_proj(x), self.up_proj(x)))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.self_attn = Attention(width, heads, kv_heads)
        self.mlp = FeedForward(width, inner)
        self.input_layernorm = RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)

    def forward(self, x: Tensor, delta: Tensor | None, angles: Rotary, padding: Padding) -> tuple[Tensor, Tensor]:
        """x and what is yet to be added to it, [R, T, D] both, to the same two after this layer."""
        x, h = self.input_layernorm(x, delta)
        x, h = self.post_attention_layernorm(x, self.self_attn(h, angles, padding))
        return x, self.mlp(h)


class Stack(nn.Module):
    """Embedding, layers and last norm, under the checkpoint's own names."""

    def __init__(self, vocabulary: int, width: int, layers: list[Layer], eps: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(width, eps)


class Dream(NativeModel):
    """states and features are the rows after the last norm, moved right by one."""

    architecture = "dream"
    prefix = ""
    recordable = True
    carry_over = False
    default_order = "confidence"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        only(config, {"hidden_act": "silu", "use_sliding_window": False, "use_mrope": False}, "Dream")
        width, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
        kv_heads = whole(config, "num_key_value_heads", heads)
        inner, eps = whole(config, "intermediate_size"), number(config, "rms_norm_eps", 1e-6)
        vocabulary = whole(config, "vocab_size")
        self.head_width = divides(config, "num_attention_heads", width, heads)
        only(config, {"head_dim": self.head_width}, "Dream")
        divides(config, "num_key_value_heads", heads, kv_heads)
        self.rope_theta = _rope_theta(config)
        self.max_length = whole(config, "max_position_embeddings")
        self.mask_id = token(config, "mask_token_id", vocabulary)

        layers = [Layer(width, heads, kv_heads, inner, eps) for _ in range(whole(config, "num_hidden_layers"))]
        self.model = Stack(vocabulary, width, layers, eps)
        tied = flag(config, "tie_word_embeddings")
        self.lm_head = None if tied else nn.Linear(width, vocabulary, bias=False)
        self.ban()

    @property
    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        return (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight, None

    def tied(self) -> tuple[str, ...]:
        return ("lm_head.weight",) if self.lm_head is None else ()

    def body(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Hidden:
        padding = read_padding(tokens, attention_mask)
        x, delta = self.model.embed_tokens(tokens), None
        angles = rotary(padding.positions, self.head_width, self.rope_theta, x.dtype)
        with any_shape():
            for layer in self.model.layers:
                x, delta = layer(x, delta, angles, padding)
        _, x = self.model.norm(x, delta)
        x = shift_right(x, padding)
        return Hidden(x, x)


def shift_right(x: Tensor, padding: Padding) -> Tensor:
    """Row i becomes row i - 1 of x [R, T, D]; the first real row has none before it and keeps its own."""
    shifted = torch.cat((x[:, :1], x[:, :-1]), dim=1)
    return shifted if padding.first is None else torch.where(padding.first[..., None], x, shifted)


def _rope_theta(config: Mapping[str, Any]) -> float:
    """The rotary base, from the key of transformers 4 or the table of transformers 5."""
    for key in ("rope_scaling", "rope_parameters"):
        table = config.get(key) or {}
        kind = table.get("rope_type", table.get("type", "default")) if isinstance(table, Mapping) else table
        if kind != "default":
            raise D5P4Error(
                f"config.json has {key}={table!r}, but d5p4's Dream implements plain rotary positions only; "
                "load the model with its own code and pass it to d5p4.wrap instead"
            )
    table = config.get("rope_parameters") or {}
    return number(config if config.get("rope_theta") is not None else table, "rope_theta", 10000.0)
