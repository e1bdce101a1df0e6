"""Decode with many processes (ranks), which torchrun starts. Ranks divide the prompts, the rows of a forward, or both.

In this example, eight ranks form four pairs, and each pair decodes its own prompts:

    with d5p4.distributed.connect(mesh=(4, 2)) as mesh:
        model = d5p4.load(name, mesh.device)
        result = d5p4.generate(model, prompts, ranks=mesh.ranks)  # both ranks of a pair get the same result
"""

from .mesh import ConnectedRanks, Mesh, RankLost, check_shared, connect

__all__ = ["ConnectedRanks", "Mesh", "RankLost", "check_shared", "connect"]
