"""Models with the layers of Qwen2 or Qwen3: Dream, SDAR and Fast-dLLM v2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from ..errors import D5P4Error
from ..ops.body import silu_gate
from .base import block_length, divides, flag, number, only, whole
from .layers import Reading, RMSNorm, Transformer, per_head


class MLP(nn.Module):
    """A SwiGLU layer from [..., D] to [..., D] with `inner` hidden units."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.down_proj(silu_gate(self.gate_proj(h), self.up_proj(h)))


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
        self.head_width, self.head_norms = sizes.head_width, head_norms
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
        query, key = (
            per_head(attention[name](h), self.head_width, norm)
            for name, norm in zip(("q_proj", "k_proj"), norms, strict=True)
        )
        mixed, pair = reading.attend(query, key, per_head(attention.v_proj(h), self.head_width), layer)
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
    """The common parts of the models in this file. States and features are both the rows after the last norm."""

    prefix = ""
    head_name = "lm_head.weight"
    title: ClassVar[str]  # how messages name the model
    bias: ClassVar[bool] = False
    head_norms: ClassVar[bool] = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        only(config, {"hidden_act": "silu", "use_sliding_window": False, "use_mrope": False}, self.title)
        only(config, {"attention_bias": self.bias}, self.title)
        sizes = Sizes(config)
        self.head_width = self.rotary_width = sizes.head_width
        self.rope_theta = rope_theta(config, self.title)
        self.cache_shape = (sizes.layers, sizes.kv_heads, sizes.head_width)
        self.block = block_length(config, self.block_keys, self.default_block)
        self.max_length = whole(config, "max_position_embeddings")
        self.mask_id = whole(config, "mask_token_id", self.default_mask, least=0, most=sizes.vocabulary - 1)

        layers = [Layer(sizes, self.bias, self.head_norms, self.mlp(config, sizes, i)) for i in range(sizes.layers)]
        embedding, norm = nn.Embedding(sizes.vocabulary, sizes.width), RMSNorm(sizes.width, sizes.eps)
        self.model: Any = nn.ModuleDict({"embed_tokens": embedding, "layers": nn.ModuleList(layers), "norm": norm})
        tied = flag(config, "tie_word_embeddings")
        self.lm_head = None if tied else nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.ban()

    def mlp(self, config: Mapping[str, Any], sizes: Sizes, layer: int) -> nn.Module:
        return MLP(sizes.width, whole(config, "intermediate_size"))

    @property
    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        return (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight, None

    def parts(self) -> tuple[nn.Module, Iterable[nn.Module], RMSNorm]:
        return self.model.embed_tokens, self.model.layers, self.model.norm


class Dream(QwenModel):
    """Dream, Dream-Coder and DiffuCoder: Qwen2 with bidirectional attention. Row i - 1 of the body predicts token i."""

    architecture = "dream"
    title = "Dream"
    bias = True
    shifted = True


class SDAR(QwenModel):
    """SDAR and TraDo: Qwen3 with block-causal attention. Row i predicts token i."""

    architecture = "sdar"
    title = "SDAR"
    head_norms = True
    mask_text = "<|MASK|>"
    default_mask = 151669
    block_keys = ("block_length", "block_size")
    default_block = 4


class FastDLLM(QwenModel):
    """Fast-dLLM v2: Qwen2 with block-causal attention. Row i - 1 of the body predicts token i, also across blocks."""

    architecture = "fast_dllm"
    title = "Fast-dLLM v2"
    bias = True
    shifted = True
    default_mask = 151665
    block_keys = ("block_length", "bd_size")
    default_block = 32


def rope_theta(config: Mapping[str, Any], title: str) -> float:
    """Return the rotary base, from the key that transformers 4 writes or the table that transformers 5 writes."""
    for key in ("rope_scaling", "rope_parameters"):
        table = config.get(key) or {}
        kind = table.get("rope_type", table.get("type", "default")) if isinstance(table, Mapping) else table
        if kind != "default":
            raise D5P4Error(
                f"config.json has {key}={table!r}, but d5p4's {title} implements plain rotary positions only; "
                "load the model with its own code and pass it to d5p4.wrap instead"
            )
    table = config.get("rope_parameters") or {}
    return number(config if config.get("rope_theta") is not None else table, "rope_theta", 10000.0)
