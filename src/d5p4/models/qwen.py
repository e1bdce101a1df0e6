"""Models with the layers of Qwen2, Qwen3 or Qwen3-MoE: Dream, SDAR, Fast-dLLM v2 and LLaDA-MoE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from ..errors import D5P4Error
from .base import block_length, divides, flag, number, only, rope_theta, whole
from .experts import MLP, SoftmaxRouter, SparseMLP
from .layers import Reading, RMSNorm, Transformer


class Layer(nn.Module):
    """One layer of Qwen2 (biases of query, key and value) or of Qwen3 (a norm of every query and key head)."""

    def __init__(self, sizes: Sizes, bias: bool, head_norms: bool, mlp: nn.Module) -> None:
        super().__init__()
        width, kv_width = sizes.heads * sizes.head_width, sizes.kv_heads * sizes.head_width
        outputs = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        linears = {name: nn.Linear(sizes.width, size, bias=bias) for name, size in outputs.items()}
        self.self_attn: Any = nn.ModuleDict({**linears, "o_proj": nn.Linear(width, sizes.width, bias=False)})
        if head_norms:
            self.self_attn.update({name: RMSNorm(sizes.head_width, sizes.eps) for name in ("q_norm", "k_norm")})
        self.head_norms = head_norms
        self.mlp = mlp
        self.input_layernorm = RMSNorm(sizes.width, sizes.eps)
        self.post_attention_layernorm = RMSNorm(sizes.width, sizes.eps)

    def forward(
        self, x: Tensor, delta: Tensor | None, reading: Reading, layer: int
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Return x and delta [R, T, D] after this layer, and its keys and values. The next norm adds delta to x."""
        attention = self.self_attn
        x, h = self.input_layernorm(x, delta)
        norms = (attention.q_norm, attention.k_norm) if self.head_norms else (None, None)
        query, key, value = (attention[name](h) for name in ("q_proj", "k_proj", "v_proj"))
        mixed, pair = reading.attend(query, key, value, layer, norms)
        x, h = self.post_attention_layernorm(x, attention.o_proj(mixed))
        return x, self.mlp(h), pair


class Sizes:
    """The sizes of a model, read from the keys of transformers in config.json."""

    def __init__(self, config: Mapping[str, Any], eps: float = 1e-6) -> None:
        self.width, self.heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
        self.kv_heads = whole(config, "num_key_value_heads", self.heads)
        divides(config, "num_key_value_heads", self.heads, self.kv_heads)
        if config.get("head_dim") is None:
            self.head_width = divides(config, "num_attention_heads", self.width, self.heads)
        else:
            self.head_width = whole(config, "head_dim")
        if self.head_width % 2:
            raise D5P4Error(f"config.json has head_dim={self.head_width}, which should be even: rotations need pairs")
        self.layers = whole(config, "num_hidden_layers")
        self.vocabulary = whole(config, "vocab_size")
        self.eps = number(config, "rms_norm_eps", eps)


class QwenModel(Transformer):
    """The common parts of models whose config.json has the keys of Qwen2 or Qwen3.

    States and features are both the rows after the last norm.
    """

    prefix = ""
    head_name = "lm_head.weight"
    embedding_name: ClassVar[str] = "embed_tokens"
    supported: ClassVar[Mapping[str, Any]] = {}  # the only values of keys that the code implements
    bias: ClassVar[bool] = False
    head_norms: bool = False
    rotated_share: ClassVar[float] = 1.0  # the share of a head that is rotated, if config.json does not say it
    eps: ClassVar[float] = 1e-6

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        only(config, {"hidden_act": "silu", "use_sliding_window": False, **self.supported}, self.title)
        sizes = Sizes(config, self.eps)
        self.head_width = sizes.head_width
        self.rotary_width = rotary_width(config, sizes.head_width, self.rotated_share)
        self.rope_theta = rope_theta(config, self.title)
        self.cache_shape = (sizes.layers, sizes.kv_heads, sizes.head_width)
        self.block = block_length(config, self.block_keys, self.default_block)
        self.max_length = whole(config, "max_position_embeddings")
        self.mask_id = self.read_mask(config, sizes.vocabulary)

        layers = [self.layer(sizes, self.mlp(config, sizes, i)) for i in range(sizes.layers)]
        embedding, norm = nn.Embedding(sizes.vocabulary, sizes.width), RMSNorm(sizes.width, sizes.eps)
        parts = {self.embedding_name: embedding, "layers": nn.ModuleList(layers), "norm": norm}
        self.model: Any = nn.ModuleDict(parts)
        tied = flag(config, "tie_word_embeddings")
        self.lm_head = None if tied else nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.ban()

    def layer(self, sizes: Sizes, mlp: nn.Module) -> nn.Module:
        return Layer(sizes, self.bias, self.head_norms, mlp)

    def mlp(self, config: Mapping[str, Any], sizes: Sizes, layer: int) -> nn.Module:
        """Return the part of a layer that follows the attention."""
        return MLP(sizes.width, whole(config, "intermediate_size"))

    @property
    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        return (self.model[self.embedding_name] if self.lm_head is None else self.lm_head).weight, None

    def parts(self) -> tuple[nn.Module, Iterable[nn.Module], RMSNorm]:
        return self.model[self.embedding_name], self.model.layers, self.model.norm


