"""The sizes of models, and what follows from them: operations per token, time, memory, bytes to fetch.

The rate of one NVIDIA H200 comes from the committed benchmark, which timed whole decoding steps of LLaDA-8B's shape.
Narrower models use a GPU less well: the runs of `books` (width 320) reached about 110 TFLOP/s, which gives `NARROW`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from d5p4.models.checkpoint import read_json, weight_files
from d5p4.models.load import find, shipped

from ..bench import RESULTS, read_sections, rows_of
from ..scoring.encoder import DEFAULT as MINILM
from ..scoring.perplexity import SMOLLM2

if TYPE_CHECKING:
    from .setup import Setup

GB = 1e9
TOKENS = 1 << 17  # at most this many tokens per forward on a GPU; other devices use the default limit
LEAST_TOKENS = 1 << 12
ACTIVATIONS = 14  # bytes of activations per token / (width · bytes per number); 2.64 GB for 60 × 384 tokens, measured
HEAD_GB = 1.0  # the streamed head's own memory on a GPU
NARROW = 0.675  # the rate of a model of width D is proportional to D to this power, up to `WIDEST`
WIDEST = 4096
JUDGE = {"float32": 0.05, "bfloat16": 0.3}  # a judge's rate on a GPU, relative to decoding


@dataclass(frozen=True)
class Shape:
    """The size of a model."""

    layers: int
    width: int
    vocabulary: int
    parameters: float
    tables: int = 2  # how many matrices of vocabulary × width the parameters include: embedding and head
    carry_over: bool = False  # whether the head sees only masked positions, as in MDLM
    gated: bool = False  # whether the hub asks for a licence to be accepted
    stored: float = 2.0  # bytes per parameter in the files

    @property
    def head(self) -> float:
        return 2.0 * self.vocabulary * self.width

    def body(self, length: int) -> float:
        return 2 * self.parameters - self.tables * self.head + 4 * length * self.width * self.layers

    @property
    def fetched(self) -> float:
        return self.parameters * self.stored


LLADA = Shape(32, 4096, 126464, 8_015_581_184)
KNOWN = {  # the paper's models, and the two that come inside Python packages
    "kuleshov-group/mdlm-owt": Shape(12, 768, 50258, 169_627_218, 2, True, stored=4),
    "GSAI-ML/LLaDA-8B-Instruct": LLADA,
    "GSAI-ML/LLaDA-8B-Base": LLADA,
    "openai-community/gpt2-large": Shape(36, 1280, 50257, 774_030_080, 1, stored=4.2),
    "meta-llama/Meta-Llama-3-8B": Shape(32, 4096, 128256, 8_030_261_248, gated=True),
    "jinaai/jina-embeddings-v2-base-en": Shape(12, 768, 30528, 137_368_320, 1),
    SMOLLM2: Shape(30, 576, 49152, 134_515_008, 1),
    MINILM: Shape(6, 384, 30522, 22_713_216, 1),
}
WIDTHS = ("hidden_dim", "d_model", "hidden_size", "n_embd")
LAYERS = ("n_blocks", "n_layers", "num_hidden_layers", "n_layer")
VOCABULARIES = ("embedding_size", "vocab_size")


def is_local(name: str) -> bool:
    """Whether a model is in a folder of this machine or comes with a Python package."""
    return name in (SMOLLM2, MINILM) or shipped(name) is not None or Path(name).expanduser().is_dir()


@lru_cache(maxsize=32)
def shape_of(name: str) -> Shape | None:
    """Return the size of a model, or None if nothing is known about it. No weights are read, and nothing is fetched."""
    if is_local(name) and name not in KNOWN:
        return _shape_in(find(name))
    by_last = {known.rsplit("/", 1)[-1]: shape for known, shape in KNOWN.items()}
    return KNOWN.get(name) or by_last.get(name.rstrip("/").rsplit("/", 1)[-1])


def _shape_in(folder: Path) -> Shape | None:
    config = read_json(folder / "config.json")
    width, layers, vocabulary = (
        next((int(config[key]) for key in keys if config.get(key)), 0) for keys in (WIDTHS, LAYERS, VOCABULARIES)
    )
    if not (width and layers and vocabulary):
        return None
    sizes = []
    for file in weight_files(folder):
        with safe_open(file, framework="pt", device="cpu") as shard:
            sizes += [tuple(shard.get_slice(name).get_shape()) for name in shard.keys()]  # noqa: SIM118 (not a dict)
    parameters = sum(math.prod(size) for size in sizes)
    tables = sizes.count((vocabulary, width))  # a head that equals the embedding is not stored
    return Shape(layers, width, vocabulary, parameters, tables, config.get("model_type") == "mdlm")


# ---- time


GPU = "one NVIDIA H200 in bf16"


def seconds(operations: float, width: int, dtype: str | None = None) -> float:
    """The time of a GPU for operations of a model of this width; `dtype` is given if the model is a judge."""
    rate = _rate() * (min(width, WIDEST) / WIDEST) ** NARROW
    return operations / rate / (JUDGE.get(dtype, 0.05) if dtype else 1.0)


@lru_cache(maxsize=1)
def _rate() -> float:
    """Operations per second, from the committed step of 60 rows of 384 tokens (256 of them in the head)."""
    rows = rows_of(read_sections(RESULTS / "gpu.jsonl.xz"), "decode")
    ms = next(row["ours_ms"] for row in rows if row["what"] == "no duplicates")
    return (60 * 384 * LLADA.body(384) + 60 * 256 * LLADA.head) / (ms / 1e3)


# ---- memory


def decoding_memory(shape: Shape, tokens: int = TOKENS, size: int = 2) -> float:
    return shape.parameters * size + tokens * ACTIVATIONS * shape.width * size + HEAD_GB * GB


def judge_memory(shape: Shape, tokens: int, size: int) -> float:
    """Bytes on a GPU while a judge reads batches of `tokens` tokens and keeps all their logits."""
    return shape.parameters * size + tokens * (ACTIVATIONS * shape.width + shape.vocabulary) * size


def forward_tokens(setup: Setup) -> int:
    """The most tokens per forward on this GPU: `TOKENS`, halved until decoding fits into 90 % of the memory."""
    shape, memory = shape_of(setup.named), torch.cuda.get_device_properties(setup.torch_device).total_memory
    tokens = TOKENS
    while shape and tokens > LEAST_TOKENS and decoding_memory(shape, tokens, number_size(setup.dtype)) > 0.9 * memory:
        tokens //= 2
    return tokens


def number_size(dtype: str | None) -> int:
    """Bytes per number of a dtype; None means bfloat16, the default on a GPU."""
    sizes = {"float64": 8, "float32": 4, "fp64": 8, "fp32": 4}
    return sizes.get(str(dtype).removeprefix("torch."), 2)
