"""A schedule is a policy per prompt: given facts about the prompt's pool, it returns the prompt's next step, or none.

`Table` is the policy of the paper. Every row reveals the same number of positions, so all steps are known in advance.
`Adaptive` serves the reveal rules that accept a different number of positions in every row (`search.reveal`). A prompt
goes to its next block as soon as all its rows have finished the block, and it ends when its rows are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import D5P4Error, NonFiniteLogits
from ..ops.precision import wide
from ..options import Window


class Facts(NamedTuple):
    """What a policy knows about a prompt's pool. An open position is masked and, with `stop`, before the text's end."""

    first: int  # the first window position that is open in any row, or the length of the window
    masked: int  # the most open positions that a row has in the block of that position
    left: int  # the number of open positions of all rows
    rows: int  # the number of rows
    done: int  # the number of rows that have no open position
    start: int  # the block of that position has the window positions start..stop-1
    stop: int
    decoded: int  # the number of window positions that are decoded


@dataclass(frozen=True)
class Step:
    """One step of one prompt. The step reveals positions of one block of the prompt's window."""

    index: int  # how many steps came before it
    start: int  # the block has the window positions start..stop-1
    stop: int
    reveal: int  # the most positions that a row reveals
    move: float  # the probability with which the ancestral order unmasks a masked position
    last: bool  # whether the policy knows that no step follows
    masked: int  # the most open positions that a row has in the block
    exact: bool = True  # whether every row has `masked` open positions and reveals `reveal` of them
    most: int = 1  # the most steps that the prompt takes, as far as is known
    facts: Facts | None = None  # about the pool, if its rows differ

    @property
    def share(self) -> float | None:
        """The share of the prompt's positions that are not open, if rows differ."""
        return None if self.facts is None else 1 - self.facts.left / (self.facts.rows * self.facts.decoded)

    def within(self, window: Window | None) -> bool:
        """Return whether the prompt is inside a window of steps, or of shares of steps (of positions, if rows
        differ)."""
        if window is None:
            return True
        steps = self.index if all(isinstance(edge, int) for edge in window) else self.index / self.most
        return window[0] <= (steps if self.facts is None else self.share) < window[1]  # type: ignore[operator]


