"""Writers of tiny random checkpoints in the public layouts of the architectures.

Each has two layers, a character tokenizer (`TINY_TEXT`) and logits with a spread of about 1.5, so that it behaves like
a trained model with opinions. Keyword arguments are those of `Options`, or they override config.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

TINY_TEXT = "abcdefghijklmnopqrstuvwxyz0123456789 \n.,?!'-:="
LLADA_SPECIALS = ("<|startoftext|>", "<|endoftext|>", "<|start_header_id|>", "<|end_header_id|>")
LLADA_SPECIALS += ("<|eot_id|>", "<|mdm_mask|>")
DREAM_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>")
SDAR_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>")
LLADA_CHAT = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
DREAM_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRANSFORMERS_KEYS = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "mlp_hidden_size": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
    "weight_tying": "tie_word_embeddings",
    "activation_type": "hidden_act",
}
SPREAD = 1.5  # standard deviation of the logits
Shapes = dict[str, tuple[int, ...]]


class Options(NamedTuple):
    """The keyword arguments of every writer. All others override config.json."""

    seed: int = 0
    dtype: torch.dtype = torch.float32
    shards: int = 1
    chat: bool = False
    generation: dict[str, Any] | None = None


def _parted(given: dict[str, Any]) -> tuple[Options, dict[str, Any]]:
    own = {name: value for name, value in given.items() if name in Options._fields}
    return Options(**own), {name: value for name, value in given.items() if name not in own}


def _ids(specials: Sequence[str]) -> dict[str, int]:
    return {text: len(TINY_TEXT) + i for i, text in enumerate(specials)}


def _vocabulary(specials: Sequence[str]) -> dict[str, int]:
    """Entries of config.json: the last special token is the mask, and the last two ids have no token."""
    ids = _ids(specials)
    names = {"mask_token_id": ids[specials[-1]], "eos_token_id": ids["<|endoftext|>"]}
    return {"vocab_size": len(TINY_TEXT) + len(specials) + 2, "pad_token_id": ids["<|endoftext|>"], **names}


def write_llada(folder: str | Path, **given: Any) -> Path:
    options, overrides = _parted(given)
    config: dict[str, Any] = {"architectures": ["LLaDAModelLM"], "model_type": "llada", "block_type": "llama"}
    config |= {"activation_type": "silu", "layer_norm_type": "rms", "rope": True, "rope_theta": 10000.0}
    config |= dict.fromkeys(("alibi", "include_bias", "include_qkv_bias", "scale_logits", "input_emb_norm"), False)
    config |= {"weight_tying": False, "d_model": 32, "n_heads": 4, "n_kv_heads": 4, "n_layers": 2}
    config |= {"mlp_hidden_size": 48, "rms_norm_eps": 1e-5, "max_sequence_length": 128, **_vocabulary(LLADA_SPECIALS)}
    config = {**config, "embedding_size": config["vocab_size"], **overrides}
    d, f, v = config["d_model"], config["mlp_hidden_size"], config["embedding_size"]
    kv = d // config["n_heads"] * config["n_kv_heads"]
    shapes: Shapes = {"wte.weight": (v, d), "ln_f.weight": (d,)}
    for i in range(config["n_layers"]):
        block = {"attn_norm": (d,), "q_proj": (d, d), "k_proj": (kv, d), "v_proj": (kv, d), "attn_out": (d, d)}
        block |= {"ff_norm": (d,), "ff_proj": (f, d), "up_proj": (f, d), "ff_out": (d, f)}
        shapes |= {f"blocks.{i}.{name}.weight": shape for name, shape in block.items()}
        if config["include_qkv_bias"]:
            shapes |= {f"blocks.{i}.{name}_proj.bias": (block[f"{name}_proj"][0],) for name in "qkv"}
    if not config["weight_tying"]:
        shapes["ff_out.weight"] = (v, d)
    weights = _draw(shapes, options, "wte.weight", "ff_out.weight")
    folder = _write(folder, config, {f"model.transformer.{k}": w for k, w in weights.items()}, options)
    settings = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>"}
    return _with_characters(folder, LLADA_SPECIALS, settings, LLADA_CHAT if options.chat else None)


def write_dream(folder: str | Path, **given: Any) -> Path:
    return _write_qwen(folder, DREAM_SPECIALS, given, architectures=["DreamModel"], model_type="Dream")


def write_sdar(folder: str | Path, **given: Any) -> Path:
    """SDAR in blocks of 4; as in public folders, neither block length nor mask id need be in config.json."""
    names = dict(architectures=["SDARForCausalLM"], model_type="sdar", head_dim=12, mask_token_id=None)
    return _write_qwen(folder, SDAR_SPECIALS, given, **names)


def write_sdar_moe(folder: str | Path, **given: Any) -> Path:
    names = dict(architectures=["SDARMoeForCausalLM"], model_type="sdar_moe", block_size=4)
    names |= dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20, norm_topk_prob=True)
    return _write_qwen(folder, SDAR_SPECIALS, given, **names)


def write_fast_dllm(folder: str | Path, **given: Any) -> Path:
    names = dict(architectures=["Fast_dLLM_QwenForCausalLM"], model_type="Fast_dLLM_Qwen", bd_size=4)
    return _write_qwen(folder, DREAM_SPECIALS, given, **names)


def write_fast_dllm_llama(folder: str | Path, **given: Any) -> Path:
    """Fast-dLLM v2 with the layers of Llama; blocks without masks are read causally."""
    names = dict(architectures=["Fast_dLLM_LlamaForCausalLM"], model_type="Fast_dLLM_Llama", bd_size=4)
    names |= dict(causal_context=True)
    return write_llama(folder, **{**names, **given})


def write_stable_diffcoder(folder: str | Path, **given: Any) -> Path:
    """Stable-DiffCoder, which calls itself a Llama in its model_type, in blocks of 4."""
    return write_llama(folder, **{"architectures": ["StableDiffcoderForCausalLM"], **given})


def write_llama(folder: str | Path, **given: Any) -> Path:
    """A Llama that predicts the next token; its folder has a tokenizer.json."""
    names = dict(architectures=["LlamaForCausalLM"], model_type="llama", attention_bias=False, mlp_bias=False)
    folder = _write_qwen(folder, DREAM_SPECIALS, given, **names)
    for name in ("vocab.json", "merges.txt", "added_tokens.json"):
        (folder / name).unlink()
    character_tokenizer(DREAM_SPECIALS).save(str(folder / "tokenizer.json"))
    return folder


def write_llada_moe(folder: str | Path, **given: Any) -> Path:
    """LLaDA-MoE, which calls itself a LLaDA in its model_type, with one dense layer."""
    names = dict(architectures=["LLaDAMoEModelLM"], model_type="llada", qk_layernorm=True, rms_norm_eps=1e-5)
    names |= dict(num_experts=6, num_experts_per_tok=3, expert_intermediate_size=20, norm_topk_prob=None)
    names |= dict(moe_layer_freq=[0, 1], dense_intermediate_size=48, partial_rotary_factor=1)
    return _write_qwen(folder, DREAM_SPECIALS, given, **names)


def write_illada(folder: str | Path, **given: Any) -> Path:
    """iLLaDA: LLaDA's weights, and the keys of transformers in config.json."""
    names = dict(architectures=["ILLaDAModelLM"], model_type="illada", mask_token_id=None)
    folder = write_llada(folder, **{**names, "n_kv_heads": 2, "weight_tying": True, **given})
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {TRANSFORMERS_KEYS.get(key, key): value for key, value in config.items()})
    return folder


