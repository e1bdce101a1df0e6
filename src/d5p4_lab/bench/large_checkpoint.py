"""Load and decode a checkpoint of LLaDA-8B's shape with random weights: load time, peak host memory, time a step.

    python benchmarks/large_checkpoint.py FOLDER [LAYERS]

Writes the checkpoint (16 GB, shards of about 2 GB) to FOLDER first if it is not there.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file

import d5p4
from d5p4.models.llada import LLaDA

CONFIG = {
    "model_type": "llada", "architectures": ["LLaDAModelLM"], "d_model": 4096, "n_heads": 32, "n_kv_heads": 32,
    "n_layers": 32, "mlp_hidden_size": 12288, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "vocab_size": 126464,
    "embedding_size": 126464, "max_sequence_length": 4096, "mask_token_id": 126336, "eos_token_id": 126081,
    "pad_token_id": 126081, "weight_tying": False,
}  # fmt: skip
SHARD = 2 * 2**30


def write(folder: Path, layers: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | {"n_layers": layers}
    with torch.device("meta"):
        shapes = {LLaDA.prefix + name: p.shape for name, p in LLaDA(config).named_parameters()}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shard: dict[str, torch.Tensor] = {}
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


def main(folder: Path, layers: int) -> None:
    if not (folder / "config.json").exists():
        import multiprocessing

        process = multiprocessing.get_context("spawn").Process(target=write, args=(folder, layers))
        process.start()
        process.join()
    before, began = peak_host(), time.perf_counter()
    model = d5p4.load(folder)
    seconds = time.perf_counter() - began
    parameters = sum(p.numel() for p in model.parameters())
    where = torch.cuda.get_device_name() if model.device.type == "cuda" else "CPU"
    print(f"{parameters / 1e9:.2f} B parameters in {model.dtype} on {where}: loaded in {seconds:.1f} s, "
          f"host peak {before:.2f} -> {peak_host():.2f} GB")  # fmt: skip
    prompt = list(range(1000, 1128))
    warnings.simplefilter("ignore", d5p4.DuplicateAnswers)
    for options in ({}, {"guidance": 2.0}, {"method": "independent"}, {"savings": False}):
        for steps in (2, 16):  # the first call warms up
            if model.device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            settings = dict(k=4, w=4, gen_length=128, steps=steps, seed=0) | options
            result = d5p4.generate(model, [prompt], **settings)
            seconds = time.perf_counter() - began
        memory = torch.cuda.max_memory_allocated() / 2**30 if model.device.type == "cuda" else float("nan")
        print(f"k=4 w=4, 128 + 128 tokens, {options or 'd5p4'}: {seconds / 16 * 1e3:.0f} ms a step, "
              f"{int(result.rows[0])} of {int(result.rows_nominal[0])} rows, {int(result.distinct[0])} distinct, "
              f"peak {memory:.1f} GiB")  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 32)
