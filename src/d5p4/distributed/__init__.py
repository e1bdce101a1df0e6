"""Decode with many processes (ranks), which torchrun starts. Ranks divide the prompts, the rows of each pool, or both.

In this example, eight ranks form four pairs, and each pair decodes its own prompts:

    with d5p4.distributed.connect(mesh=(4, 2)) as mesh:
        model = d5p4.load(name, mesh.device)
        result = d5p4.generate(model, prompts, seed=0, beams=mesh.beams)  # both ranks of a pair get the same result
"""

from .mesh import Mesh, check_shared, connect
from .spread import RankLost, SpreadBeams

__all__ = ["Mesh", "RankLost", "SpreadBeams", "check_shared", "connect"]
