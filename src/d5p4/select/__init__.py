"""Selectors: which rows of a pool become parents. One file per idea, one call: `select(pool, k, key) -> Choice`."""

from __future__ import annotations

from ..ops.partition_map import partition_map
from .beam import GreedyBeam
from .cat import Categorical
from .dpp import PartitionDPP, Solver
from .exact import branch_and_bound, exhaustive
from .identity import Identity
from .kdpp import KDPP
from .mmr import MMR
from .random import Random
from .sampled import PartitionSample
from .smc import ESMC

__all__ = [
    "ESMC",
    "KDPP",
    "MMR",
    "Categorical",
    "GreedyBeam",
    "Identity",
    "PartitionDPP",
    "PartitionSample",
    "Random",
    "Solver",
    "branch_and_bound",
    "exhaustive",
    "partition_map",
]
