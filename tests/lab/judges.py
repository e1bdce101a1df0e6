"""Writers of tiny causal judges and encoders in public layouts, for the scores of the lab."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece

from tests.checkpoints import TINY_TEXT, character_tokenizer, write_json


def write_gpt2(folder: str | Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A causal judge in the layout of GPT-2 (large has n_embd 1280, n_layer 36, n_head 20, n_positions 1024)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    codec = character_tokenizer(("<|endoftext|>",))
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

    codec = character_tokenizer(("<|begin_of_text|>", "<|end_of_text|>"))
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
    write_json(folder / "tokenizer_config.json", names)
    return folder


def write_jina(folder: str | Path, **overrides: Any) -> Path:
    """An encoder in half precision in the layout of jina-embeddings-v2-base-en (width 768, 12 layers, 12 heads)."""
    folder = Path(folder)
    letters = [c for c in TINY_TEXT if not c.isspace()]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{c}" for c in letters)]
    codec = Tokenizer(WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    codec.normalizer = normalizers.BertNormalizer(lowercase=True)
    codec.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    codec.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    config: dict[str, Any] = {
        "model_max_length": 8192,
        "architectures": ["JinaBertForMaskedLM"],
        "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
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
    source = torch.Generator().manual_seed(0)
    weights = {
        name: (torch.randn(shape, generator=source) * 0.5 + float("orm.weight" in name)).half()
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    save_file(weights, folder / "model.safetensors")
    codec.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"model_max_length": 2147483648, "tokenizer_class": "BertTokenizer"})
    return folder
