"""Independent models to compare with: transformers' Llama, Qwen2 and Qwen3, a plain unfolded MDLM and LLaDA2."""

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

from tests.checkpoints import TRANSFORMERS_KEYS

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


def llama_of(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' Llama with the weights of a LLaDA or iLLaDA folder."""
    config, weights = read(folder)
    config = {TRANSFORMERS_KEYS.get(key, key): value for key, value in config.items()}
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
            **{key: config[key] for key in (*TRANSFORMERS_KEYS.values(), "rms_norm_eps", "rope_theta")},
            vocab_size=config["embedding_size"],
            attention_bias=config.get("include_qkv_bias", False),
            attn_implementation="sdpa",
        )
    )
    llama.to(dtype).eval()
    missing, unexpected = llama.load_state_dict(renamed, strict=False)  # the output projection's bias stays zero
    assert not unexpected and {name for name in missing if not name.endswith("o_proj.bias")} <= {"lm_head.weight"}
    width = config["hidden_size"] // config["num_attention_heads"]
    return widen(llama, width, config["rope_theta"], config["rms_norm_eps"])


def qwen_of(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' Qwen2 with the weights of a Dream or Fast-dLLM v2 folder, its Qwen3 with those of an SDAR or
    LLaDA-MoE folder, or its Llama with weights that have no biases; experts are ours below."""
    config, weights = read(folder)
    name = "Qwen3" if "model.layers.0.self_attn.q_norm.weight" in weights else "Qwen2"
    name = name if name == "Qwen3" or "model.layers.0.self_attn.q_proj.bias" in weights else "Llama"
    build, configure = (getattr(transformers, f"{name}{part}") for part in ("ForCausalLM", "Config"))
    keys = ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "intermediate_size")
    keys += ("vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_theta", "tie_word_embeddings")
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    model = build(configure(**{key: config[key] for key in keys}, head_dim=width, attn_implementation="sdpa"))
    model.to(dtype).eval()
    for i, layer in enumerate(model.model.layers):
        name = f"model.layers.{i}.mlp."
        if name + "gate.weight" in weights:
            names = [key for key in weights if key.startswith(name)]
            inner = {key.removeprefix(name): weights.pop(key).to(dtype) for key in names}
            layer.mlp = PlainExperts(inner, config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    for layer in model.model.layers:
        for name in ("q_norm", "k_norm"):
            if hasattr(layer.self_attn, name):
                weight = getattr(layer.self_attn, name).weight.data
                setattr(layer.self_attn, name, WideNorm(weight, config["rms_norm_eps"]))
    return widen(model, width, config["rope_theta"], config["rms_norm_eps"])


def causal_logits(model: Any, tokens: Tensor, block: int | None = None, mask_id: int | None = None) -> Tensor:
    """[R, T, V] logits of a transformers causal model that looks in both directions, or back and inside its block.

    With `mask_id`, a token in a block without this id looks only back."""
    rows, length = tokens.shape
    mask = torch.zeros(rows, 1, length, length, dtype=model.dtype)
    if block is not None:
        number = torch.arange(length) // block
        mask = mask.masked_fill(number[None, :] > number[:, None], torch.finfo(model.dtype).min)
    if mask_id is not None:
        for row, tokens_of_row in enumerate(tokens.tolist()):
            for i in range(length):
                if mask_id not in tokens_of_row[i // block * block :][:block]:
                    mask[row, :, i, i + 1 :] = torch.finfo(model.dtype).min
    return model(input_ids=tokens, attention_mask=mask, use_cache=False).logits


def swiglu(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    gate, up, down = (weights[f"{name}{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


class PlainExperts(nn.Module):
    """Experts with a softmax router, one token at a time."""

    def __init__(self, weights: dict[str, Tensor], config: dict[str, Any]) -> None:
        super().__init__()
        self.weights, self.config = weights, config

    def forward(self, h: Tensor) -> Tensor:
        return torch.stack([self.token(x) for x in h.flatten(0, -2)]).view_as(h)

    def token(self, x: Tensor) -> Tensor:
        chance = (self.weights["gate.weight"] @ x).softmax(0)
        chosen = chance.argsort(descending=True)[: self.config["num_experts_per_tok"]].tolist()
        # LLaDA-MoE's own class does not read `norm_topk_prob`; Qwen3-MoE's does.
        divided = self.config["norm_topk_prob"] and "moe_intermediate_size" in self.config
        total = sum(float(chance[e]) for e in chosen) if divided else 1.0
        return sum(chance[e] / total * swiglu(self.weights, f"experts.{e}.", x) for e in chosen)


class PlainLLaDA2:
    """LLaDA2 written step by step from its description; one row, one head and one token of the router at a time."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.config, weights = read(folder)
        self.weights = {name: weight.to(dtype) for name, weight in weights.items()}

    def norm(self, name: str, x: Tensor) -> Tensor:
        return WideNorm(self.weights[f"{name}.weight"], self.config["rms_norm_eps"])(x)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits [T, V] of one row [T]."""
        x = self.weights["model.word_embeddings.weight"][tokens]
        for i in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{i}"
            x = x + self.attention(f"{name}.attention", self.norm(f"{name}.input_layernorm", x))
            h = self.norm(f"{name}.post_attention_layernorm", x)
            if f"{name}.mlp.gate.weight" in self.weights:
                x = x + torch.stack([self.experts(f"{name}.mlp", token) for token in h])
            else:
                x = x + swiglu(self.weights, f"{name}.mlp.", h)
        return self.norm("model.norm", x) @ self.weights["lm_head.weight"].T

    def attention(self, name: str, h: Tensor) -> Tensor:
        heads, kv, width = (self.config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        fused = (h @ self.weights[f"{name}.query_key_value.weight"].T).view(len(h), heads + 2 * kv, width)
        rotated = int(width * self.config["partial_rotary_factor"])
        cos, sin = WideRotary(rotated, self.config["rope_theta"])(h, torch.arange(len(h)))
        number = torch.arange(len(h)) // self.config["block_length"]
        later = number[None, :] > number[:, None]

        def turned(x: Tensor, norm: str) -> Tensor:
            x = self.norm(f"{name}.{norm}", x)
            return torch.cat((PlainMDLM.turn(x[:, :rotated], cos, sin), x[:, rotated:]), dim=-1)

        out = []
        for head in range(heads):
            group = head * kv // heads
            query, key = turned(fused[:, head], "query_layernorm"), turned(fused[:, heads + group], "key_layernorm")
            scores = (query @ key.T / math.sqrt(width)).masked_fill(later, -math.inf)
            out.append(scores.softmax(-1) @ fused[:, heads + kv + group])
        return torch.cat(out, dim=-1) @ self.weights[f"{name}.dense.weight"].T

    def experts(self, name: str, x: Tensor) -> Tensor:
        config = self.config
        share = (self.weights[f"{name}.gate.weight"] @ x).sigmoid()
        rank = (share + self.weights[f"{name}.gate.expert_bias"]).tolist()
        size = config["num_experts"] // config["n_group"]
        groups = [list(range(g * size, (g + 1) * size)) for g in range(config["n_group"])]
        groups.sort(key=lambda group: -sum(sorted(rank[e] for e in group)[-2:]))
        allowed = [e for group in groups[: config["topk_group"]] for e in group]
        chosen = sorted(allowed, key=lambda e: -rank[e])[: config["num_experts_per_tok"]]
        total = sum(float(share[e]) for e in chosen) + 1e-20
        mixed = sum(share[e] / total * swiglu(self.weights, f"{name}.experts.{e}.", x) for e in chosen)
        return config["routed_scaling_factor"] * mixed + swiglu(self.weights, f"{name}.shared_experts.", x)


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
