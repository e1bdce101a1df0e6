"""One order of a pool that does not depend on how it was handed over.

Floating sums, eigenvectors and inverse-CDF draws see the order of their terms. Sorting a pool by its tie hashes first
makes them functions of the pool as a set of groups.
"""

from __future__ import annotations

from torch import Tensor


def canonical_order(tie: Tensor, groups: int = 1) -> Tensor:
    """order [P, N]: the item at each canonical place, for ties [P, N] in `groups` contiguous groups of equal size.

    Groups come by their smallest tie, items inside a group by their tie. O(N log N) per prompt.
    """
    prompts, size = tie.shape
    width = size // groups
    split = tie.view(prompts, groups, width)
    within = split.argsort(dim=-1, stable=True)
    between = split.amin(-1).argsort(dim=-1, stable=True)
    within = within.gather(1, between.unsqueeze(-1).expand_as(within))
    return (between.unsqueeze(-1) * width + within).view(prompts, size)
