"""LLaDA2.0 and LLaDA2.1: block-causal attention, and experts in all layers but the first ones.

LLaDA2.1's own decoding loop may also replace tokens that it has revealed. d5p4 does not: here a revealed token stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import D5P4Error
from .base import divides, flag, number, whole
from .experts import GroupRouter, SparseMLP
from .layers import Reading, RMSNorm
from .qwen import QwenModel, Sizes


class Layer(nn.Module):
    def __init__(self, sizes: Sizes, head_norms: bool, mlp: nn.Module) -> None:
        super().__init__()
        self.outputs = [count * sizes.head_width for count in (sizes.heads, sizes.kv_heads, sizes.kv_heads)]
        fused = nn.Linear(sizes.width, sum(self.outputs), bias=False)
        dense = nn.Linear(sizes.heads * sizes.head_width, sizes.width, bias=False)
        self.attention: Any = nn.ModuleDict({"query_key_value": fused, "dense": dense})
        if head_norms:
            names = ("query_layernorm", "key_layernorm")
            self.attention.update({name: RMSNorm(sizes.head_width, sizes.eps) for name in names})
        self.head_norms = head_norms
        self.mlp = mlp
        self.input_layernorm = RMSNorm(sizes.width, sizes.eps)
        self.post_attention_layernorm = RMSNorm(sizes.width, sizes.eps)

    def forward(
        self, x: Tensor, delta: Tensor | None, reading: Reading, layer: int
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Return x and delta [R, T, D] after this layer, and its keys and values. The next norm adds delta to x."""
        x, h = self.input_layernorm(x, delta)
        query, key, value = self.attention.query_key_value(h).split(self.outputs, dim=-1)
        norms = (self.attention.query_layernorm, self.attention.key_layernorm) if self.head_norms else (None, None)
        mixed, pair = reading.attend(query, key, value, layer, norms)
        x, h = self.post_attention_layernorm(x, self.attention.dense(mixed))
        return x, self.mlp(h), pair


class LLaDA2(QwenModel):
    """The LLaDA2 model."""

    architecture = "llada2_moe"
    title = "LLaDA2"
    embedding_name = "word_embeddings"
    supported = {
        "score_function": "sigmoid",
        "norm_topk_prob": True,
        "use_bias": False,
        "use_qkv_bias": False,
        "norm_head": False,
    }
    rotated_share = 0.5
    wide = ("gate.expert_bias",)
    default_mask = 156895
    block_keys = ("block_length", "block_size")
    default_block = 32

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.head_norms = config.get("use_qk_norm") is None or flag(config, "use_qk_norm")
        super().__init__(config)

    def layer(self, sizes: Sizes, mlp: nn.Module) -> nn.Module:
        return Layer(sizes, self.head_norms, mlp)

    def mlp(self, config: Mapping[str, Any], sizes: Sizes, layer: int) -> nn.Module:
        if layer < whole(config, "first_k_dense_replace", 0, least=0):
            return super().mlp(config, sizes, layer)
        experts, inner = whole(config, "num_experts"), whole(config, "moe_intermediate_size")
        groups = whole(config, "n_group", 1)
        best_groups = whole(config, "topk_group", groups, most=groups)
        size = divides(config, "n_group", experts, groups)
        chosen = whole(config, "num_experts_per_tok", most=best_groups * size)
        bias = config.get("moe_router_enable_expert_bias") is None or flag(config, "moe_router_enable_expert_bias")
        scale = number(config, "routed_scaling_factor", 1.0)
        shared = whole(config, "num_shared_experts", 0, least=0)
        if shared and config.get("moe_shared_expert_intermediate_size") not in (None, inner):
            size = config["moe_shared_expert_intermediate_size"]
            raise D5P4Error(f"config.json has moe_shared_expert_intermediate_size={size!r}, which should be {inner}")
        router = GroupRouter(sizes.width, experts, chosen, groups, best_groups, scale, bias)
        return SparseMLP(router, experts, sizes.width, inner, shared * inner)
