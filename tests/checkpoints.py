"""Writers of tiny random checkpoints in the public layouts of the architectures.

Each has two layers, a character tokenizer (`TINY_TEXT`) and logits with a spread of about 1.5, so that it behaves like
a trained model with opinions. Keyword arguments override config.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordPiece

TINY_TEXT = "abcdefghijklmnopqrstuvwxyz0123456789 \n.,?!'-:="
LLADA_SPECIALS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|mdm_mask|>",
)
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


def write_llada(
    folder: str | Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    chat: bool = False,
    generation: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """A LLaDA folder; its last two ids have no token."""
    size = len(TINY_TEXT) + len(LLADA_SPECIALS) + 2
    ids = {text: len(TINY_TEXT) + i for i, text in enumerate(LLADA_SPECIALS)}
    config: dict[str, Any] = {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "block_type": "llama",
        "activation_type": "silu",
        "layer_norm_type": "rms",
        "rope": True,
        "alibi": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "scale_logits": False,
        "input_emb_norm": False,
        "weight_tying": False,
        "d_model": 32,
        "n_heads": 4,
        "n_kv_heads": 4,
        "n_layers": 2,
        "mlp_hidden_size": 48,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "vocab_size": size,
        "embedding_size": size,
        "max_sequence_length": 128,
        "mask_token_id": ids["<|mdm_mask|>"],
        "eos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
        **overrides,
    }
    d, f, v = config["d_model"], config["mlp_hidden_size"], config["embedding_size"]
    kv = d // config["n_heads"] * config["n_kv_heads"]
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (v, d), "ln_f.weight": (d,)}
    for i in range(config["n_layers"]):
        block = {"attn_norm": (d,), "q_proj": (d, d), "k_proj": (kv, d), "v_proj": (kv, d), "attn_out": (d, d)}
        block |= {"ff_norm": (d,), "ff_proj": (f, d), "up_proj": (f, d), "ff_out": (d, f)}
        shapes |= {f"blocks.{i}.{name}.weight": shape for name, shape in block.items()}
        if config["include_qkv_bias"]:
            shapes |= {f"blocks.{i}.{name}_proj.bias": (block[f"{name}_proj"][0],) for name in "qkv"}
    if not config["weight_tying"]:
        shapes["ff_out.weight"] = (v, d)
    embedding_std = SPREAD / d**0.5 if config["weight_tying"] else 1.0
    weights = _draw(shapes, seed, dtype, {"wte.weight": embedding_std, "ff_out.weight": SPREAD / d**0.5})
    folder = _write(folder, config, {f"model.transformer.{k}": w for k, w in weights.items()}, shards, generation)
    _character_tokenizer(LLADA_SPECIALS).save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>"}
    _json(folder / "tokenizer_config.json", settings | ({"chat_template": LLADA_CHAT} if chat else {}))
    return folder


def write_dream(folder: str | Path, **options: Any) -> Path:
    """A Dream folder with Qwen2-style tokenizer files; its last two ids have no token."""
    names = {"architectures": ["DreamModel"], "model_type": "Dream"}
    return _write_qwen(folder, names, DREAM_SPECIALS, **options)


def write_sdar(folder: str | Path, **options: Any) -> Path:
    """An SDAR folder in blocks of 4; as in public ones, neither block length nor mask id need be in config.json."""
    names = {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "head_dim": 12, "mask_token_id": None}
    return _write_qwen(folder, names, SDAR_SPECIALS, **options)


def write_sdar_moe(folder: str | Path, **options: Any) -> Path:
    names = {"architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe", "block_size": 4}
    names |= {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True}
    return _write_qwen(folder, names, SDAR_SPECIALS, **options)


def write_fast_dllm(folder: str | Path, **options: Any) -> Path:
    """A folder of Fast-dLLM v2 in blocks of 4."""
    names = {"architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen", "bd_size": 4}
    return _write_qwen(folder, names, DREAM_SPECIALS, **options)


def write_llada_moe(folder: str | Path, **options: Any) -> Path:
    """A LLaDA-MoE folder, which calls itself a LLaDA in its model_type, with one dense layer."""
    names = {"architectures": ["LLaDAMoEModelLM"], "model_type": "llada", "qk_layernorm": True, "rms_norm_eps": 1e-5}
    names |= {"num_experts": 6, "num_experts_per_tok": 3, "expert_intermediate_size": 20, "norm_topk_prob": None}
    names |= {"moe_layer_freq": [0, 1], "dense_intermediate_size": 48, "partial_rotary_factor": 1}
    return _write_qwen(folder, names, DREAM_SPECIALS, **options)


def write_illada(folder: str | Path, **options: Any) -> Path:
    """An iLLaDA folder: LLaDA's weights, and the keys of transformers in config.json."""
    names = {"architectures": ["ILLaDAModelLM"], "model_type": "illada", "mask_token_id": None}
    folder = write_llada(folder, **{**names, "n_kv_heads": 2, "weight_tying": True, **options})
    config = json.loads((folder / "config.json").read_text())
    _json(folder / "config.json", {TRANSFORMERS_KEYS.get(key, key): value for key, value in config.items()})
    return folder


