"""LLaDA2.0 and LLaDA2.1: block-causal attention, and experts in all layers but the first ones.

LLaDA2.1 may also replace tokens that it has revealed. That rule is part of its own decoding loop, and d5p4 has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import D5P4Error
from .base import block_length, divides, flag, number, only, rope_theta, whole
from .experts import MLP, GroupRouter, SparseMLP
from .layers import Reading, RMSNorm, Transformer
from .qwen import Sizes, rotary_width

SUPPORTED = {
    "hidden_act": "silu",
    "score_function": "sigmoid",
    "norm_topk_prob": True,
    "use_bias": False,
    "use_qkv_bias": False,
    "norm_head": False,
}


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


class LLaDA2(Transformer):
    """The LLaDA2 model. States and features are both the rows after the last norm."""

    architecture = "llada2_moe"
    title = "LLaDA2"
    prefix = ""
    head_name = "lm_head.weight"
    wide = ("gate.expert_bias",)
    default_mask = 156895
    block_keys = ("block_length", "block_size")
    default_block = 32

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        only(config, SUPPORTED, self.title)
        sizes = Sizes(config)
        self.head_width = sizes.head_width
        self.rotary_width = rotary_width(config, sizes.head_width, 0.5)
        self.rope_theta = rope_theta(config, self.title)
        self.cache_shape = (sizes.layers, sizes.kv_heads, sizes.head_width)
        self.block = block_length(config, self.block_keys, self.default_block)
        self.max_length = whole(config, "max_position_embeddings")
        self.mask_id = whole(config, "mask_token_id", self.default_mask, least=0, most=sizes.vocabulary - 1)

        norms = config.get("use_qk_norm") is None or flag(config, "use_qk_norm")
        layers = [Layer(sizes, norms, _mlp(config, sizes.width, i)) for i in range(sizes.layers)]
        embedding, norm = nn.Embedding(sizes.vocabulary, sizes.width), RMSNorm(sizes.width, sizes.eps)
        self.model: Any = nn.ModuleDict({"word_embeddings": embedding, "layers": nn.ModuleList(layers), "norm": norm})
        tied = flag(config, "tie_word_embeddings")
        self.lm_head = None if tied else nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.ban()

    @property
    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        return (self.model.word_embeddings if self.lm_head is None else self.lm_head).weight, None

    def parts(self) -> tuple[nn.Module, Iterable[nn.Module], RMSNorm]:
        return self.model.word_embeddings, self.model.layers, self.model.norm


def _mlp(config: Mapping[str, Any], width: int, layer: int) -> nn.Module:
    if layer < whole(config, "first_k_dense_replace", 0, least=0):
        return MLP(width, whole(config, "intermediate_size"))
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
    router = GroupRouter(width, experts, chosen, groups, best_groups, scale, bias)
    return SparseMLP(router, experts, width, inner, shared * inner)
