"""The schedule: which window positions are decoded at which step."""

from __future__ import annotations

from dataclasses import replace

from .errors import D5P4Error
from .types import Schedule, Step


def spread(total: int, parts: int) -> list[int]:
    """Split `total` into `parts` whole numbers that are as equal as possible. Larger numbers come first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def _shares(steps: int, sizes: list[int]) -> list[int]:
    """Return the number of steps of each block. Every block gets one step. Each further step goes to the block that has
    the most positions per step."""
    shares = [1] * len(sizes)
    for _ in range(steps - len(sizes)):
        needy = max(range(len(sizes)), key=lambda b: (sizes[b] / shares[b], -b))
        shares[needy] += 1
    return shares


def make_schedule(length: int, steps: int | None, block_length: int | None, ancestral: bool) -> Schedule:
    """Return the schedule of a window of `length` positions, with `steps` steps in total spread evenly over its blocks.

    An order rule reveals at least one position per step, so there are at most `length` steps. The ancestral rule may
    take more steps. In a block of S steps, ancestral step i unmasks each masked position with probability 1/(S - i).
    The diffusion time then falls evenly from 1 to 0, and the last step leaves no mask.
    """
    block = min(block_length or length, length)
    starts = list(range(0, length, block))
    sizes = [min(block, length - start) for start in starts]
    total = length if steps is None else steps if ancestral else min(steps, length)
    if total < len(starts):
        reason = f"is fewer than the {len(starts)} blocks of {block} positions; use more steps or longer blocks"
        raise D5P4Error(reason, option="steps", value=total)
    plan: list[Step] = []
    for start, size, share in zip(starts, sizes, _shares(total, sizes), strict=True):
        count = share if ancestral else min(share, size)
        reveals = spread(size, count)
        plan += [
            Step(0, start, start + size, reveals[i], 1.0 / (count - i), False, size - sum(reveals[:i]))
            for i in range(count)
        ]
    final = len(plan) - 1
    return Schedule(length, tuple(replace(step, index=i, last=i == final) for i, step in enumerate(plan)))
