"""Rivals of the tree, and methods and solvers for experiments. Importing this plugin registers them with d5p4.

Every import of a lab module loads it. Elsewhere, `--plugin d5p4_lab.methods` or `d5p4.load_plugins` loads it.
"""

from d5p4 import Method, register
from d5p4.search import SOLVERS

from .exact import branch_and_bound, exhaustive
from .odd import ODD
from .order_token_search import OrderTokenSearch
from .partition_sample import PartitionSample
from .soar import SOAR
from .sr_smc import SRSMC
from .wide_start import Cooling, WideStart

SOLVERS.update(exact=branch_and_bound, exhaustive=exhaustive)

CONFIDENCE, LEFT = {"order": "confidence"}, {"order": "left"}

for _method in (
    Method("partition-sample", PartitionSample, "one candidate per group sampled from the partition DPP", "ours"),
    Method("sr-smc", SRSMC, "particles resampled by likelihood; the k likeliest are kept", "arXiv 2602.01849"),
    Method("ots", OrderTokenSearch, "K children at block edges; the likeliest K are kept", "arXiv 2601.20339", False),
    Method(
        "soar",
        SOAR,
        "reveals all sure positions, or branches over positions",
        "arXiv 2602.10953",
        branches=False,
        presets={"order": "top", "temperature": 0.0, "reveal": "threshold", "tau": 0.95},
        without=("w", "temperature"),
    ),
    Method(
        "odd", ODD, "k answers whose logits move apart before tokens are drawn", "arXiv 2603.04893", False, CONFIDENCE
    ),
    Method("wide-start", WideStart, "many partial answers, of which a DPP keeps k", "ours", False, LEFT, ("w",)),
    Method("cooling", Cooling, "independent answers with a hotter start", "ours", False),
):
    register(_method)
