"""Many processes on one job, started by torchrun: prompts over ranks, and one prompt's groups over ranks.

    mesh = d5p4.distributed.connect(mesh=(4, 2), timeout=600)   # 8 ranks: four share out the prompts, in pairs
    model = d5p4.load(name, mesh.device)
    result = d5p4.generate(model, prompts, beams=mesh.beams)    # the same on both ranks of a pair
"""

from .errors import RankLost
from .folder import check_shared
from .mesh import Mesh, connect
from .spread import SpreadBeams

__all__ = ["Mesh", "RankLost", "SpreadBeams", "check_shared", "connect"]
