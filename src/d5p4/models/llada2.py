"""LLaDA2.0 and LLaDA2.1: block-causal attention, and experts in all layers but the first ones.

LLaDA2.1's own decoding loop may also replace tokens that it has revealed. d5p4 does not: here a revealed token stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .base import divides, flag, integer, number, only
from .experts import Router, SparseMLP
from .qwen import Layer, QwenModel


class LLaDA2Layer(Layer):
    attention_name = "attention"
    inputs = ("query_key_value",)
    output = "dense"
    norms = ("query_layernorm", "key_layernorm")


class LLaDA2(QwenModel):
    """The LLaDA2 model."""

    architecture = "llada2_moe"
    title = "LLaDA2"
    embedding_name = "word_embeddings"
    supported = dict(score_function="sigmoid", norm_topk_prob=True, use_bias=False, use_qkv_bias=False, norm_head=False)
    layer_kind = LLaDA2Layer
    head_norms = True
    head_norms_key = "use_qk_norm"
    rotated_share = 0.5
    wide = ("gate.expert_bias",)
    default_mask = 156895
    block_keys = ("block_length", "block_size")
    default_block = 32

    def mlp(self, config: Mapping[str, Any], layer: int) -> nn.Module:
        if layer < integer(config, "first_k_dense_replace", 0, least=0):
            return super().mlp(config, layer)
        experts, inner = self.experts(config), integer(config, "moe_intermediate_size")
        groups = integer(config, "n_group", 1)
        best_groups = integer(config, "topk_group", groups, most=groups)
        size = divides(config, "n_group", experts, groups)
        chosen = integer(config, "num_experts_per_tok", most=best_groups * size)
        bias = flag(config, "moe_router_enable_expert_bias", True)
        scale = number(config, "routed_scaling_factor", 1.0)
        shared = integer(config, "num_shared_experts", 0, least=0)
        if shared:
            only(config, {"moe_shared_expert_intermediate_size": inner}, self.title)
        router = Router(self.width, experts, chosen, True, True, groups, best_groups, scale, bias)
        return SparseMLP(router, experts, self.width, inner, shared * inner)