QWEN = {"hidden_act": "silu", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
QWEN |= {"num_key_value_heads": 2, "intermediate_size": 48, "rms_norm_eps": 1e-6, "max_position_embeddings": 128}
QWEN |= {"tie_word_embeddings": False}


def _write_qwen(folder: str | Path, specials: Sequence[str], given: dict[str, Any], **names: Any) -> Path:
    """A folder with Qwen2-style tokenizer files."""
    options, overrides = _parted(given)
    config: dict[str, Any] = {**QWEN, "rope_theta": 1000000.0, "rope_scaling": None, "use_sliding_window": False}
    config |= {"sliding_window": None, **_vocabulary(specials), **names, **overrides}
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    width = config.get("head_dim") or d // config["num_attention_heads"]
    q, kv = width * config["num_attention_heads"], width * config["num_key_value_heads"]
    head_norms = config["model_type"].startswith("sdar") or config.get("qk_layernorm")
    sparse = [bool(config.get("num_experts"))] * config["num_hidden_layers"]
    if "moe_layer_freq" in config:
        sparse = [mark == 1 for mark in config["moe_layer_freq"]]
    sparse = [mark and i not in config.get("mlp_only_layers", ()) for i, mark in enumerate(sparse)]
    shapes: Shapes = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    for i in range(config["num_hidden_layers"]):
        layer: Shapes = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
        outputs = {"q": q, "k": kv, "v": kv}
        layer |= {f"self_attn.{name}_proj.weight": (n, d) for name, n in outputs.items()}
        if head_norms:
            layer |= {f"self_attn.{name}_norm.weight": (width,) for name in "qk"}
        elif "attention_bias" not in config:
            layer |= {f"self_attn.{name}_proj.bias": (n,) for name, n in outputs.items()}
        layer |= {"self_attn.o_proj.weight": (d, q)}
        layer |= _experts(config, d) if sparse[i] else _mlp("mlp", d, f)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, d)
    weights = _draw(shapes, options, "model.embed_tokens.weight", "lm_head.weight")
    folder = _write(folder, config, weights, options)
    write_json(folder / "vocab.json", {byte_letter(c): i for i, c in enumerate(TINY_TEXT)})
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    ids = _ids(specials)
    write_json(folder / "added_tokens.json", ids)
    decoder = {str(i): {"content": text, "special": True, "normalized": False} for text, i in ids.items()}
    settings: dict[str, Any] = {"tokenizer_class": "DreamTokenizer", "added_tokens_decoder": decoder}
    settings |= {"eos_token": "<|endoftext|>", "mask_token": specials[-1]}
    settings |= {"bos_token": "<|beginoftext|>"} if "<|beginoftext|>" in specials else {}
    write_json(folder / "tokenizer_config.json", settings | ({"chat_template": DREAM_CHAT} if options.chat else {}))
    return folder


