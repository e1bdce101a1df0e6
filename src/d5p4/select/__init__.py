"""Selectors: which rows of a pool become parents. One file per idea, one call: `select(pool, k, key) -> Choice`."""

from __future__ import annotations

from d5p4.ops.partition_map import partition_map
from d5p4.select.beam import GreedyBeam
from d5p4.select.cat import Categorical
from d5p4.select.dpp import PartitionDPP
from d5p4.select.exact import branch_and_bound, exhaustive
from d5p4.select.identity import Identity
from d5p4.select.kdpp import KDPP
from d5p4.select.mmr import MMR
from d5p4.select.random import Random
from d5p4.select.sampled import PartitionSample
from d5p4.select.smc import ESMC

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
    "branch_and_bound",
    "exhaustive",
    "partition_map",
]
