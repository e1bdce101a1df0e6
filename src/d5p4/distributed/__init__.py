"""Many processes on one job, started by torchrun: prompts over ranks, and one prompt's groups over ranks.

    with d5p4.distributed.connect(mesh=(4, 2)) as mesh:   # 8 ranks: pairs, of which each takes other prompts
        model = d5p4.load(name, mesh.device)
        result = d5p4.generate(model, prompts, seed=0, beams=mesh.beams)   # the same on both ranks of a pair
"""

from .errors import RankLost
from .folder import check_shared
from .mesh import Mesh, at_work, connect
from .spread import SpreadBeams

__all__ = ["Mesh", "RankLost", "SpreadBeams", "at_work", "check_shared", "connect"]
