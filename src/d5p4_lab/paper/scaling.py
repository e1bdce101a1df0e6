"""The objective, rank and time of every method that chooses a set, on random pools of 4×4 to 64×64 rows.

A random pool has the statistics of one step of a decoded set (see `synthetic`). A trial uses one pool and one β. All
methods see the same trials. The objective is log det L of the chosen rows, L = diag(Q) + β S. The authors' table shows
log det S, so log det S is stored too. As in the paper, samples of a k-DPP ignore groups, so they may have two rows of a
group.

Times begin with Q and S, with two exceptions. The paper's diverse beam search (`EMBEDDED`) computes its penalties from
the rows e (see `synthetic`), so the time to compute S from e is stored beside it. DPPy, the library of the paper's DPP
samples, begins with L and always runs on the CPU; it is left out if it is not installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from d5p4.decode.view import PoolView
from d5p4.errors import D5P4Error
from d5p4.generate import generate
from d5p4.methods import KDPP, MMR, GreedyBeam, PartitionDPP, Random
from d5p4.methods.dpp import dpp_kernel
from d5p4.provenance import machine
from d5p4.rng import mix
from d5p4.types import Selector

from ..baseline import mmr_from_embeddings
from ..methods.partition_sample import PartitionSample
from ..timing import clock, one_thread, timed
from .drawing import Drawing
from .rows import Row, Source, complete
from .scaling_drawing import DPPY, EMBEDDED, EXACT, drawing
from .setup import SOLVER, Experiment, Setup
from .synthetic import PoolStatistics, cosines, parse_size, read_statistics, statistics_of, synthetic_rows

SELECTORS: dict[str, Callable[[float], Selector]] = {
    "random": lambda beta: Random(),
    "greedy beam": lambda beta: GreedyBeam(),
    "diverse beam, α=β": lambda beta: MMR(alpha=beta),
    "diverse beam, α=10β": lambda beta: MMR(alpha=10 * beta),
    "k-DPP sample (*)": lambda beta: KDPP(beta),
    "partition sample": lambda beta: PartitionSample(beta),
    "greedy, one start": lambda beta: PartitionDPP(beta, solver="one-start"),
    "greedy, k starts": lambda beta: PartitionDPP(beta, solver="k-starts"),
    "greedy, n starts": lambda beta: PartitionDPP(beta, solver="n-starts"),
    "local search": lambda beta: PartitionDPP(beta, solver="local-search"),
    "full search": lambda beta: PartitionDPP(beta, solver="full-search"),
    "exact": lambda beta: PartitionDPP(beta, solver="exact"),
}
BETAS = [1.0, 3.1623, 10.0, 31.623, 100.0]
SIZES = ["4x4", "6x4", "8x4", "6x10", "8x8", "4x64", "16x4", "8x32", "16x16", "32x8", "64x4", "32x32", "64x32", "64x64"]
SLOW = ["diverse beam, α=β", "diverse beam, α=10β", "k-DPP sample (*)", "partition sample", "greedy, n starts"]
SLOW += ["full search", EMBEDDED, DPPY]


def _by_rows(trials: Mapping[str, int], rows: int) -> int:
    """The number of trials for pools of `rows` rows. The keys of `trials` are upper limits of the number of rows."""
    fitting = [int(most) for most in trials if int(most) >= rows]
    return trials[str(min(fitting))] if fitting else 0


def sources(setup: Setup) -> list[Source]:
    return [statistics(setup), trials(setup)]


def statistics(setup: Setup) -> Source:
    """The source of the statistics of real pools: one row per decoded set, with the statistics of each step."""

    def make(keys: Sequence[str]) -> dict[str, Row]:
        rows = {}
        options = {name: setup[name] for name in ("k", "w", "steps", "beta")} | {"gen_length": setup["length"]}
        options["solver"] = setup["solver"]
        for key in keys:
            names = [f"scaling {key}"]
            result = generate(setup.model, method="d5p4", sets=1, keys=names, seed=setup.seed, history=True, **options)
            read = [read_statistics(step) for step in (result.history or [[]])[0]]
            steps = [asdict(step) for step in read if step is not None]
            rows[key] = {"steps": steps, "machine": machine(setup.torch_device)}
        return rows

    keys = [str(number) for number in range(setup["sets"])]
    made_with = setup.model_and("k", "w", "length", "steps", "beta")
    tokens = {setup.named: setup["k"] * setup["w"] * setup["length"] * setup["steps"]}
    return setup.source("statistics", keys, make, tokens=tokens, **made_with)


def trials(setup: Setup) -> Source:
    sizes = {size: math.prod(parse_size(size)) for size in setup["sizes"]}
    keys = [f"{size} {trial}" for size, rows in sizes.items() for trial in range(_by_rows(setup["trials"], rows))]

    def make(wanted: Sequence[str]) -> dict[str, Row]:
        from threadpoolctl import threadpool_limits  # comes with scikit-learn

        steps, rows = _steps(setup), {}
        with one_thread(setup.torch_device), threadpool_limits(1):  # torch and numpy have threads of their own
            for key in wanted:
                size, trial = key.split()
                rows[key] = {"size": size, **_trial(setup, steps, size, int(trial))}
        return rows

    # The pools depend on the statistics of all sets, so `made_with` includes the number of sets.
    made_with = setup.model_and("k", "w", "length", "steps", "beta", "sets", "betas", "largest")
    seconds = sum(sizes[key.split()[0]] for key in keys) / max(1, len(keys)) / 250  # a pool of 1,024 rows takes 4 s
    return setup.source("trials", keys, make, seconds=seconds, **made_with)


def _steps(setup: Setup) -> list[PoolStatistics]:
    steps = [statistics_of(step) for row in complete(setup, statistics(setup)) for step in row["steps"]]
    if not steps:
        raise D5P4Error(
            f"no step of {setup['sets']} sets has rows that differ; set steps to more than {setup['steps']}"
        )
    return steps


def _fitting(setup: Setup, size: str) -> list[str]:
    """Return the methods that run on pools of the given size. Slow methods run only on small pools."""
    k, w = parse_size(size)
    largest = setup["largest"]
    names = [*SELECTORS, EMBEDDED, *([DPPY] if find_spec("dppy") else [])]
    return [
        name for name in names if (w**k <= largest[EXACT] if name == EXACT else k * w <= largest.get(name, math.inf))
    ]


def _sample_by_dppy(kernel: Tensor, k: int, seed: int) -> Tensor:
    from dppy.finite_dpps import FiniteDPP

    return torch.tensor(FiniteDPP("likelihood", L=kernel.numpy()).sample_exact_k_dpp(size=k, random_state=seed))


def _trial(setup: Setup, steps: Sequence[PoolStatistics], size: str, trial: int) -> dict[str, Any]:
    """Run each method on one random pool. The result of a method is [log det L, log det S, ms]."""
    k, w = parse_size(size)
    device = setup.torch_device
    source = torch.Generator().manual_seed(int(mix(setup.seed, torch.tensor(k), w, trial)) & (2**62 - 1))
    chosen = steps[int(torch.randint(len(steps), (1,), generator=source))]
    quality, rows = synthetic_rows(chosen, k, w, source)
    similarity, tie, group = cosines(rows), mix(trial, torch.arange(k * w)), torch.arange(k * w) // w
    beta = float(setup["betas"][trial % len(setup["betas"])])
    kernel = dpp_kernel("additive", quality[None], similarity[None], beta)[0][0]
    dtype = torch.float32 if device.type == "cuda" else torch.float64  # of similarities, as in decoding
    there = rows.to(device, dtype)
    pool = PoolView(
        group=group[None].to(device),
        tie=tie[None].to(device),
        quality=quality[None].to(device),
        similarity=similarity[None].to(device, dtype),
    )
    key = mix(setup.seed, torch.tensor([trial], device=device))

    def call_of(name: str) -> Callable[[], Tensor]:
        if name == EMBEDDED:
            return partial(mmr_from_embeddings, quality.to(there), there, k, 10 * beta)
        if name == DPPY:
            return partial(_sample_by_dppy, kernel, k, trial)
        selector = SELECTORS[name](beta)
        return lambda: selector(pool, k, key).parents[0]

    def measure(call: Callable[[], Tensor]) -> tuple[Tensor, float]:
        if trial == 0 or device.type == "cuda":
            call()  # warm up, so that loading and compiling are not timed
        results = [timed(call, device) for _ in range(3 if k * w <= 64 else 1)]
        return results[0][0], float(f"{sorted(ms for _, ms in results)[len(results) // 2]:.4g}")

    by_method: dict[str, Any] = {}
    for name in _fitting(setup, size):
        parents, ms = measure(call_of(name))
        at = parents.cpu()
        values = [torch.linalg.slogdet(x[at][:, at]).logabsdet for x in (kernel, similarity)]
        by_method[name] = [*(round(float(value), 6) for value in values), ms]
    about = {"trial": trial, "beta": beta, "machine": clock(device), "cosines_ms": measure(partial(cosines, there))[1]}
    return about | {"methods": by_method}


def draw(setup: Setup) -> Drawing:
    return drawing(complete(setup, trials(setup)), setup)


_BOX = {
    "model": "books",
    "sets": 2,
    "k": 8,
    "w": 4,
    "length": 256,
    "steps": 32,
    "beta": 20.0,
    "solver": SOLVER,  # of the decoding whose statistics the random pools have
    "betas": BETAS,
    "sizes": SIZES,
    "trials": {"256": 40, "1024": 20, "2048": 5, "4096": 3},  # 40 trials for pools of up to 256 rows, and so on
    "largest": {**dict.fromkeys(SLOW, 1024), EXACT: 5000},  # the most rows of a pool; for EXACT, the most sets
}
_PAPER = {
    "model": "kuleshov-group/mdlm-owt",
    "sets": 8,
    "length": 1024,
    "steps": 1024,
    "betas": [round(100 ** (i / 14), 4) for i in range(15)],
    "sizes": [f"{k}x{w}" for k in (4, 8, 16, 32, 64) for w in (4, 8, 16, 32, 64)],
    "trials": {"4096": 500},
    "largest": {EXACT: 70_000, DPPY: 1024},
}

EXPERIMENT = Experiment(
    name="scaling",
    title="Objective, rank and time of methods that choose a set, as pools grow",
    paper="Figure scaling and Table scalability (right)",
    settings={"box": _BOX, "paper": _BOX | _PAPER},
    sources=sources,
    draw=draw,
)
