"""Measure how often each solver of `d5p4.methods.partition_map` finds the best set (known from exhaustive search).

    python -m d5p4_lab bench solver_quality [INSTANCES]

The 48 settings combine k = 4, 5 or 6, 16 or 768 dimensions, related or unrelated children, and four kernels: additive
with beta 1, 10 or 100, and multiplicative with beta 1. w is 4. Each setting has INSTANCES (default 80) random kernels
whose rows share a common component. The program prints a Markdown table: the share of optimal sets, the mean and the
largest gap in nats, and the time relative to the default solver.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from d5p4.methods import exhaustive, partition_map
from d5p4.methods.dpp import dpp_kernel
from d5p4.ops.problem import prepare

from ..timing import one_thread, wall
from . import make_parser, markdown

CPU = torch.device("cpu")
DEFAULT = "**k starts + local search (default)**"
SOLVERS: dict[str, dict[str, Any]] = {
    "greedy, one start": dict(starts="one", local_search=False),
    "greedy, k starts (the paper's text)": dict(starts="k", local_search=False),
    "greedy, n starts (the paper's code)": dict(starts="n", local_search=False),
    "one start + local search": dict(starts="one"),
    DEFAULT: dict(starts="k"),
    "n starts + local search": dict(starts="n"),
}
KERNELS = [("additive", 1.0), ("additive", 10.0), ("additive", 100.0), ("multiplicative", 1.0)]
SHARED = 0.8


def instances(count: int, k: int, w: int, width: int, kin: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return random quality [count, kw] in [0, 1] and similarity [count, kw, kw].

    Rows are random vectors that share one component. `kin` is the share of the rest that siblings have in common.
    """
    g = torch.Generator().manual_seed(seed)

    def unit(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(torch.randn(*shape, width, generator=g, dtype=torch.float64), dim=-1)

    own = kin**0.5 * unit(count, k, 1) + (1 - kin) ** 0.5 * unit(count, k, w)
    rows = SHARED**0.5 * unit(count, 1, 1) + (1 - SHARED) ** 0.5 * own
    rows = torch.nn.functional.normalize(rows.flatten(1, 2), dim=-1)
    quality = torch.randn(count, k * w, generator=g, dtype=torch.float64)
    low, high = quality.amin(-1, keepdim=True), quality.amax(-1, keepdim=True)
    return (quality - low) / (high - low), rows @ rows.mT


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("solver_quality", __doc__)
    parser.add_argument("instances", type=int, nargs="?", default=80, help="random kernels per setting")
    count = parser.parse_args(arguments).instances
    gaps: dict[str, list[Tensor]] = {name: [] for name in SOLVERS}
    spent = dict.fromkeys(SOLVERS, 0.0)
    settings = itertools.product((4, 5, 6), (16, 768), (0.0, 0.7), KERNELS)
    with one_thread(CPU):
        for seed, (k, width, kin, (kind, beta)) in enumerate(settings):
            quality, similarity = instances(count, k, 4, width, kin, seed)
            kernel, gain = dpp_kernel(kind, quality, similarity, beta)
            problem = prepare(kernel, k, gain)  # without tie hashes, so that rows are not reordered
            best = problem.score(exhaustive(kernel, k, gain, quality)[:, None])[1][:, 0]
            for name, options in SOLVERS.items():
                sets, seconds = wall(partial(partition_map, kernel, k, gain, quality, **options), CPU)
                spent[name] += seconds
                gaps[name].append(best - problem.score(sets[:, None])[1][:, 0])
    rows = []
    for name, parts in gaps.items():
        gap = torch.cat(parts)
        hits = (gap < 1e-9).double().mean().item()
        time = spent[name] / spent[DEFAULT]
        rows.append([name, f"{hits:.1%}", f"{gap.mean():.4f}", f"{gap.max():.2f}", f"{time:.2f}"])
    print(markdown(["solver", "optimal", "mean gap (nats)", "largest gap", "time"], rows))
    print(f"\n{len(gap)} kernels, exhaustive search as the reference, one CPU thread.")