@dataclass(frozen=True)
class Steps:
    """The steps that P prompts take together. The numbers are the largest of any prompt, except that `start` and `stop`
    are 0 and the length of the longest block if prompts are in different blocks."""

    by_prompt: tuple[Step, ...]  # [P]; none in a recorded step (see `replay`)
    names: tuple[int, ...]  # [P] the numbers by which callbacks name the prompts
    start: int
    stop: int
    reveal: int
    masked: int
    exact: bool = False  # whether all rows of all prompts have `masked` open positions and reveal `reveal` of them
    move: float | Tensor = 1.0  # a tensor [R], if prompts differ
    starts: Tensor | None = None  # [R] the start of the block of each prompt or row, if they are in different blocks
    stops: Tensor | None = None  # [R] the end of the block of each prompt or row, if there are `starts`
    reveals: Tensor | None = None  # [R] the most positions that a row reveals, if prompts differ

    @staticmethod
    def of_prompts(steps: Sequence[Step], names: Sequence[int], device: torch.device) -> Steps:
        """Return the steps of P prompts."""
        shapes = {(step.start, step.stop, step.reveal, step.masked, step.move, step.exact) for step in steps}
        starts, stops, reveals, masked, moves, exact = (set(numbers) for numbers in zip(*shapes, strict=True))
        own: dict[str, Any] = {"start": min(starts), "stop": max(stops), "move": min(moves)}
        if len(starts) > 1 or len(stops) > 1:
            edges = sent([(step.start, step.stop) for step in steps], device)
            longest = max(step.stop - step.start for step in steps)
            own |= {"start": 0, "stop": longest, "starts": edges[:, 0], "stops": edges[:, 1]}
        if len(shapes) > 1 and any(step.reveal < step.masked for step in steps):
            own["reveals"] = sent([step.reveal for step in steps], device)
        if len(moves) > 1:
            own["move"] = sent([step.move for step in steps], device, wide(device))
        same = len(shapes) == 1 and all(exact)
        return Steps(tuple(steps), tuple(names), reveal=max(reveals), masked=max(masked), exact=same, **own)

    @property
    def last(self) -> bool:
        """Whether no step follows. Prompts take their last steps apart from others."""
        return bool(self.by_prompt) and self.by_prompt[0].last

    def keep(self, places: Sequence[int], device: torch.device) -> Steps:
        """Return the steps of only some prompts."""
        return Steps.of_prompts([self.by_prompt[i] for i in places], [self.names[i] for i in places], device)

    def of(self, index: Tensor) -> Steps:
        """Return the steps for chosen prompts, or for rows, given the index of the prompt of each row."""
        names = ("move", "starts", "stops", "reveals")
        rows = {name: x[index] for name in names if isinstance(x := getattr(self, name), Tensor)}
        return replace(self, **rows) if rows else self  # type: ignore[arg-type]

    def cut(self, rows: Tensor) -> Tensor:
        """Return the block's positions [R, B, ...] of rows [R, L, ...].

        A row whose block is shorter than those of other rows repeats its last position (see `inside`).
        """
        if self.starts is None:
            return rows[:, self.start : self.stop]
        place = self._places(self.starts).clamp_max(rows.shape[1] - 1)
        return rows.gather(1, place.view(*place.shape, *[1] * (rows.ndim - 2)).expand(*place.shape, *rows.shape[2:]))

    def inside(self) -> Tensor | None:
        """Return which positions [R, B] of `cut` belong to the block, or None if all of them do."""
        return None if self.stops is None else self._places(self.starts) < self.stops[:, None]

    def block(self, rows: Tensor) -> Tensor:
        """Return the flags rows [R, ..., L], but False at window positions that are not in the block."""
        length = rows.shape[-1]
        place, one = torch.arange(length, device=rows.device), (len(rows), *[1] * (rows.ndim - 2), 1)
        if self.starts is None or self.stops is None:
            return rows & (place >= self.start) & (place < self.stop)
        return rows & (place >= self.starts.view(one)) & (place < self.stops.view(one))

    def _places(self, starts: Tensor | None) -> Tensor:
        assert starts is not None
        return starts[:, None] + torch.arange(self.stop - self.start, device=starts.device)


