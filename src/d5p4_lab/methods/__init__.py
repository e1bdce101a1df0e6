"""Rivals of the tree, and methods and solvers for experiments. Importing this plugin registers them with d5p4.

`python -m d5p4_lab` and every import of a lab module load it. In other programs, `--plugin d5p4_lab.methods` or
`d5p4.load_plugins(["d5p4_lab.methods"])` loads it.
"""

from d5p4 import Method, register
from d5p4.methods import SOLVERS

from .exact import branch_and_bound, exhaustive
from .odd import ODD
from .order_token_search import OrderTokenSearch
from .partition_sample import PartitionSample
from .soar import SOAR
from .sr_smc import SRSMC

SOLVERS["exact"] = branch_and_bound
SOLVERS["exhaustive"] = exhaustive

register(Method("partition-sample", PartitionSample, "one candidate per group sampled from the partition DPP", "ours"))
register(
    Method("sr-smc", SRSMC, "particles resampled by their likelihood; the k likeliest are kept", "arXiv 2602.01849")
)
register(
    Method(
        "ots",
        OrderTokenSearch,
        "K children per beam at block edges; the K best by the likelihood of the block are kept",
        "arXiv 2601.20339",
        branches=False,
    )
)
register(
    Method(
        "soar",
        SOAR,
        "reveals all sure positions, or branches over positions; one beam stays where it is sure",
        "arXiv 2602.10953",
        branches=False,
        presets={"order": "top", "temperature": 0.0, "reveal": "threshold", "tau": 0.95},
        children="positions",
    )
)
register(
    Method(
        "odd",
        ODD,
        "k answers whose logits move apart before tokens are drawn",
        "arXiv 2603.04893",
        branches=False,
        presets={"order": "confidence"},
    )
)
