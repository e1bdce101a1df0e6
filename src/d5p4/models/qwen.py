"""Models with the layers of Llama, Qwen2, Qwen3 or Qwen3-MoE: Dream, SDAR, Fast-dLLM v2, LLaDA-MoE and others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from .base import MOST_EXPERTS, MOST_LAYERS, NativeModel, Parts, divides, flag, integer, number, only, rope_theta, wrong
from .experts import MLP, Router, SparseMLP
from .layers import Output, Reading, RMSNorm


class Layer(nn.Module):
    """One layer of Qwen2 (biases of query, key and value) or of Qwen3 (a norm of every query and key head)."""

    attention_name = "self_attn"  # and the names of the parts of its attention
    inputs: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")  # one name: query, key and value in one matrix
    output = "o_proj"
    norms: ClassVar[tuple[str, str]] = ("q_norm", "k_norm")

    def __init__(self, model: QwenModel, mlp: nn.Module) -> None:
        super().__init__()
        width, head_width, eps = model.width, model.head_width, model.eps
        self.widths = [count * head_width for count in (model.heads, model.kv_heads, model.kv_heads)]
        widths = self.widths if len(self.inputs) == 3 else [sum(self.widths)]
        parts: dict[str, nn.Module] = {
            name: nn.Linear(width, size, bias=model.bias) for name, size in zip(self.inputs, widths, strict=True)
        }
        parts[self.output] = nn.Linear(self.widths[0], width, bias=False)
        if model.head_norms:
            parts |= {name: RMSNorm(head_width, eps) for name in self.norms}
        self.add_module(self.attention_name, nn.ModuleDict(parts))
        self.mlp = mlp
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(width, eps), RMSNorm(width, eps)

    def forward(self, x: Tensor, delta: Tensor | None, reading: Reading, layer: int) -> Output:
        attention: Any = getattr(self, self.attention_name)
        x, h = self.input_layernorm(x, delta)
        outputs = [attention[name](h) for name in self.inputs]
        query, key, value = outputs if len(outputs) == 3 else outputs[0].split(self.widths, dim=-1)
        norms = [getattr(attention, name, None) for name in self.norms]
        mixed, pair = reading.attend(query, key, value, layer, norms)
        x, h = self.post_attention_layernorm(x, attention[self.output](mixed))
        return x, self.mlp(h), pair


class QwenModel(NativeModel):
    """The common parts of models whose config.json has the keys of Qwen2 or Qwen3."""

    prefix = ""
    head_name = "lm_head.weight"
    embedding_name: ClassVar[str] = "embed_tokens"
    supported: ClassVar[Mapping[str, Any]] = {}  # the only values of keys that the code implements
    layer_kind: ClassVar[type[Layer]] = Layer
    bias: bool = False
    head_norms = False  # unless config.json says otherwise
    head_norms_key: ClassVar[str | None] = None
    rotated_share: ClassVar[float] = 1.0  # the share of a head that is rotated, if config.json does not say it
    eps = 1e-6

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        only(config, {"hidden_act": "silu", "use_sliding_window": False, **self.supported}, self.title)
        self.width, self.heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
        self.kv_heads = integer(config, "num_key_value_heads", self.heads)
        usual = 0 if config.get("head_dim") else divides(config, "num_attention_heads", self.width, self.heads)
        divides(config, "num_key_value_heads", self.heads, self.kv_heads)
        self.head_width = integer(config, "head_dim", usual)
        if self.head_width % 2:
            raise wrong("head_dim", self.head_width, "which should be even: rotations need pairs")
        self.layers, vocabulary = integer(config, "num_hidden_layers", most=MOST_LAYERS), integer(config, "vocab_size")
        rows = integer(config, "embedding_size", vocabulary, least=vocabulary)
        self.eps = number(config, "rms_norm_eps", self.eps)
        self.rotary_width = rotary_width(config, self.head_width, self.rotated_share)
        self.rope_theta = rope_theta(config, self.title)
        self.cache_shape = (self.layers, self.kv_heads, self.head_width)
        block_key = next((key for key in self.block_keys if config.get(key) is not None), "block_length")
        self.block = integer(config, block_key, self.default_block) if self.block_keys else None
        self.next_token_first = flag(config, "next_token_first", self.next_token_first)
        self.causal_context = self.block is not None and flag(config, "causal_context")
        self.max_length = integer(config, "max_position_embeddings")
        self.mask_id = self.read_mask(config, vocabulary)
        if self.head_norms_key is not None:
            self.head_norms = flag(config, self.head_norms_key, self.head_norms)

        layers = [self.layer_kind(self, self.mlp(config, layer)) for layer in range(self.layers)]
        embedding, norm = nn.Embedding(rows, self.width), RMSNorm(self.width, self.eps)
        parts = {self.embedding_name: embedding, "layers": nn.ModuleList(layers), "norm": norm}
        self.model: Any = nn.ModuleDict(parts)
        tied = flag(config, "tie_word_embeddings")
        self.lm_head = None if tied else nn.Linear(self.width, rows, bias=False)
        self.ban()

    def mlp(self, config: Mapping[str, Any], layer: int) -> nn.Module:
        """Return the part of a layer that follows the attention."""
        return MLP(self.width, integer(config, "intermediate_size"))

    def experts(self, config: Mapping[str, Any]) -> int:
        return integer(config, "num_experts", most=MOST_EXPERTS // self.layers)

    def softmax_experts(self, config: Mapping[str, Any], inner: int, normalised: bool) -> SparseMLP:
        experts = self.experts(config)
        router = Router(self.width, experts, integer(config, "num_experts_per_tok", most=experts), normalised)
        return SparseMLP(router, experts, self.width, inner)

    @property
    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        return (self.model[self.embedding_name] if self.lm_head is None else self.lm_head).weight, None

    def parts(self) -> Parts:
        return self.model[self.embedding_name], self.model.layers, self.model.norm


class Dream(QwenModel):
    """Dream, Dream-Coder and DiffuCoder: Qwen2 with bidirectional attention and shifted states."""

    architecture = "dream"
    title = "Dream"
    supported = {"use_mrope": False}
    bias = True
    shifted = True
    qwen2_text = True


class SDAR(QwenModel):
    """SDAR and TraDo: Qwen3 with block-causal attention."""

    architecture = "sdar"
    title = "SDAR"
    supported = {"attention_bias": False}
    head_norms = True
    qwen2_text = True
    mask_text = "<|MASK|>"
    default_mask = 151669
    block_keys = ("block_length", "block_size")
    default_block = 4


class SDARMoE(SDAR):
    """SDAR with experts: Qwen3-MoE with block-causal attention."""

    architecture = "sdar_moe"
    title = "SDAR with experts"

    def mlp(self, config: Mapping[str, Any], layer: int) -> nn.Module:
        dense = config.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise wrong("mlp_only_layers", dense, "which should be a list of layers")
        if layer in dense or (layer + 1) % integer(config, "decoder_sparse_step", 1):
            return super().mlp(config, layer)
        return self.softmax_experts(config, integer(config, "moe_intermediate_size"), flag(config, "norm_topk_prob"))


class LLaDAMoE(QwenModel):
    """LLaDA-MoE: the layers of Qwen3-MoE with bidirectional attention. Its own code does not read `norm_topk_prob`."""

    architecture = "llada_moe"
    title = "LLaDA-MoE"
    supported = dict(attention_bias=False, clip_qkv=None, shared_expert_intermediate_size=None, routed_scaling_factor=1)
    supported |= dict(router_num_group=None, router_topk_group=None, moe_router_enable_expert_bias=False)
    supported |= dict(moe_router_score_function="softmax")
    eps = 1e-5
    default_mask = 156895
    head_norms_key = "qk_layernorm"

    def mlp(self, config: Mapping[str, Any], layer: int) -> nn.Module:
        sparse = config.get("moe_layer_freq") or [1] * self.layers
        if not isinstance(sparse, list) or len(sparse) != self.layers:
            raise wrong("moe_layer_freq", sparse, f"which should be a list of {self.layers} numbers")
        if sparse[layer] != 1:
            return MLP(self.width, integer(config, "dense_intermediate_size"))
        return self.softmax_experts(config, integer(config, "expert_intermediate_size"), normalised=False)


class FastDLLM(QwenModel):
    """Fast-dLLM v2: Qwen2 with block-causal attention and states that are shifted, also across blocks."""

    architecture = "fast_dllm"
    title = "Fast-dLLM v2"
    bias = True
    shifted = True
    qwen2_text = True
    default_mask: ClassVar[int | None] = 151665
    block_keys = ("block_length", "bd_size")
    default_block = 32
    next_token_first = True


LLAMA = {"attention_bias": False, "mlp_bias": False}  # what Llama's layers lack; config.json may say so


class FastDLLMLlama(FastDLLM):
    """Fast-dLLM v2 on the layers of Llama, which have no biases. This is the layout of the model `smol`."""

    architecture = "fast_dllm_llama"
    title = "Fast-dLLM v2 with Llama's layers"
    supported = LLAMA
    bias = False
    qwen2_text = False
    default_mask = None
    next_token_first = False


class StableDiffCoder(QwenModel):
    """Stable-DiffCoder: Llama with block-causal attention, and the output at position i predicts token i.

    Its config.json names neither the mask nor a block length. Mask 5 and blocks of 4 are those of its own `generate`.
    """

    architecture = "stable_diffcoder"
    title = "Stable-DiffCoder"
    supported = LLAMA
    default_mask = 5
    block_keys = ("block_length",)
    default_block = 4


class LLaDA2Layer(Layer):
    attention_name = "attention"
    inputs = ("query_key_value",)
    output = "dense"
    norms = ("query_layernorm", "key_layernorm")


class LLaDA2(QwenModel):
    """LLaDA2.0 and LLaDA2.1: block-causal attention, and experts in all layers but the first ones.

    LLaDA2.1's own decoding loop may also replace tokens that it has revealed. d5p4 does not: a revealed token stays.
    """

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


def rotary_width(config: Mapping[str, Any], head_width: int, default: float) -> int:
    """Return the number of elements of a head that are rotated. Rotations need pairs, so the number is even."""
    factor = number(config, "partial_rotary_factor", default)
    width = int(head_width * min(factor, 2))
    if width % 2 or not 0 < width <= head_width:
        reason = f"so {width} of the {head_width} elements of a head are rotated, but their number should be even"
        raise wrong("partial_rotary_factor", factor, f"{reason} and above 0")
    only(config, {"rotary_dim": width}, "rotary positions")
    return width
