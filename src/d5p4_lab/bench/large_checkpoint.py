"""A model of LLaDA-8B's shape with random weights: load time, peak host memory and time per step of its checkpoint.

    python -m d5p4_lab bench large_checkpoint FOLDER [LAYERS]

Writes the checkpoint (16 GB, shards of about 2 GB) to FOLDER first if it is not there. Other benchmarks take the same
shape from here, made where it runs (`random_model`).
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
from d5p4.provenance import machine

from ..timing import wall
from . import generate, make_parser

CONFIG: dict[str, Any] = {
    "model_type": "llada", "architectures": ["LLaDAModelLM"], "d_model": 4096, "n_heads": 32, "n_kv_heads": 32,
    "n_layers": 32, "mlp_hidden_size": 12288, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "vocab_size": 126464,
    "embedding_size": 126464, "max_sequence_length": 4096, "mask_token_id": 126336, "eos_token_id": 126081,
    "pad_token_id": 126081, "weight_tying": False,
}  # fmt: skip
TINY = CONFIG | {
    "d_model": 16, "n_heads": 2, "n_kv_heads": 2, "n_layers": 1, "mlp_hidden_size": 32, "vocab_size": 97,
    "embedding_size": 97, "mask_token_id": 96, "eos_token_id": 95, "pad_token_id": 95,
}  # fmt: skip
SHARD = 2 * 2**30


def random_model(config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> LLaDA:
    """A model of this shape with normal weights of variance 1 / fan-in, made where it will run."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = LLaDA(config)
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
    """A model that counts the rows its body is given. A replayed forward is not counted, so `recordable` says whether
    there may be any."""

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
    parser.add_argument("folder", type=Path, help="the checkpoint, written if it is not there")
    parser.add_argument("layers", type=int, nargs="?", default=CONFIG["n_layers"])
    options = parser.parse_args(arguments)
    if not (options.folder / "config.json").exists():
        context = multiprocessing.get_context("spawn")  # its memory must not count as ours
        process = context.Process(target=write, args=(options.folder, options.layers))
        process.start()
        process.join()
    before = peak_host()
    model, seconds = wall(lambda: d5p4.load(options.folder), torch.device("cpu"))
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e9:.2f} B parameters in {model.dtype} on {machine(model.device)}: loaded in "
          f"{seconds:.1f} s, host peak {before:.2f} -> {peak_host():.2f} GB")  # fmt: skip
    prompt, cuda = list(range(1000, 1128)), model.device.type == "cuda"
    cases: list[dict[str, Any]] = [{}, {"guidance": 2.0}, {"method": "independent"}, {"savings": False}]
    for case in cases:
        for steps in (2, 16):  # the first call warms up
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            settings = dict(k=4, w=4, gen_length=128, steps=steps, seed=0) | case
            result, seconds = wall(partial(generate, model, [prompt], **settings), model.device)
        memory = torch.cuda.max_memory_allocated() / 2**30 if cuda else float("nan")
        print(f"k=4 w=4, 128 + 128 tokens, {case or 'd5p4'}: {seconds / 16 * 1e3:.0f} ms a step, "
              f"{int(result.rows[0])} of {int(result.rows_nominal[0])} rows, {int(result.distinct[0])} distinct, "
              f"peak {memory:.1f} GiB")  # fmt: skip
