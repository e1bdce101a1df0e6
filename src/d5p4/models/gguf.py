"""Reads a GGUF file, llama.cpp's format: its weights, its tokenizer, and the keys of config.json that it knows.

Weights have the names of the public checkpoint and are float32, whatever their stored kind is. A rotation pairs rows i
and i + d/2 of a head of width d. llama.cpp stores the two rows of a pair side by side, and here they are put back.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

from ..errors import D5P4Error
from .checkpoint import refusing
from .tokenizer import Tokenizer

INSTALL = "pip install 'd5p4[gguf]'"
ARCHITECTURE = "llama"  # as general.architecture says
# Keys of config.json, and the metadata that have their values.
KEYS = dict(hidden_size="embedding_length", num_hidden_layers="block_count", intermediate_size="feed_forward_length")
KEYS |= dict(num_attention_heads="attention.head_count", num_key_value_heads="attention.head_count_kv")
KEYS |= dict(rms_norm_eps="attention.layer_norm_rms_epsilon", rope_theta="rope.freq_base", vocab_size="vocab_size")
KEYS |= dict(max_position_embeddings="context_length")
NAMES = dict(token_embd="model.embed_tokens", output_norm="model.norm", output="lm_head")
PARTS = {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"} | dict(attn_output="self_attn.o_proj")
PARTS |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
PARTS |= dict(attn_norm="input_layernorm", ffn_norm="post_attention_layernorm")
PAIRED = dict(attn_q="num_attention_heads", attn_k="num_key_value_heads")  # parts with rows in pairs, and their heads
NAMED = dict(bos_token="bos", eos_token="eos", unk_token="unknown", pad_token="padding")
CONTROL, USER = 3, 4  # kinds of tokens: special ones, and others that are found in a text before it is split


class GGUF:
    """An open GGUF file. `keys`, `get_slice` and `get_tensor` are those of an open safetensors file."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ModuleNotFoundError as missing:
            raise D5P4Error(f"{path} can only be read with the package {missing.name}: {INSTALL}") from None

        class Reader(gguf.GGUFReader):
            """Reads the header in half the time, because a plain array makes slices faster than a mapped one."""

            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, np.asarray(value) if name == "data" else value)

        self.path, self.dequantise = path, gguf.dequantize
        with refusing(f"{path} is not a complete GGUF file", "fetch it again"):
            self.reader = Reader(path)
        if (kind := self.fact("general.architecture")) != ARCHITECTURE:
            raise D5P4Error(f"{path} holds a model of the architecture {kind!r}, but d5p4 reads {ARCHITECTURE!r} only")
        self.tensors = {_public_name(tensor.name): tensor for tensor in self.reader.tensors}
        self.config = {key: self.fact(f"{ARCHITECTURE}.{name}") for key, name in KEYS.items()}
        self.config |= {f"{name}_id": self.fact(f"tokenizer.ggml.{key}_token_id") for name, key in NAMED.items()}
        self.config |= {"model_type": ARCHITECTURE, "tie_word_embeddings": "lm_head.weight" not in self.tensors}

    def __str__(self) -> str:
        return str(self.path)

    def fact(self, name: str) -> Any:
        """Return a value of the metadata, or None if the file does not have it."""
        field = self.reader.fields.get(name)
        return None if field is None else field.contents()

    def keys(self) -> list[str]:
        return list(self.tensors)

    def get_slice(self, name: str) -> Any:
        shape = self.tensors[name].shape.tolist()[::-1]
        return SimpleNamespace(get_shape=lambda: shape, get_dtype=lambda: "F32")

    def get_tensor(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        with refusing(f"{tensor.name} in {self.path} cannot be read"):
            values = np.require(self.dequantise(tensor.data, tensor.tensor_type), np.float32, "W")
        heads = self.config.get(PAIRED.get(tensor.name.split(".")[-2], ""))
        weight = torch.from_numpy(values)
        return weight if heads is None else weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, which must be a byte-level BPE: GPT-2's, or SmolLM's, where every digit is a token."""
        model, split = (self.fact(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
        if model != "gpt2" or split not in ("gpt-2", "smollm"):
            reason = f"has a tokenizer of the kind {model!r} that splits text like {split!r}, which d5p4 does not read"
            raise D5P4Error(f"{self.path} {reason}: pass tokenizer=")
        with refusing(f"the tokenizer in {self.path} cannot be read", "fetch the file again"):
            texts, merges, kinds = (self.fact(f"tokenizer.ggml.{name}") for name in ("tokens", "merges", "token_type"))
            ids = {text: i for i, text in enumerate(texts)}
            backend = tokenizers.Tokenizer(BPE(ids, [tuple(merge.split(" ")) for merge in merges]))
            digits = [pre_tokenizers.Digits(individual_digits=True)] if split == "smollm" else []
            letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
            backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence([*digits, letters]), decoders.ByteLevel()
            added = [pair for pair in zip(texts, kinds, strict=True) if pair[1] in (CONTROL, USER)]
            backend.add_tokens([AddedToken(text, special=kind == CONTROL, normalized=False) for text, kind in added])
            named = {name: texts[i] for name in NAMED if (i := self.config[f"{name}_id"]) is not None}
        return Tokenizer(backend, chat_template=self.fact("tokenizer.chat_template"), named=named)


def _public_name(name: str) -> str:
    """Return the name in the public checkpoint for llama.cpp's name, or the name itself if it is not known."""
    parts = name.split(".")
    if len(parts) == 4 and parts[2] in PARTS:
        return f"model.layers.{parts[1]}.{PARTS[parts[2]]}.{parts[3]}"
    return f"{NAMES[parts[0]]}.{parts[1]}" if len(parts) == 2 and parts[0] in NAMES else name
