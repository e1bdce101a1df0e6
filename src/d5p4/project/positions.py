"""Children that differ in the position they reveal (SOAR in the lab). Every token is the most probable one.

A row at which the reveal rule accepts positions is *sure*: its only child reveals all of them. Otherwise, child c
reveals the position that is number c in the sequence of the order. Two rows may have equal children, because they may
reveal the same positions in different orders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .children import Children, Draw, Parents, candidates

if TYPE_CHECKING:
    from ..decode.schedule import Step


def positions(parents: Parents, step: Step, draw: Draw, count: int) -> Children:
    """Return at most `count` children of each parent. Places without a child have the value -inf. A row without open
    positions is its own only child."""
    seen = candidates(parents, step, draw, 1, 0.0)
    assert seen.accepted is not None and seen.valid is not None
    child = torch.arange(count, device=seen.place.device)
    sure = seen.accepted.any(-1, keepdim=True)  # [P, m, 1, 1]
    number = torch.arange(seen.place.shape[-1], device=child.device) == child[:, None]  # [C, M]
    shown = torch.where(sure, seen.accepted & (child == 0)[:, None], seen.valid & number)  # [P, m, C, M]
    exists = shown.any(-1) | ((child == 0) & ~seen.valid.any(-1))
    state = {name: values[..., None].expand_as(exists) for name, values in parents.state.items()}
    state |= {"value": state["value"].masked_fill(~exists, -torch.inf)}
    state |= {"sure": sure[..., 0].expand_as(exists).to(state["value"].dtype)}
    return seen.expand(count).reveal(parents, shown)._replace(state=state)
