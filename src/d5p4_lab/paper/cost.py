"""Measures the time and memory of each stage of a decoding step: forward, selection, sampling.

The figures have three sources. The first is the GPU benchmark (`python -m d5p4_lab bench gpu`): a new run, or its
committed results. The benchmark times whole steps at the paper's size in two ways: as the paper computes a step, and
as this library does. The benchmark does not time the paper's *Baseline*, which draws tokens for every row of the pool,
nor the paper's diverse beam search. So the second source is this module: it times selection and sampling in all ways,
on the machine that runs the experiment. On a GPU the logits have the paper's size. On a CPU they are small, and the
operations of this library compute in float64 and are made to be exact rather than fast. The third source is this module
too, with one process per GPU, because the paper's table is from two GPUs that share a pool.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from d5p4.decode.beams import ALONE, Beams
from d5p4.decode.measures import normalise
from d5p4.distributed import connect
from d5p4.errors import D5P4Error
from d5p4.methods.dpp import dpp_kernel
from d5p4.ops.partition_map import partition_map
from d5p4.provenance import machine
from d5p4.rng import mix, uniform
from d5p4.store import read_json, write_json

from .. import baseline, bench
from ..baseline import BETA, draw_logits, row_stats
from ..baseline import sample as draw_as_the_paper
from ..bench import gpu
from ..timing import Held, clock, measured, one_thread, wall
from .cost_drawing import DIVERSE_BEAM, INDEPENDENT, OURS, THEIRS, Measured, drawing
from .drawing import Drawing
from .rows import Row, Source, complete
from .setup import Experiment, Setup

ALPHA = 20.0  # of diverse beam search; its time does not depend on it
RESULTS = bench.RESULTS / "gpu.jsonl.xz"


def benchmark(setup: Setup) -> Source:
    """Return the `Source` that runs the GPU benchmark, with one row per section. Without a GPU, sizes are small."""

    def make(keys: Sequence[str]) -> dict[str, Row]:
        device = setup.torch_device
        with TemporaryDirectory() as folder:
            out = Path(folder) / "gpu.jsonl"
            arguments = ["--sections", ",".join(keys), "--out", str(out), "--device", str(device)]
            arguments += [] if device.type == "cuda" else ["--small"]
            with redirect_stdout(sys.stderr):
                gpu.main(arguments)
            results = bench.read_sections(out)
        failed = [section["error"] for section in results["sections"].values() if "error" in section]
        if failed:
            raise D5P4Error(f"the GPU benchmark failed: {failed[0]}")
        about = {name: value for name, value in results.items() if name != "sections"}
        machine = results["sections"]["machine"]  # the benchmark always adds this section
        return {key: {"section": results["sections"][key], "machine": machine, "about": about} for key in keys}

    together = len(setup["sections"])
    return setup.source("benchmark", setup["sections"], make, together=together, cost=100.0, seconds=400.0)


class Shape(NamedTuple):
    """The sizes of a pool: k groups of w rows per rank, and the positions, tokens and hidden width of a row."""

    k: int
    w: int
    length: int
    vocabulary: int
    width: int

    def __str__(self) -> str:
        return f"{self.k}×{self.w}, L {self.length}, V {self.vocabulary}, D {self.width}"


def shape_of(setup: Setup, kind: str) -> Shape:
    """The shape of the pools that are measured on a device of this kind, "cpu" or "cuda"."""
    return Shape(setup["k"], setup["w"], *setup["shapes"]["cuda" if kind == "cuda" else "cpu"])


def stages(setup: Setup, kind: str) -> Source:
    """Return the `Source` that times selection and sampling on a kind of device. It makes one row per repeat."""
    shape = shape_of(setup, kind)

    def make(keys: Sequence[str]) -> dict[str, Row]:
        device = setup.torch_device
        with one_thread(device):
            return {key: {"machine": clock(device), "stages": measure(shape, device, setup.seed)} for key in keys}

    keys = [str(repeat) for repeat in range(setup["repeats"])]
    name = "stages" if kind == "cpu" else f"stages-{kind}"
    return setup.source(name, keys, make, seconds=2.0, **shape._asdict())


def ranks(setup: Setup, kind: str) -> Source:
    """Return the `Source` that times selection and sampling if ranks share a pool. It makes one row per repeat.

    The ranks are new processes, one per GPU, which torchrun starts.
    """
    shape, count = shape_of(setup, kind), setup["ranks"]

    def make(keys: Sequence[str]) -> dict[str, Row]:
        with TemporaryDirectory() as folder:
            out = Path(folder) / "ranks.json"
            device = setup.torch_device.type
            task = {"shape": shape, "device": device, "seed": setup.seed, "repeats": len(keys), "out": str(out)}
            _torchrun(count, json.dumps(task))
            rows = read_json(out)
        return dict(zip(keys, rows, strict=True))

    keys = [str(repeat) for repeat in range(setup["repeats"])]
    made_with = shape._asdict() | {"ranks": count}
    return setup.source(f"ranks-{kind}", keys, make, together=len(keys), seconds=4.0, **made_with)


def _torchrun(count: int, task: str) -> None:
    """Run `main` of this module in `count` processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    outer = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")  # torchrun sets these
    environment = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    command += ["-m", "d5p4_lab.paper.cost", task]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if "Error: " in line]
        raise D5P4Error(f"the {count} ranks of the cost table failed: {(lines or ['no message'])[0].strip()}")