def _write_qwen(
    folder: str | Path,
    names: dict[str, Any],
    specials: tuple[str, ...],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    chat: bool = False,
    generation: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    size = len(TINY_TEXT) + len(specials) + 2
    ids = {text: len(TINY_TEXT) + i for i, text in enumerate(specials)}
    config: dict[str, Any] = {
        "hidden_act": "silu",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": size,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "max_position_embeddings": 128,
        "mask_token_id": ids[specials[-1]],
        "eos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
        **names,
        **overrides,
    }
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    width = config.get("head_dim") or d // config["num_attention_heads"]
    q, kv = width * config["num_attention_heads"], width * config["num_key_value_heads"]
    head_norms = config["model_type"].startswith("sdar") or config.get("qk_layernorm")
    sparse = [bool(config.get("num_experts"))] * config["num_hidden_layers"]
    if "moe_layer_freq" in config:
        sparse = [mark == 1 for mark in config["moe_layer_freq"]]
    sparse = [mark and i not in config.get("mlp_only_layers", ()) for i, mark in enumerate(sparse)]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    for i in range(config["num_hidden_layers"]):
        layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
        outputs = {"q": q, "k": kv, "v": kv}
        layer |= {f"self_attn.{name}_proj.weight": (n, d) for name, n in outputs.items()}
        if head_norms:
            layer |= {f"self_attn.{name}_norm.weight": (width,) for name in "qk"}
        else:
            layer |= {f"self_attn.{name}_proj.bias": (n,) for name, n in outputs.items()}
        layer |= {"self_attn.o_proj.weight": (d, q)}
        layer |= _experts(config, d) if sparse[i] else _mlp("mlp", d, f)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, d)
    embedding_std = SPREAD / d**0.5 if config["tie_word_embeddings"] else 1.0
    special = {"model.embed_tokens.weight": embedding_std, "lm_head.weight": SPREAD / d**0.5}
    folder = _write(folder, config, _draw(shapes, seed, dtype, special), shards, generation)
    _json(folder / "vocab.json", {byte_letter(c): i for i, c in enumerate(TINY_TEXT)})
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    _json(folder / "added_tokens.json", ids)
    decoder = {str(i): {"content": text, "special": True, "normalized": False} for text, i in ids.items()}
    settings: dict[str, Any] = {"tokenizer_class": "DreamTokenizer", "added_tokens_decoder": decoder}
    settings |= {"eos_token": "<|endoftext|>", "mask_token": specials[-1]}
    settings |= {"bos_token": "<|beginoftext|>"} if "<|beginoftext|>" in specials else {}
    _json(folder / "tokenizer_config.json", settings | ({"chat_template": DREAM_CHAT} if chat else {}))
    return folder