class Dream(QwenModel):
    """Dream, Dream-Coder and DiffuCoder: Qwen2 with bidirectional attention and shifted states."""

    architecture = "dream"
    title = "Dream"
    supported = {"use_mrope": False}
    bias = True
    shifted = True


class SDAR(QwenModel):
    """SDAR and TraDo: Qwen3 with block-causal attention."""

    architecture = "sdar"
    title = "SDAR"
    supported = {"attention_bias": False}
    head_norms = True
    mask_text = "<|MASK|>"
    default_mask = 151669
    block_keys = ("block_length", "block_size")
    default_block = 4


class SDARMoE(SDAR):
    """SDAR with experts: Qwen3-MoE with block-causal attention."""

    architecture = "sdar_moe"
    title = "SDAR with experts"

    def mlp(self, config: Mapping[str, Any], sizes: Sizes, layer: int) -> nn.Module:
        dense = config.get("mlp_only_layers") or ()
        if layer in dense or (layer + 1) % whole(config, "decoder_sparse_step", 1):
            return super().mlp(config, sizes, layer)
        return _sparse(config, sizes, whole(config, "moe_intermediate_size"))


class LLaDAMoE(QwenModel):
    """LLaDA-MoE: the layers of Qwen3-MoE with bidirectional attention."""

    architecture = "llada_moe"
    title = "LLaDA-MoE"
    supported = {
        "attention_bias": False,
        "clip_qkv": None,
        "shared_expert_intermediate_size": None,
        "router_num_group": None,
        "router_topk_group": None,
        "routed_scaling_factor": 1,
        "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False,
    }
    eps = 1e-5
    default_mask = 156895

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.head_norms = flag(config, "qk_layernorm")
        super().__init__(config)

    def mlp(self, config: Mapping[str, Any], sizes: Sizes, layer: int) -> nn.Module:
        sparse = config.get("moe_layer_freq") or [1] * sizes.layers
        if not isinstance(sparse, list) or len(sparse) != sizes.layers:
            expected = f"which should be a list of {sizes.layers} numbers"
            raise D5P4Error(f"config.json has moe_layer_freq={sparse!r}, {expected}")
        if sparse[layer] != 1:
            return MLP(sizes.width, whole(config, "dense_intermediate_size"))
        return _sparse(config, sizes, whole(config, "expert_intermediate_size"))


class FastDLLM(QwenModel):
    """Fast-dLLM v2: Qwen2 with block-causal attention and states that are shifted, also across blocks."""

    architecture = "fast_dllm"
    title = "Fast-dLLM v2"
    bias = True
    shifted = True
    default_mask = 151665
    block_keys = ("block_length", "bd_size")
    default_block = 32


def _sparse(config: Mapping[str, Any], sizes: Sizes, inner: int) -> SparseMLP:
    experts = whole(config, "num_experts")
    chosen = whole(config, "num_experts_per_tok", most=experts)
    router = SoftmaxRouter(sizes.width, experts, chosen, flag(config, "norm_topk_prob"))
    return SparseMLP(router, experts, sizes.width, inner)


def rotary_width(config: Mapping[str, Any], head_width: int, default: float) -> int:
    """Return the number of elements of a head that are rotated. Rotations need pairs, so the number is even."""
    factor = number(config, "partial_rotary_factor", default)
    width = int(head_width * factor)
    if width % 2 or not 0 < width <= head_width:
        raise D5P4Error(
            f"config.json has partial_rotary_factor={factor:g}, so {width} of the {head_width} elements of a head are "
            "rotated, but their number should be even and above 0"
        )
    only(config, {"rotary_dim": width}, "rotary positions")
    return width