def main(task: str) -> None:
    """Be one of the ranks that share a pool. The first rank writes the rows to the file that the task names."""
    todo = json.loads(task)
    shape = Shape(*todo["shape"])
    with connect((1, int(os.environ["WORLD_SIZE"])), device=todo["device"]) as mesh:
        assert mesh.device is not None
        with one_thread(mesh.device):
            made = [measure(shape, mesh.device, todo["seed"], mesh.beams) for _ in range(todo["repeats"])]
        place = (
            f"{mesh.world} × {machine(mesh.device)}" if mesh.device.type == "cuda" else f"{mesh.world} CPU processes"
        )
        if mesh.first:
            write_json(Path(todo["out"]), [{"machine": place, "stages": row} for row in made])


def sources(setup: Setup) -> list[Source]:
    kind = setup.torch_device.type
    have = torch.cuda.device_count()
    if setup.decoding and kind == "cuda" and have < setup["ranks"]:
        reason = f"ranks={setup['ranks']} needs {setup['ranks']} GPUs, but this machine has {have}"
        raise D5P4Error(f"{reason}; --set ranks=1 leaves the rows of several GPUs out")
    shared = [ranks(setup, kind)] if setup["ranks"] > 1 else []
    return [*([] if setup["from_results"] else [benchmark(setup)]), stages(setup, kind), *shared]


def _whole_steps(setup: Setup) -> dict[str, Any]:
    """Return the results of the GPU benchmark: the committed results, or the results of the new run."""
    if setup["from_results"]:
        return bench.read_sections(RESULTS)
    source = benchmark(setup)
    rows = dict(zip(source.keys, complete(setup, source), strict=True))
    first = next(iter(rows.values()))
    sections = {"machine": first["machine"]} | {name: row["section"] for name, row in rows.items()}
    return first["about"] | {"sections": sections}


select_as_the_paper = partial(baseline.select, beta=BETA)


def select_as_ours(logits: Tensor, states: Tensor, k: int, beams: Beams = ALONE) -> Tensor:
    """Select k parents as this library does: compute entropies in one pass over the logits, then run a local search.

    The search has k starts (solver "local-search"), as it had when the committed times were measured. Ranks exchange
    entropies, and slices of the features.
    """
    banned = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    entropy = row_stats(logits.flatten(0, 1), banned, ("entropy",))["entropy"].view(logits.shape[:2])
    score = beams.gather(-entropy.mean(-1)[None])
    quality = normalise(score, "minmax", "entropy", logits.shape[-1])
    slot = torch.arange(len(states), device=states.device)[None]
    hashes = torch.arange(score.shape[1], device=states.device)[None]  # all rows differ
    similarity = beams.cosine(states, slot, hashes)
    kernel = dpp_kernel("additive", quality, similarity, BETA)[0].to(similarity.dtype)
    return partition_map(kernel, k, None, quality, starts="k")[0]