def write_llada2(
    folder: str | Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    chat: bool = False,
    generation: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """A LLaDA2 folder in blocks of 4: one dense layer, and one with 8 experts in 4 groups."""
    size = len(TINY_TEXT) + len(DREAM_SPECIALS) + 2
    ids = {text: len(TINY_TEXT) + i for i, text in enumerate(DREAM_SPECIALS)}
    config: dict[str, Any] = {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "hidden_act": "silu",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "moe_intermediate_size": 20,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
        "rotary_dim": 4,
        "rope_theta": 600000,
        "rms_norm_eps": 1e-6,
        "use_qk_norm": True,
        "use_bias": False,
        "use_qkv_bias": False,
        "norm_head": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 128,
        "vocab_size": size,
        "block_length": 4,
        "mask_token_id": ids["<|mask|>"],
        "eos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
        **overrides,
    }
    d, f, v, width = config["hidden_size"], config["intermediate_size"], config["vocab_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.word_embeddings.weight": (v, d), "model.norm.weight": (d,)}
    for i in range(config["num_hidden_layers"]):
        layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
        layer |= {"attention.query_key_value.weight": ((heads + 2 * kv) * width, d)}
        layer |= {f"attention.{name}_layernorm.weight": (width,) for name in ("query", "key")}
        layer |= {"attention.dense.weight": (d, heads * width)}
        layer |= _mlp("mlp", d, f) if i < config["first_k_dense_replace"] else _experts(config, d)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["lm_head.weight"] = (v, d)
    special = {"model.word_embeddings.weight": 1.0, "lm_head.weight": SPREAD / d**0.5}
    folder = _write(folder, config, _draw(shapes, seed, dtype, special), shards, generation)
    _character_tokenizer(DREAM_SPECIALS).save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"eos_token": "<|endoftext|>", "mask_token": "<|mask|>"}
    _json(folder / "tokenizer_config.json", settings | ({"chat_template": DREAM_CHAT} if chat else {}))
    return folder


def _mlp(name: str, width: int, inner: int) -> dict[str, tuple[int, ...]]:
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    return {f"{name}.{part}_proj.weight": shape for part, shape in shapes.items()}


