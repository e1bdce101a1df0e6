"""Time and memory of one step by stage: forward, selection, sampling.

Two sources. The GPU benchmark (`d5p4_lab.bench.gpu`: run anew, or its committed results) has whole steps at
the paper's size, the paper's way and ours. What it lacks is the paper's *Baseline*, which draws every row of the pool
for itself; so the stages after the forward are also timed here, the three ways, on the machine at hand. On a CPU ours
are the plain versions, float64 and meant to be exact rather than fast.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from d5p4.errors import D5P4Error
from d5p4.kernel import additive
from d5p4.ops.gram import pool_gram
from d5p4.ops.partition_map import partition_map
from d5p4.ops.sample import draw_logits
from d5p4.ops.vocab import row_stats
from d5p4.quality import normalise
from d5p4.rng import mix, uniform

from .. import bench
from ..baseline import BETA
from ..baseline import sample as draw_as_the_paper
from ..baseline import select as baseline_select
from ..timing import clock, measured, one_thread
from .cost_drawing import INDEPENDENT, OURS, THEIRS, drawing
from .drawing import Drawing
from .setup import Experiment, Setup
from .store import JsonLines, read_json, write_json

RESULTS = bench.RESULTS / "gpu.json"
SECTIONS = ("machine", "solver", "mmr", "step", "body", "decode")


def benchmark_results() -> dict[str, Any] | None:
    """The committed results of the GPU benchmark."""
    return bench.read(RESULTS) or None


def measure(setup: Setup) -> None:
    """benchmark.json: whole steps. rows.jsonl: the stages after the forward, one row a repeat."""
    setup.progress(0.0, "the GPU benchmark")
    if setup["from_results"]:
        results = benchmark_results()
        if results is None:
            raise D5P4Error(f"{RESULTS} is not here; with --set from_results=false it is measured anew")
        kept = {name: results["sections"][name] for name in SECTIONS if name in results["sections"]}
        write_json(_benchmark(setup), results | {"sections": kept, "targets": []})
    else:
        _run_benchmark(setup)
    lines = _rows(setup)
    with one_thread(setup.torch_device):
        for repeat in range(setup["repeats"]):
            if repeat not in lines:
                setup.progress(0.5 + 0.5 * repeat / setup["repeats"], "stages after the forward")
                lines.add(repeat, {"machine": clock(setup.torch_device), "stages": _stages(setup)})
    setup.progress(1.0, f"{setup['repeats']} repeats")


def _benchmark(setup: Setup) -> Path:
    return setup.folder / "benchmark.json"


def _rows(setup: Setup) -> JsonLines:
    return setup.measured("rows", **{name: setup[name] for name in ("k", "w", "length", "vocabulary", "width")})


def _run_benchmark(setup: Setup) -> None:
    """The GPU benchmark as it is, told on stderr; small sizes where there is no GPU."""
    from ..bench import gpu

    out, device = _benchmark(setup).resolve(), setup.torch_device
    wanted = [name for name in setup["sections"] if name not in _held(out)]
    if not wanted:
        return
    words = ["--sections", ",".join(wanted), "--out", str(out), "--device", str(device)]
    words += ["--figure", str(out.with_name("benchmark.svg"))] + ([] if device.type == "cuda" else ["--small"])
    with redirect_stdout(sys.stderr):
        gpu.main(words)


def _held(file: Path) -> set[str]:
    """Sections that were measured without an error."""
    if not file.is_file():
        return set()
    sections = read_json(file)["sections"]
    return {name for name, section in sections.items() if "error" not in section}


select_as_the_paper = partial(baseline_select, beta=BETA)


def select_as_ours(logits: Tensor, states: Tensor, k: int) -> Tensor:
    """Parents [k], entropies in one pass over the logits, local search from k starts."""
    banned = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    entropy = row_stats(logits.flatten(0, 1), banned, ("entropy",))["entropy"].view(logits.shape[:2])
    quality = normalise(-entropy.mean(-1)[None], "minmax", "entropy", logits.shape[-1])
    similarity = pool_gram(states, torch.arange(len(states), device=states.device)[None])
    return partition_map(additive(quality, similarity, BETA).to(similarity.dtype), k, None, quality)[0]


def draw_as_ours(logits: Tensor, parents: Tensor, draws: int) -> Tensor:
    """Tokens [k * L, draws] from keyed uniforms, no copy of the logits."""
    length = logits.shape[1]
    rows = (parents[:, None] * length + torch.arange(length, device=logits.device)).flatten()
    u = uniform(mix(rows[:, None], 1), torch.arange(draws, device=logits.device))
    banned = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    return draw_logits(logits.flatten(0, 1), banned, u, rows=rows)[0]


def _stages(setup: Setup) -> dict[str, dict[str, float]]:
    """ms and GB of the stages of each way, on the same made-up logits."""
    k, w, device = setup["k"], setup["w"], setup.torch_device
    length, vocabulary, width = setup["length"], setup["vocabulary"], setup["width"]
    source = torch.Generator(device=device).manual_seed(setup.seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    logits = torch.randn(k * w, length, vocabulary, generator=source, device=device, dtype=dtype)
    states = torch.randn(k * w, length, width, generator=source, device=device, dtype=dtype)

    parents, select_ms, select_gb = measured(lambda: select_as_the_paper(logits, states, k), device)
    _, draw_ms, draw_gb = measured(lambda: draw_as_the_paper(logits[parents], w), device)
    theirs = {"selection": select_ms, "sampling": draw_ms, "gb": max(select_gb, draw_gb)}
    parents, select_ms, select_gb = measured(lambda: select_as_ours(logits, states, k), device)
    _, draw_ms, draw_gb = measured(lambda: draw_as_ours(logits, parents, w), device)
    ours = {"selection": select_ms, "sampling": draw_ms, "gb": max(select_gb, draw_gb)}
    _, draw_ms, draw_gb = measured(lambda: draw_as_the_paper(logits, 1), device)
    return {INDEPENDENT: {"selection": 0.0, "sampling": draw_ms, "gb": draw_gb}, THEIRS: theirs, OURS: ours}


def draw(setup: Setup) -> Drawing:
    file = _benchmark(setup)
    if not file.is_file():
        raise D5P4Error(f"{file.name} is not in {setup.folder}; run the decode stage first")
    rows = list(_rows(setup))
    if not rows:
        raise D5P4Error(f"rows.jsonl is not in {setup.folder}; run the decode stage first")
    size = f"{setup['k']}×{setup['w']}, {setup['length']} tokens, vocabulary {setup['vocabulary']}"
    return drawing(read_json(file), rows, size)


_BOX = {
    "from_results": True, "sections": ["step", "decode"], "repeats": 15, "k": 6, "w": 10, "length": 32,
    "vocabulary": 8192, "width": 256,
}  # fmt: skip

EXPERIMENT = Experiment(
    name="cost",
    title="Time and memory of one step by stage",
    paper="Table scalability (left)",
    settings={
        "box": _BOX,
        "paper": _BOX | {"from_results": False, "length": 256, "vocabulary": 126464, "width": 4096, "sections": [
            "solver", "mmr", "step", "decode",
        ]},
    },
    measure=measure,
    draw=draw,
)  # fmt: skip