def draw_as_ours(logits: Tensor, parents: Tensor, draws: int) -> Tensor:
    """Draw tokens [k * L, draws] as this library does: from keyed uniform numbers, without a copy of the logits."""
    length = logits.shape[1]
    rows = (parents[:, None] * length + torch.arange(length, device=logits.device)).flatten()
    u = uniform(mix(rows[:, None], 1), torch.arange(draws, device=logits.device))
    banned = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    return draw_logits(logits.flatten(0, 1), banned, u, rows=rows)[0]


def measure(shape: Shape, device: torch.device, seed: int, beams: Beams = ALONE) -> dict[str, dict[str, float]]:
    """Measure the ms and the peak GB of selection and sampling in each way, on the same random logits.

    With several ranks, each rank has k groups of w rows, and the figures are those of the slowest and the largest rank.
    """
    k, w, length, vocabulary, width = shape
    source = torch.Generator(device=device).manual_seed(seed + beams.rank)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    logits = torch.randn(k * w, length, vocabulary, generator=source, device=device, dtype=dtype)
    states = torch.randn(k * w, length, width, generator=source, device=device, dtype=dtype)

    def costs(call: Callable[[], Tensor]) -> tuple[Tensor, float, float]:
        if beams.size == 1:
            return measured(call, device)
        with Held(device) as meter:
            result = call()
        beams.agree_on(None)  # begin together
        mine = torch.tensor([[1e3 * wall(call, device)[1], meter.peak / 1e9]], dtype=torch.float64)[:, None]
        ms, gb = beams.gather(mine)[0].max(0).values.tolist()
        return result, ms, gb

    def way(select: Callable[..., Tensor], draw: Callable[[Tensor], Tensor]) -> dict[str, float]:
        parents, select_ms, select_gb = costs(lambda: select(logits, states, k * beams.size, beams=beams))
        own = beams.own(parents[None])[0] - beams.rank * len(logits)  # this rank's groups, as rows of this rank
        _, draw_ms, draw_gb = costs(lambda: draw(own))
        return {"selection": select_ms, "sampling": draw_ms, "gb": max(select_gb, draw_gb)}

    _, draw_ms, draw_gb = costs(lambda: draw_as_the_paper(logits, 1))
    as_the_paper = partial(_draw_from, logits, w)
    return {
        INDEPENDENT: {"selection": 0.0, "sampling": draw_ms, "gb": draw_gb},
        DIVERSE_BEAM: way(partial(baseline.select_diverse_beam, alpha=ALPHA), as_the_paper),
        THEIRS: way(select_as_the_paper, as_the_paper),
        OURS: way(select_as_ours, lambda rows: draw_as_ours(logits, rows, w)),
    }


def _draw_from(logits: Tensor, w: int, parents: Tensor) -> Tensor:
    return draw_as_the_paper(logits[parents], w)


def draw(setup: Setup) -> Drawing:
    """Draw the rows of all kinds of devices that have rows, those of several ranks and of GPUs first."""
    kinds = ("cuda", "cpu")
    places = [(ranks(setup, kind), kind, setup["ranks"]) for kind in kinds if setup["ranks"] > 1]
    places += [(stages(setup, kind), kind, 1) for kind in kinds]
    with_rows = [place for place in places if len(setup.rows(place[0]))] or places[-1:]
    measured_here = [
        Measured.of(complete(setup, source), str(shape_of(setup, kind)), count) for source, kind, count in with_rows
    ]
    return drawing(_whole_steps(setup), measured_here)


_BOX = {
    "from_results": True,  # True: use the committed results of the GPU benchmark
    "sections": ["step", "decode"],
    "repeats": 15,
    "k": 6,  # groups per rank
    "w": 10,
    "shapes": {"cpu": [32, 8192, 256], "cuda": [256, 126464, 4096]},  # positions, tokens, width; LLaDA-8B's on a GPU
    "ranks": 1,  # processes that share a pool, one per GPU
}
_PAPER = {
    "from_results": False,
    "sections": ["solver", "mmr", "step", "decode"],
    "ranks": 2,
}

EXPERIMENT = Experiment(
    name="cost",
    title="Time and memory of one step by stage",
    paper="Table scalability (left)",
    settings={"box": _BOX, "paper": _BOX | _PAPER},
    sources=sources,
    draw=draw,
)

if __name__ == "__main__":
    main(sys.argv[1])
