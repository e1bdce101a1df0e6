"""LLaDA: a body like that of Llama, but with bidirectional attention, for checkpoints such as GSAI-ML/LLaDA-8B-Base."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..ops.body import silu_gate
from .base import MOST_LAYERS, NativeModel, Parts, divides, flag, integer, number, only, rope_theta
from .layers import Output, Reading, RMSNorm

SUPPORTED: dict[str, Any] = {"block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu"}
SUPPORTED |= {"rope": True, "layer_norm_with_affine": True, "block_group_size": 1}
SPELLINGS = {  # keys of transformers for keys of LLaDA's config.json; iLLaDA may use either
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "mlp_hidden_size": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
    "weight_tying": "tie_word_embeddings",
    "activation_type": "hidden_act",
    "include_qkv_bias": "attention_bias",
}
UNUSED = ("alibi", "include_bias", "bias_for_layer_norm", "attention_layer_norm", "input_emb_norm", "scale_logits")


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, inner: int, eps: float, qkv_bias: bool) -> None:
        super().__init__()
        kv_width = width // heads * kv_heads
        self.attn_norm = RMSNorm(width, eps)
        self.q_proj = nn.Linear(width, width, bias=qkv_bias)
        self.k_proj = nn.Linear(width, kv_width, bias=qkv_bias)
        self.v_proj = nn.Linear(width, kv_width, bias=qkv_bias)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.ff_norm = RMSNorm(width, eps)
        self.ff_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.ff_out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, delta: Tensor | None, reading: Reading, layer: int) -> Output:
        x, h = self.attn_norm(x, delta)
        mixed, pair = reading.attend(self.q_proj(h), self.k_proj(h), self.v_proj(h), layer)
        x, h = self.ff_norm(x, self.attn_out(mixed))
        return x, self.ff_out(silu_gate(self.ff_proj(h), self.up_proj(h))), pair


class LLaDA(NativeModel):
    """The LLaDA model. The hidden states after its last norm go to the head and also serve as features."""

    architecture = "llada"
    title = "LLaDA"
    prefix = "model.transformer."
    head_name = "ff_out.weight"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        foreign = {own for own, other in SPELLINGS.items() if config.get(own) is None and config.get(other) is not None}
        key = {own: other if own in foreign else own for own, other in SPELLINGS.items()}
        supported = {key.get(name, name): value for name, value in SUPPORTED.items()}
        only(config, {**supported, **dict.fromkeys(UNUSED, False), "clip_qkv": None}, self.title)
        width, heads = integer(config, key["d_model"]), integer(config, key["n_heads"])
        kv_heads = integer(config, key["n_kv_heads"], 1 if config.get("multi_query_attention") else heads)
        inner = integer(config, key["mlp_hidden_size"], integer(config, "mlp_ratio", 4) * width)
        vocabulary = integer(config, "vocab_size")
        rows = integer(config, "embedding_size", vocabulary, least=vocabulary)
        eps = number(config, "rms_norm_eps", 1e-5)
        self.head_width = self.rotary_width = divides(config, key["n_heads"], width, heads)
        only(config, {"head_dim": self.head_width}, self.title)
        divides(config, key["n_kv_heads"], heads, kv_heads)
        self.rope_theta = rope_theta(config, self.title)
        self.max_length = integer(config, key["max_sequence_length"])
        self.mask_id = self.read_mask(config, vocabulary)

        self.cache_shape = (integer(config, key["n_layers"], most=MOST_LAYERS), kv_heads, self.head_width)
        qkv_bias = flag(config, key["include_qkv_bias"])
        self.wte = nn.Embedding(rows, width)
        blocks = (Block(width, heads, kv_heads, inner, eps, qkv_bias) for _ in range(self.cache_shape[0]))
        self.blocks = nn.ModuleList(blocks)
        self.ln_f = RMSNorm(width, eps)
        self.ff_out = None if flag(config, key["weight_tying"]) else nn.Linear(width, rows, bias=False)
        self.ban()

    @property
    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        return (self.wte if self.ff_out is None else self.ff_out).weight, None

    def parts(self) -> Parts:
        return self.wte, self.blocks, self.ln_f


class ILLaDA(LLaDA):
    """iLLaDA: LLaDA with fewer key heads than query heads, and with a head that is its embedding."""

    architecture = "illada"
    title = "iLLaDA"
    default_mask = 5