def _experts(config: dict[str, Any], width: int) -> dict[str, tuple[int, ...]]:
    inner = config.get("moe_intermediate_size") or config["expert_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (config["num_experts"], width)}
    if config.get("moe_router_enable_expert_bias"):
        shapes["mlp.gate.expert_bias"] = (config["num_experts"],)
    for expert in range(config["num_experts"]):
        shapes |= _mlp(f"mlp.experts.{expert}", width, inner)
    return shapes | (_mlp("mlp.shared_experts", width, inner) if config.get("num_shared_experts") else {})


def write_mdlm(
    folder: str | Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    chat: bool = False,
    generation: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """An MDLM folder; as in the public one, the tokenizer knows nothing of the mask, the last id."""
    size = len(TINY_TEXT) + 2
    config: dict[str, Any] = {
        "architectures": ["MDLM"],
        "model_type": "mdlm",
        "vocab_size": size,
        "model_length": 64,
        "hidden_dim": 32,
        "cond_dim": 8,
        "n_blocks": 2,
        "n_heads": 4,
        "dropout": 0.1,
        "time_conditioning": False,
        **overrides,
    }
    d, c, v = config["hidden_dim"], config["cond_dim"], config["vocab_size"]
    tied = config.get("tie_word_embeddings", False)
    shapes: dict[str, tuple[int, ...]] = {"vocab_embed.embedding": (v, d)}
    shapes |= {"sigma_map.mlp.0.weight": (c, 256), "sigma_map.mlp.0.bias": (c,)}
    shapes |= {"sigma_map.mlp.2.weight": (c, c), "sigma_map.mlp.2.bias": (c,)}
    for i in range(config["n_blocks"]):
        block: dict[str, tuple[int, ...]] = {"norm1.weight": (d,), "norm2.weight": (d,)}
        block |= {"attn_qkv.weight": (3 * d, d), "attn_out.weight": (d, d)}
        block |= {"mlp.0.weight": (4 * d, d), "mlp.0.bias": (4 * d,), "mlp.2.weight": (d, 4 * d), "mlp.2.bias": (d,)}
        block |= {"adaLN_modulation.weight": (6 * d, c), "adaLN_modulation.bias": (6 * d,)}
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    shapes |= {"output_layer.norm_final.weight": (d,), "output_layer.linear.bias": (v,)}
    shapes |= {"output_layer.adaLN_modulation.weight": (2 * d, c), "output_layer.adaLN_modulation.bias": (2 * d,)}
    if not tied:
        shapes["output_layer.linear.weight"] = (v, d)
    special = {"vocab_embed.embedding": SPREAD / d**0.5 if tied else 1.0}
    special |= {"output_layer.linear.weight": SPREAD / d**0.5}
    weights = _draw(shapes, seed, dtype, special)
    for i in range(config["n_blocks"]):
        gates = weights[f"blocks.{i}.adaLN_modulation.bias"].view(6, d)
        gates[2] += 1  # open gates, as training leaves them
        gates[5] += 1
    width = d // config["n_heads"]
    weights["rotary_emb.inv_freq"] = 10000.0 ** -(torch.arange(0, width, 2) / width)
    folder = _write(folder, config, {f"backbone.{k}": w for k, w in weights.items()}, shards, generation)
    _character_tokenizer(("<|endoftext|>",)).save(str(folder / "tokenizer.json"))
    _json(folder / "tokenizer_config.json", {"chat_template": DREAM_CHAT} if chat else {})
    return folder


WRITERS = {
    "mdlm": write_mdlm,
    "llada": write_llada,
    "illada": write_illada,
    "llada_moe": write_llada_moe,
    "llada2_moe": write_llada2,
    "dream": write_dream,
    "sdar": write_sdar,
    "sdar_moe": write_sdar_moe,
    "fast_dllm": write_fast_dllm,
}


def write_gpt2(folder: str | Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A causal judge in the layout of GPT-2 (large has n_embd 1280, n_layer 36, n_head 20, n_positions 1024)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    codec = _character_tokenizer(("<|endoftext|>",))
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, **overrides}
    end = codec.token_to_id("<|endoftext|>")
    config = GPT2Config(vocab_size=codec.get_vocab_size(), bos_token_id=end, eos_token_id=end, **shape)
    folder = _save_judge(Path(folder), GPT2LMHeadModel, config, codec, seed, ("<|endoftext|>", "<|endoftext|>"))
    file = folder / "model.safetensors"  # the public files name the weights without a prefix
    save_file({k.removeprefix("transformer."): w for k, w in load_file(file).items()}, file, {"format": "pt"})
    return folder


def write_llama3(folder: str | Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A causal judge in the layout of Llama-3 (8B has width 4096, 32 layers, 32 heads, 8 of keys and values)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    codec = _character_tokenizer(("<|begin_of_text|>", "<|end_of_text|>"))
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False, **overrides}
    config = LlamaConfig(vocab_size=codec.get_vocab_size(), **shape)
    return _save_judge(Path(folder), LlamaForCausalLM, config, codec, seed, ("<|begin_of_text|>", "<|end_of_text|>"))


def _save_judge(folder: Path, kind: Any, config: Any, codec: Tokenizer, seed: int, ends: tuple[str, str]) -> Path:
    torch.manual_seed(seed)
    config.initializer_range = 0.5
    kind(config).bfloat16().save_pretrained(folder, max_shard_size="8KB" if "Llama" in kind.__name__ else "1GB")
    codec.save(str(folder / "tokenizer.json"))
    names = {"bos_token": ends[0], "eos_token": ends[1], "tokenizer_class": "PreTrainedTokenizerFast"}
    _json(folder / "tokenizer_config.json", names)
    return folder


def write_jina(folder: str | Path, *, seed: int = 0, prefix: str = "", **overrides: Any) -> Path:
    """An encoder in the layout of jina-embeddings-v2-base-en (width 768, 12 layers, 12 heads); needs no own code here.

    Weights are in half precision, as they are there. Keyword arguments override config.json.
    """
    folder = Path(folder)
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = [
        *specials,
        *TINY_TEXT.replace("\n", "").replace(" ", ""),
        *(f"##{c}" for c in TINY_TEXT if not c.isspace()),
    ]
    codec = Tokenizer(WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    codec.normalizer = normalizers.BertNormalizer(lowercase=True)
    codec.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    codec.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    code = "jinaai/jina-bert-implementation--"
    config: dict[str, Any] = {
        "_name_or_path": "jinaai/jina-bert-implementation",
        "model_max_length": 8192,
        "architectures": ["JinaBertForMaskedLM"],
        "auto_map": {
            "AutoConfig": f"{code}configuration_bert.JinaBertConfig",
            "AutoModel": f"{code}modeling_bert.JinaBertModel",
        },
        "hidden_act": "gelu",
        "hidden_size": 12,
        "intermediate_size": 20,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 64,
        "model_type": "bert",
        "num_attention_heads": 3,  # as with 12 heads, not a power of two
        "num_hidden_layers": 2,
        "position_embedding_type": "alibi",
        "type_vocab_size": 2,
        "vocab_size": len(words),
        "feed_forward_type": "geglu",
        "emb_pooler": "mean",
        **overrides,
    }
    d, f = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"embeddings.word_embeddings.weight": (len(words), d)}
    shapes |= {"embeddings.token_type_embeddings.weight": (2, d), "embeddings.LayerNorm.weight": (d,)}
    shapes |= {"embeddings.LayerNorm.bias": (d,), "pooler.dense.weight": (d, d), "pooler.dense.bias": (d,)}
    for i in range(config["num_hidden_layers"]):
        block: dict[str, tuple[int, ...]] = {"mlp.gated_layers.weight": (2 * f, d), "mlp.wo.weight": (d, f)}
        block |= {f"attention.self.{name}.weight": (d, d) for name in ("query", "key", "value")}
        block |= {"attention.output.dense.weight": (d, d), "attention.output.LayerNorm.weight": (d,)}
        block |= {"mlp.layernorm.weight": (d,)}
        block |= {name.replace(".weight", ".bias"): (s[0],) for name, s in block.items() if "gated" not in name}
        shapes |= {f"encoder.layer.{i}.{name}": shape for name, shape in block.items()}
    source = torch.Generator().manual_seed(seed)
    weights = {
        prefix + name: (torch.randn(shape, generator=source) * 0.5 + float("orm.weight" in name)).half()
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    _json(folder / "config.json", config)
    save_file(weights, folder / "model.safetensors")
    codec.save(str(folder / "tokenizer.json"))
    _json(folder / "tokenizer_config.json", {"model_max_length": 2147483648, "tokenizer_class": "BertTokenizer"})
    return folder


def byte_letter(character: str) -> str:
    """How a byte-level vocabulary writes one ASCII character."""
    return {" ": "Ġ", "\n": "Ċ"}.get(character, character)


def _character_tokenizer(specials: tuple[str, ...]) -> Tokenizer:
    tokenizer = Tokenizer(BPE({byte_letter(c): i for i, c in enumerate(TINY_TEXT)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    return tokenizer


def _draw(
    shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype, special: dict[str, float]
) -> dict[str, torch.Tensor]:
    """Matrices that keep the scale of their input, attention sharper than that, norms near 1, small biases."""
    generator = torch.Generator().manual_seed(seed)
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
        weights[name] = noise.to(dtype)
    return weights


def _write(
    folder: str | Path,
    config: dict[str, Any],
    weights: dict[str, torch.Tensor],
    shards: int,
    generation: dict[str, Any] | None,
) -> Path:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _json(folder / "config.json", config)
    if generation is not None:
        _json(folder / "generation_config.json", generation)
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        names = sorted(weights)[shard::shards]
        save_file({name: weights[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    _json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return folder


def _json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
