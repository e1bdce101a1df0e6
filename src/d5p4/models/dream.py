"""Dream: a body like that of Qwen2, but with bidirectional attention. Row i - 1 of the body predicts token i."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import D5P4Error
from ..ops.body import silu_gate
from ..types import Hidden
from .base import NativeModel, divides, flag, number, only, whole
from .layers import Padding, RMSNorm, Rotary, any_shape, attend, read_padding, rotary


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, inner: int, eps: float) -> None:
        super().__init__()
        kv_width = width // heads * kv_heads
        sizes = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        self.self_attn = nn.ModuleDict({name: nn.Linear(width, size) for name, size in sizes.items()})
        self.self_attn["o_proj"] = nn.Linear(width, width, bias=False)
        self.mlp = nn.ModuleDict({name: nn.Linear(width, inner, bias=False) for name in ("gate_proj", "up_proj")})
        self.mlp["down_proj"] = nn.Linear(inner, width, bias=False)
        self.input_layernorm = RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)

    def forward(self, x: Tensor, delta: Tensor | None, angles: Rotary, padding: Padding) -> tuple[Tensor, Tensor]:
        """Return x and delta [R, T, D] after this layer. The next norm adds `delta` (the output of the MLP) to x."""
        attention, mlp = self.self_attn, self.mlp
        x, h = self.input_layernorm(x, delta)
        query, key, value = (attention[name](h) for name in ("q_proj", "k_proj", "v_proj"))
        mixed = attend(query, key, value, angles, padding.keys)
        x, h = self.post_attention_layernorm(x, attention["o_proj"](mixed))
        return x, mlp["down_proj"](silu_gate(mlp["gate_proj"](h), mlp["up_proj"](h)))


class Dream(NativeModel):
    """The Dream model. States and features are both the rows after the last norm, moved right by one position."""

    architecture = "dream"
    prefix = ""
    head_name = "lm_head.weight"

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
        self.mask_id = whole(config, "mask_token_id", least=0, most=vocabulary - 1)

        layers = [Layer(width, heads, kv_heads, inner, eps) for _ in range(whole(config, "num_hidden_layers"))]
        embedding, norm = nn.Embedding(vocabulary, width), RMSNorm(width, eps)
        self.model: Any = nn.ModuleDict({"embed_tokens": embedding, "layers": nn.ModuleList(layers), "norm": norm})
        tied = flag(config, "tie_word_embeddings")
        self.lm_head = None if tied else nn.Linear(width, vocabulary, bias=False)
        self.ban()

    @property
    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        return (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight, None

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
    """Move the states x [R, T, D] right by one position. The first state after the padding also stays in its place."""
    shifted = torch.cat((x[:, :1], x[:, :-1]), dim=1)
    return shifted if padding.first is None else torch.where(padding.first[..., None], x, shifted)


def _rope_theta(config: Mapping[str, Any]) -> float:
    """Return the rotary base, from the key that transformers 4 writes or the table that transformers 5 writes."""
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
