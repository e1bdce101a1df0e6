"""Measures the time and memory of each stage of a decoding step: forward, selection, sampling.

The figures have two sources. The first source is the GPU benchmark (`python -m d5p4_lab bench gpu`): a new run, or its
committed results. The benchmark times whole steps at the paper's size in two ways: as the paper computes a step, and
as this library does. The benchmark does not time the paper's *Baseline*, which draws tokens for every row of the pool.
So the second source is this module: it times selection and sampling in all three ways, on the machine that runs the
experiment. On a CPU, the operations of this library compute in float64 and are made to be exact rather than fast.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from d5p4.decode.measures import normalise
from d5p4.errors import D5P4Error
from d5p4.methods.dpp import dpp_kernel
from d5p4.ops.gram import pool_gram
from d5p4.ops.partition_map import partition_map
from d5p4.rng import mix, uniform
from d5p4.store import read_json

from .. import bench
from ..baseline import BETA
from ..baseline import sample as draw_as_the_paper
from ..baseline import select as baseline_select
from ..bench import gpu
from ..stored_logits import draw_logits, row_stats
from ..timing import clock, measured, one_thread
from .cost_drawing import INDEPENDENT, OURS, THEIRS, drawing
from .drawing import Drawing
from .rows import Row, Source, complete
from .setup import Experiment, Setup

RESULTS = bench.RESULTS / "gpu.json.xz"


def benchmark(setup: Setup) -> Source:
    """Return the `Source` that runs the GPU benchmark, with one row per section. Without a GPU, sizes are small."""

    def make(keys: Sequence[str]) -> dict[str, Row]:
        device = setup.torch_device
        with TemporaryDirectory() as folder:
            out = Path(folder) / "gpu.json"
            arguments = ["--sections", ",".join(keys), "--out", str(out), "--device", str(device)]
            arguments += ["--figure", str(out.with_suffix(".svg"))] + ([] if device.type == "cuda" else ["--small"])
            with redirect_stdout(sys.stderr):
                gpu.main(arguments)
            results = read_json(out)
        failed = [section["error"] for section in results["sections"].values() if "error" in section]
        if failed:
            raise D5P4Error(f"the GPU benchmark failed: {failed[0]}")
        about = {name: value for name, value in results.items() if name not in ("sections", "targets")}
        machine = results["sections"]["machine"]  # the benchmark always adds this section
        return {key: {"section": results["sections"][key], "machine": machine, "about": about} for key in keys}

    together = len(setup["sections"])
    return setup.source("benchmark", setup["sections"], make, together=together, cost=100.0, seconds=400.0)


def stages(setup: Setup) -> Source:
    """Return the `Source` that times selection and sampling. It makes one row per repeat."""

    def make(keys: Sequence[str]) -> dict[str, Row]:
        with one_thread(setup.torch_device):
            return {key: {"machine": clock(setup.torch_device), "stages": _stages(setup)} for key in keys}

    made_with = {name: setup[name] for name in ("k", "w", "length", "vocabulary", "width")}
    keys = [str(repeat) for repeat in range(setup["repeats"])]
    return setup.source("stages", keys, make, seconds=1.0, **made_with)


def sources(setup: Setup) -> list[Source]:
    return [stages(setup)] if setup["from_results"] else [benchmark(setup), stages(setup)]


def _whole_steps(setup: Setup) -> dict[str, Any]:
    """Return the results of the GPU benchmark: the committed results, or the results of the new run."""
    if setup["from_results"]:
        return bench.read(RESULTS)
    source = benchmark(setup)
    rows = dict(zip(source.keys, complete(setup, source), strict=True))
    first = next(iter(rows.values()))
    sections = {"machine": first["machine"]} | {name: row["section"] for name, row in rows.items()}
    return first["about"] | {"sections": sections}


select_as_the_paper = partial(baseline_select, beta=BETA)


def select_as_ours(logits: Tensor, states: Tensor, k: int) -> Tensor:
    """Select k parents as this library does: compute entropies in one pass over the logits, then run a local search.

    The search has k starts (solver "local-search"), as it had when the committed times were measured.
    """
    banned = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    entropy = row_stats(logits.flatten(0, 1), banned, ("entropy",))["entropy"].view(logits.shape[:2])
    quality = normalise(-entropy.mean(-1)[None], "minmax", "entropy", logits.shape[-1])
    similarity = pool_gram(states, torch.arange(len(states), device=states.device)[None])
    kernel = dpp_kernel("additive", quality, similarity, BETA)[0].to(similarity.dtype)
    return partition_map(kernel, k, None, quality, starts="k")[0]


def draw_as_ours(logits: Tensor, parents: Tensor, draws: int) -> Tensor:
    """Draw tokens [k * L, draws] as this library does: from keyed uniform numbers, without a copy of the logits."""
    length = logits.shape[1]
    rows = (parents[:, None] * length + torch.arange(length, device=logits.device)).flatten()
    u = uniform(mix(rows[:, None], 1), torch.arange(draws, device=logits.device))
    banned = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    return draw_logits(logits.flatten(0, 1), banned, u, rows=rows)[0]


def _stages(setup: Setup) -> dict[str, dict[str, float]]:
    """Measure the ms and the peak GB of selection and sampling in each of the three ways, on the same random logits."""
    k, w, device = setup["k"], setup["w"], setup.torch_device
    length, vocabulary, width = setup["length"], setup["vocabulary"], setup["width"]
    source = torch.Generator(device=device).manual_seed(setup.seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    logits = torch.randn(k * w, length, vocabulary, generator=source, device=device, dtype=dtype)
    states = torch.randn(k * w, length, width, generator=source, device=device, dtype=dtype)

    def both(select: Callable[[], Tensor], draw: Callable[[Tensor], Tensor]) -> dict[str, float]:
        parents, select_ms, select_gb = measured(select, device)
        _, draw_ms, draw_gb = measured(lambda: draw(parents), device)
        return {"selection": select_ms, "sampling": draw_ms, "gb": max(select_gb, draw_gb)}

    theirs = both(lambda: select_as_the_paper(logits, states, k), lambda rows: draw_as_the_paper(logits[rows], w))
    ours = both(lambda: select_as_ours(logits, states, k), lambda rows: draw_as_ours(logits, rows, w))
    _, draw_ms, draw_gb = measured(lambda: draw_as_the_paper(logits, 1), device)
    return {INDEPENDENT: {"selection": 0.0, "sampling": draw_ms, "gb": draw_gb}, THEIRS: theirs, OURS: ours}


def draw(setup: Setup) -> Drawing:
    rows = complete(setup, stages(setup))
    size = f"{setup['k']}×{setup['w']}, {setup['length']} tokens, vocabulary {setup['vocabulary']}"
    return drawing(_whole_steps(setup), rows, size)


_BOX = {
    "from_results": True,  # True: use the committed results of the GPU benchmark
    "sections": ["step", "decode"],
    "repeats": 15,
    "k": 6,
    "w": 10,
    "length": 32,
    "vocabulary": 8192,
    "width": 256,
}
_PAPER = {
    "from_results": False,
    "sections": ["solver", "mmr", "step", "decode"],
    "length": 256,
    "vocabulary": 126464,
    "width": 4096,
}

EXPERIMENT = Experiment(
    name="cost",
    title="Time and memory of one step by stage",
    paper="Table scalability (left)",
    settings={"box": _BOX, "paper": _BOX | _PAPER},
    sources=sources,
    draw=draw,
)