def sent(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers of the host as a tensor on the device, for which the host does not wait."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True)
class Table:
    """The steps that decode `length` window positions. `make_schedule` makes a table."""

    length: int
    steps: tuple[Step, ...]

    @property
    def most(self) -> int:
        return len(self.steps)

    @property
    def random(self) -> bool:
        """Whether there is a step at which the ancestral order leaves positions masked."""
        return any(step.move < 1 for step in self.steps)

    def next(self, index: int, facts: Facts | None) -> Step | None:
        return None if index == len(self.steps) or (facts and not facts.left) else self.steps[index]


@dataclass(frozen=True)
class Adaptive:
    """Steps of unknown number. At each step, a row reveals at least one open position of its prompt's block."""

    length: int
    rounds: int = 1  # at most rounds * length steps: a tree may go on after its first rows are complete
    reveals: tuple[int, ...] = ()  # how many positions a tree reveals per step, given the number of open ones
    widest: int | None = None  # the most open positions of a row that a step may reveal; None: all

    @property
    def most(self) -> int:
        return self.rounds * self.length

    def next(self, index: int, facts: Facts | None) -> Step | None:
        assert facts is not None
        if not facts.left:
            return None
        masked = facts.masked if self.widest is None else min(self.widest, facts.masked)
        numbers = facts.start, facts.stop, masked, 1.0, False, masked
        return Step(index, *numbers, exact=False, most=max(self.length, index + 1), facts=facts)


Policy = Table | Adaptive
"""A policy for a window of `length` positions. `next(index, facts)` returns the prompt's step after `index` steps, or
None if the prompt is finished. `most` is the most steps that a prompt can take. `facts` about the pool are given if
rows may be complete before the last step (`Call.early`)."""


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


def make_schedule(
    length: int,
    steps: int | None,
    block_length: int | None,
    ancestral: bool,
    stop: bool = False,
    offset: int = 0,
    alone: bool = False,
) -> Table:
    """Return the table of a window of `length` positions, with `steps` steps in total spread evenly over its blocks.
    The first block has `offset` positions before the window. alone: the first token of a block takes a step of its own.

    An order reveals at least one position per step, so there are at most `length` steps. The ancestral order may
    take more steps. In a block of S steps, ancestral step i unmasks each masked position with probability 1/(S - i).
    The diffusion time then falls evenly from 1 to 0, and the last step leaves no mask.
    """
    block = block_length or length
    edges = [0, *range(block - offset, length, block), length]
    starts, sizes = edges[:-1], [end - start for start, end in pairwise(edges)]
    total = length if steps is None else steps if ancestral else min(steps, length)
    total = max(total, len(starts)) if offset else total  # the prompt, not the caller, makes one more block
    if total < len(starts):
        reason = f"is fewer than the {len(starts)} blocks of {block} positions; use more steps or longer blocks"
        raise D5P4Error(reason, option="steps", value=total)
    plan: list[Step] = []
    for start, size, share in zip(starts, sizes, _shares(total, sizes), strict=True):
        end = start + size
        if alone and size > 1 and (start or not offset):
            plan.append(Step(0, start, end, 1, 1.0, False, size, exact=False))
            size, share = size - 1, max(1, share - 1)
        count = share if ancestral else min(share, size)
        reveals = spread(size, count)
        plan += [
            Step(0, start, end, reveals[i], 1.0 / (count - i), False, size - sum(reveals[:i]), exact=not stop)
            for i in range(count)
        ]
    final = len(plan) - 1
    return Table(length, tuple(replace(x, index=i, last=i == final, most=len(plan)) for i, x in enumerate(plan)))


def reveals_of(table: Table, block: int) -> tuple[int, ...]:
    """Return how many positions the table reveals in a block with 0, 1, ... `block` open positions."""
    steps = [step for step in table.steps if step.start == 0]
    return tuple(min(n, next(step.reveal for step in reversed(steps) if step.masked >= n)) for n in range(block + 1))


Expected = tuple[Tensor, Callable[[Tensor], Exception]]
"""A tensor of bools that must all be true, and a function that makes the error from it if one is false."""


class Checks:
    """Collects conditions, such as finite logits, as tensors of bools. The loop reads all of them in one transfer per
    step, at the point at which it waits for the device anyway."""

    def __init__(self) -> None:
        self.expected: list[Expected] = []

    def expect(self, holds: Tensor, complaint: Callable[[Tensor], Exception]) -> None:
        """Make the next `read` raise the error `complaint(holds)` if `holds` has a false element."""
        self.expected.append((holds, complaint))

    def expect_finite(self, finite: Tensor, names: Tensor, owner: Tensor, step: Tensor) -> None:
        """Expect the logits of R rows to be finite. `finite` [R] says of which rows they are.

        For each row, owner [R, 2] has the index of its prompt in `names` and its index in the pool. step [P] has
        the number of the step of each prompt.
        """

        def complaint(finite: Tensor) -> NonFiniteLogits:
            wrong = owner[~finite]
            numbers = names[wrong[:, 0]].tolist()
            place = f"step {int(step[wrong[0, 0]])}, prompt {numbers[0]}, row {int(wrong[0, 1])}"
            cure = "check the weights and guidance, or load them in float32"
            reason = f"the model gave logits that are not finite at {place}; {cure}"
            return NonFiniteLogits(reason, prompts=sorted(set(numbers)))

        self.expect(finite, complaint)

    def read(self, facts: Tensor | None = None) -> list[Facts] | None:
        """Raise the error of the first condition that does not hold. Return the facts [P, F] as Python numbers."""
        expected, self.expected = self.expected, []
        numbers = [torch.stack([holds.all() for holds, _ in expected])] if expected else []
        numbers += [facts.flatten()] if facts is not None else []
        if not numbers:
            return None
        read = torch.cat([part.to(torch.int64) for part in numbers]).tolist()
        if not all(read[: len(expected)]):
            raise next(complaint(holds) for holds, complaint in expected if not bool(holds.all()))
        rest = read[len(expected) :]
        size = len(Facts._fields)
        return None if facts is None else [Facts(*rest[i : i + size]) for i in range(0, len(rest), size)]
