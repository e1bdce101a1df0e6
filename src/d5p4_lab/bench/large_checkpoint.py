"""Measure the load time, peak host memory and time per step of a checkpoint with LLaDA-8B's shape and random weights.

    python -m d5p4_lab bench large_checkpoint FOLDER [LAYERS]

If FOLDER has no checkpoint, the program writes one first (16 GB in shards of about 2 GB). Other benchmarks use
`random_model`, which makes a model of this shape directly on the device.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import d5p4
from d5p4.models.llada import LLaDA
from d5p4.models.load import ARCHITECTURES
from d5p4.provenance import machine

from ..timing import wall
from . import generate, make_parser


def _config(width: int, heads: int, layers: int, inner: int, vocabulary: int, mask: int, end: int) -> dict[str, Any]:
    """Return the content of a config.json of LLaDA with these sizes and token ids."""
    sizes = {"d_model": width, "n_heads": heads, "n_kv_heads": heads, "n_layers": layers, "mlp_hidden_size": inner}
    sizes |= {"vocab_size": vocabulary, "embedding_size": vocabulary, "max_sequence_length": 4096}
    ids = {"mask_token_id": mask, "eos_token_id": end, "pad_token_id": end}
    rest = {"rope_theta": 500000.0, "rms_norm_eps": 1e-5, "weight_tying": False}
    return {"model_type": "llada", "architectures": ["LLaDAModelLM"], **sizes, **ids, **rest}


def _sdar(width: int, heads: int, layers: int, inner: int, vocabulary: int, ids: Sequence[int]) -> dict[str, Any]:
    """Return the content of a config.json of SDAR with these sizes, four query heads per key head, and the token ids of
    the mask and of the end."""
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": heads // 4}
    sizes |= {"head_dim": width // heads, "num_hidden_layers": layers, "intermediate_size": inner}
    sizes |= {"vocab_size": vocabulary, "max_position_embeddings": 32768}
    rest = {"mask_token_id": ids[0], "eos_token_id": ids[1], "rope_theta": 1e6, "rms_norm_eps": 1e-6}
    return {"model_type": "sdar", "architectures": ["SDARForCausalLM"], "tie_word_embeddings": False, **sizes, **rest}


CONFIG = _config(4096, 32, 32, 12288, 126464, 126336, 126081)
TINY = _config(16, 2, 1, 32, 97, 96, 95)
SDAR = _sdar(4096, 32, 36, 12288, 151936, (151669, 151643))  # SDAR-8B
TINY_SDAR = _sdar(16, 4, 1, 32, 97, (96, 95))
SHARD = 2 * 2**30


def random_model(config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Make a model with the shape in `config` on the device. Its weights are normal with variance 1 / fan-in."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = ARCHITECTURES[config["model_type"]](config)
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    model.settle(dtype)
    model.attach("random", None, {})
    return model


class Counted:
    """A model that counts the rows through its body. `recordable` allows CUDA graphs, whose replays are not counted."""

    def __init__(self, model: Any, recordable: bool = False) -> None:
        self.model, self.rows = model, 0
        self.recordable = recordable and model.recordable

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def body(self, tokens: Tensor, attention_mask: Tensor | None = None) -> d5p4.Hidden:
        self.rows += len(tokens)
        return self.model.body(tokens, attention_mask)


def write(folder: Path, layers: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | {"n_layers": layers}
    with torch.device("meta"):
        shapes = {LLaDA.prefix + name: p.shape for name, p in LLaDA(config).named_parameters()}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shard: dict[str, Tensor] = {}
    index: dict[str, str] = {}
    number, size = 0, 0
    for name, shape in shapes.items():
        scale = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
        values = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, device=device) * scale
        shard[name] = values.to(torch.bfloat16).cpu()
        size += shard[name].numel() * 2
        index[name] = f"model-{number:05d}.safetensors"
        if size >= SHARD or name == list(shapes)[-1]:
            save_file(shard, folder / index[name])
            shard, number, size = {}, number + 1, 0
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {f"t{i}": i for i in range(126464) if i != 126336} | {"<|mdm_mask|>": 126336}
    words = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": words}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def peak_host() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("large_checkpoint", __doc__)
    parser.add_argument("folder", type=Path, help="the folder of the checkpoint; a missing checkpoint is written first")
    parser.add_argument("layers", type=int, nargs="?", default=CONFIG["n_layers"])
    options = parser.parse_args(arguments)
    if not (options.folder / "config.json").exists():
        context = multiprocessing.get_context("spawn")  # writing in a new process keeps its memory out of our peak
        process = context.Process(target=write, args=(options.folder, options.layers))
        process.start()
        process.join()
    before = peak_host()
    model, seconds = wall(lambda: d5p4.load(options.folder), torch.device("cpu"))
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e9:.2f} B parameters in {model.dtype} on {machine(model.device)}")
    print(f"loaded in {seconds:.1f} s, host peak {before:.2f} -> {peak_host():.2f} GB")
    prompt, cuda = list(range(1000, 1128)), model.device.type == "cuda"
    cases: list[dict[str, Any]] = [{}, {"guidance": 2.0}, {"method": "independent"}, {"savings": False}]
    for case in cases:
        for steps in (2, 16):  # the call with 2 steps is a warm-up
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            settings = dict(k=4, w=4, gen_length=128, steps=steps, seed=0) | case
            result, seconds = wall(partial(generate, model, [prompt], **settings), model.device)
        memory = torch.cuda.max_memory_allocated() / 2**30 if cuda else float("nan")
        rows = f"{int(result.rows[0])} of {int(result.rows_nominal[0])} rows, {int(result.distinct[0])} distinct"
        time = f"{seconds / 16 * 1e3:.0f} ms per step"
        print(f"k=4 w=4, 128 + 128 tokens, {case or 'd5p4'}: {time}, {rows}, peak {memory:.1f} GiB")