def write_llada2(folder: str | Path, **given: Any) -> Path:
    """LLaDA2 in blocks of 4: one dense layer, and one with 8 experts in 4 groups."""
    options, overrides = _parted(given)
    config: dict[str, Any] = {**QWEN, "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "head_dim": 8}
    config |= {"moe_intermediate_size": 20, "num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 1}
    config |= {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "score_function": "sigmoid"}
    config |= {"moe_router_enable_expert_bias": True, "norm_topk_prob": True, "first_k_dense_replace": 1}
    config |= {"partial_rotary_factor": 0.5, "rotary_dim": 4, "rope_theta": 600000, "use_qk_norm": True}
    config |= {"use_bias": False, "use_qkv_bias": False, "norm_head": False, "block_length": 4}
    config |= {**_vocabulary(DREAM_SPECIALS), **overrides}
    d, f, v, width = config["hidden_size"], config["intermediate_size"], config["vocab_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: Shapes = {"model.word_embeddings.weight": (v, d), "model.norm.weight": (d,)}
    for i in range(config["num_hidden_layers"]):
        layer: Shapes = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
        layer |= {"attention.query_key_value.weight": ((heads + 2 * kv) * width, d)}
        layer |= {f"attention.{name}_layernorm.weight": (width,) for name in ("query", "key")}
        layer |= {"attention.dense.weight": (d, heads * width)}
        layer |= _mlp("mlp", d, f) if i < config["first_k_dense_replace"] else _experts(config, d)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["lm_head.weight"] = (v, d)
    weights = _draw(shapes, options, "model.word_embeddings.weight", "lm_head.weight")
    folder = _write(folder, config, weights, options)
    settings = {"eos_token": "<|endoftext|>", "mask_token": "<|mask|>"}
    return _with_characters(folder, DREAM_SPECIALS, settings, DREAM_CHAT if options.chat else None)


def _mlp(name: str, width: int, inner: int) -> Shapes:
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    return {f"{name}.{part}_proj.weight": shape for part, shape in shapes.items()}


def _experts(config: dict[str, Any], width: int) -> Shapes:
    inner = config.get("moe_intermediate_size") or config["expert_intermediate_size"]
    shapes: Shapes = {"mlp.gate.weight": (config["num_experts"], width)}
    if config.get("moe_router_enable_expert_bias"):
        shapes["mlp.gate.expert_bias"] = (config["num_experts"],)
    for expert in range(config["num_experts"]):
        shapes |= _mlp(f"mlp.experts.{expert}", width, inner)
    return shapes | (_mlp("mlp.shared_experts", width, inner) if config.get("num_shared_experts") else {})


def write_mdlm(folder: str | Path, **given: Any) -> Path:
    """MDLM; as in the public folder, the tokenizer knows nothing of the mask, the last id."""
    options, overrides = _parted(given)
    config: dict[str, Any] = {"architectures": ["MDLM"], "model_type": "mdlm", "vocab_size": len(TINY_TEXT) + 2}
    config |= {"model_length": 64, "hidden_dim": 32, "cond_dim": 8, "n_blocks": 2, "n_heads": 4, "dropout": 0.1}
    config |= {"time_conditioning": False, **overrides}
    d, c, v = config["hidden_dim"], config["cond_dim"], config["vocab_size"]
    shapes: Shapes = {"vocab_embed.embedding": (v, d)}
    shapes |= {"sigma_map.mlp.0.weight": (c, 256), "sigma_map.mlp.0.bias": (c,)}
    shapes |= {"sigma_map.mlp.2.weight": (c, c), "sigma_map.mlp.2.bias": (c,)}
    for i in range(config["n_blocks"]):
        block: Shapes = {"norm1.weight": (d,), "norm2.weight": (d,)}
        block |= {"attn_qkv.weight": (3 * d, d), "attn_out.weight": (d, d)}
        block |= {"mlp.0.weight": (4 * d, d), "mlp.0.bias": (4 * d,), "mlp.2.weight": (d, 4 * d), "mlp.2.bias": (d,)}
        block |= {"adaLN_modulation.weight": (6 * d, c), "adaLN_modulation.bias": (6 * d,)}
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    shapes |= {"output_layer.norm_final.weight": (d,), "output_layer.linear.bias": (v,)}
    shapes |= {"output_layer.adaLN_modulation.weight": (2 * d, c), "output_layer.adaLN_modulation.bias": (2 * d,)}
    if not config.get("tie_word_embeddings"):
        shapes["output_layer.linear.weight"] = (v, d)
    weights = _draw(shapes, options, "vocab_embed.embedding", "output_layer.linear.weight")
    for i in range(config["n_blocks"]):
        gates = weights[f"blocks.{i}.adaLN_modulation.bias"].view(6, d)
        gates[2] += 1  # open gates, as training leaves them
        gates[5] += 1
    width = d // config["n_heads"]
    weights["rotary_emb.inv_freq"] = 10000.0 ** -(torch.arange(0, width, 2) / width)
    folder = _write(folder, config, {f"backbone.{k}": w for k, w in weights.items()}, options)
    return _with_characters(folder, ("<|endoftext|>",), {}, DREAM_CHAT if options.chat else None)


WRITERS = dict(mdlm=write_mdlm, llada=write_llada, illada=write_illada, llada_moe=write_llada_moe)
WRITERS |= dict(llada2_moe=write_llada2, dream=write_dream, sdar=write_sdar, sdar_moe=write_sdar_moe)
WRITERS |= dict(fast_dllm=write_fast_dllm, fast_dllm_llama=write_fast_dllm_llama)
WRITERS |= dict(stable_diffcoder=write_stable_diffcoder)


def byte_letter(character: str) -> str:
    """How a byte-level vocabulary writes one ASCII character."""
    return {" ": "Ġ", "\n": "Ċ"}.get(character, character)


def character_tokenizer(specials: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(BPE({byte_letter(c): i for i, c in enumerate(TINY_TEXT)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    return tokenizer


def _with_characters(folder: Path, specials: Sequence[str], settings: dict[str, str], chat: str | None) -> Path:
    character_tokenizer(specials).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", settings | ({} if chat is None else {"chat_template": chat}))
    return folder


def _draw(shapes: Shapes, options: Options, embedding: str, head: str) -> dict[str, torch.Tensor]:
    """Matrices that keep the scale of their input, attention sharper than that, norms near 1, small biases."""
    generator = torch.Generator().manual_seed(options.seed)
    scale = SPREAD / shapes[embedding][1] ** 0.5
    special = {embedding: 1.0 if head in shapes else scale, head: scale}
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name in special:
            noise = noise * special[name]
        elif len(shape) == 2:
            sharp = any(part in name for part in ("q_proj", "k_proj", "attn_qkv", "query_key_value"))
            noise = noise * (1.7 if sharp else 1.0) / shape[1] ** 0.5
        elif "norm" in name or "ln_f" in name:
            noise = 1 + 0.1 * noise
        else:
            noise = 0.1 * noise
        weights[name] = noise.to(options.dtype)
    return weights


def _write(folder: str | Path, config: dict[str, Any], weights: dict[str, torch.Tensor], options: Options) -> Path:
    folder, shards = Path(folder), options.shards
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    if options.generation is not None:
        write_json(folder / "generation_config.json", options.generation)
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        names = sorted(weights)[shard::shards]
        save_file({name: weights[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return folder


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
