"""Independent models to compare with: transformers' Llama and Qwen2, and a plain unfolded MDLM."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

LLADA_NAMES = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}


class WideNorm(nn.Module):
    """RMS norm in the dtype of its input (transformers' own goes through float32)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()


class WideRotary(nn.Module):
    """Rotary cosines and sines in the dtype of the rows."""

    def __init__(self, width: int, base: float) -> None:
        super().__init__()
        self.width, self.base = width, base

    def forward(self, x: Tensor, position_ids: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        frequency = torch.tensor([self.base ** (-2 * i / self.width) for i in range(self.width // 2)], dtype=x.dtype)
        angles = position_ids[..., None].to(x.dtype) * frequency
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return json.loads((folder / "config.json").read_text()), weights


def widen(model: Any, width: int, base: float, eps: float) -> Any:
    """Replace the parts of a transformers model that force float32."""
    model.model.rotary_emb = WideRotary(width, base)
    model.model.norm = WideNorm(model.model.norm.weight.data, eps)
    for layer in model.model.layers:
        layer.input_layernorm = WideNorm(layer.input_layernorm.weight.data, eps)
        layer.post_attention_layernorm = WideNorm(layer.post_attention_layernorm.weight.data, eps)
    return model


def llama_of(folder: Path, dtype: torch.dtype, wide: bool = True) -> Any:
    """transformers' Llama with the weights of a LLaDA folder."""
    config, weights = read(folder)
    renamed = {}
    for name, weight in weights.items():
        parts = name.removeprefix("model.transformer.").split(".")
        if parts[0] == "blocks":
            renamed[f"model.layers.{parts[1]}.{LLADA_NAMES[parts[2]]}.{parts[3]}"] = weight
        else:
            target = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}[parts[0]]
            renamed[f"{target}.weight"] = weight
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=config["d_model"],
            num_attention_heads=config["n_heads"],
            num_key_value_heads=config["n_kv_heads"],
            num_hidden_layers=config["n_layers"],
            intermediate_size=config["mlp_hidden_size"],
            vocab_size=config["embedding_size"],
            rms_norm_eps=config["rms_norm_eps"],
            max_position_embeddings=config["max_sequence_length"],
            rope_theta=config["rope_theta"],
            tie_word_embeddings=config["weight_tying"],
            attn_implementation="sdpa",
        )
    )
    llama.to(dtype).eval()
    missing, unexpected = llama.load_state_dict(renamed, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    if not wide:
        return llama
    return widen(llama, config["d_model"] // config["n_heads"], config["rope_theta"], config["rms_norm_eps"])


def qwen2_of(folder: Path, dtype: torch.dtype, wide: bool = True) -> Any:
    """transformers' Qwen2 with the weights of a Dream folder."""
    config, weights = read(folder)
    keys = ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "intermediate_size")
    keys += ("vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_theta", "tie_word_embeddings")
    qwen2 = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**{key: config[key] for key in keys}, attn_implementation="sdpa")
    )
    qwen2.to(dtype).eval()
    missing, unexpected = qwen2.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    if not wide:
        return qwen2
    width = config["hidden_size"] // config["num_attention_heads"]
    return widen(qwen2, width, config["rope_theta"], config["rms_norm_eps"])


def causal_logits(model: Any, tokens: Tensor) -> Tensor:
    """[R, T, V] logits of a transformers causal model that looks in both directions."""
    rows, length = tokens.shape
    mask = torch.zeros(rows, 1, length, length, dtype=model.dtype)
    return model(input_ids=tokens, attention_mask=mask, use_cache=False).logits


class PlainMDLM:
    """MDLM written step by step from its description, nothing folded; one row at a time, attention by hand."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.config, weights = read(folder)
        self.weights = {name.removeprefix("backbone."): weight.to(dtype) for name, weight in weights.items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.weights[f"{name}.weight"]

    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [T, V] and last block output [T, D] of one row [T]."""
        x = self.weights["vocab_embed.embedding"][tokens]
        sigma = 0.0
        frequency = [math.exp(-math.log(10000) * j / 128) for j in range(128)]
        wave = torch.tensor([math.cos(sigma * f) for f in frequency] + [math.sin(sigma * f) for f in frequency])
        c = self.linear("sigma_map.mlp.2", F.silu(self.linear("sigma_map.mlp.0", wave.to(x.dtype))))
        c = F.silu(c)
        for i in range(self.config["n_blocks"]):
            name = f"blocks.{i}"
            shift1, scale1, gate1, shift2, scale2, gate2 = self.linear(f"{name}.adaLN_modulation", c).chunk(6)
            h = self.norm(f"{name}.norm1", x) * (1 + scale1) + shift1
            x = x + gate1 * self.linear(f"{name}.attn_out", self.attention(self.linear(f"{name}.attn_qkv", h)))
            h = self.norm(f"{name}.norm2", x) * (1 + scale2) + shift2
            h = self.linear(f"{name}.mlp.2", F.gelu(self.linear(f"{name}.mlp.0", h), approximate="tanh"))
            x = x + gate2 * h
        shift, scale = self.linear("output_layer.adaLN_modulation", c).chunk(2)
        h = self.norm("output_layer.norm_final", x) * (1 + scale) + shift
        unembedding = self.weights.get("output_layer.linear.weight", self.weights["vocab_embed.embedding"])
        return h @ unembedding.T + self.weights["output_layer.linear.bias"], x

    def attention(self, qkv: Tensor) -> Tensor:
        length, heads = qkv.shape[0], self.config["n_heads"]
        query, key, value = qkv.view(length, 3, heads, -1).unbind(1)
        width = query.shape[-1]
        cos, sin = WideRotary(width, 10000.0)(qkv, torch.arange(length))
        out = []
        for head in range(heads):
            q, k = (self.turn(part[:, head], cos, sin) for part in (query, key))
            out.append((q @ k.T / math.sqrt(width)).softmax(-1) @ value[:, head])
        return torch.cat(out, dim=-1)

    @staticmethod
    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[:, half:], x[:, :half]), dim=-1) * sin
