"""Many processes on one job, started by torchrun: prompts over ranks, and one prompt's groups over ranks.

Eight ranks as four pairs, each pair with its own prompts:

    with d5p4.distributed.connect(mesh=(4, 2)) as mesh:
        model = d5p4.load(name, mesh.device)
        result = d5p4.generate(model, prompts, seed=0, beams=mesh.beams)  # the same on both ranks of a pair
"""

from .mesh import Mesh, at_work, check_shared, connect
from .spread import SpreadBeams
from .watchdog import RankLost

__all__ = ["Mesh", "RankLost", "SpreadBeams", "at_work", "check_shared", "connect"]
