"""The books of a decode call: what it spends, where its rows come from, which prompts are still decoded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .errors import D5P4Error
from .types import Choice, HistoryStep, PoolView


class Ledger:
    """What a decode call spends and where its rows come from."""

    def __init__(self, names: Tensor, history: bool) -> None:
        prompts, device = len(names), names.device
        self.names = names  # [P] what the caller calls the prompts not dropped
        self.alive = torch.arange(prompts, device=device)  # [P] their places in the call
        self.nfe, self.rows, self.nominal = (torch.zeros(prompts, dtype=torch.int64, device=device) for _ in range(3))
        self.trail: list[Tensor] = []  # per step [P, rows of the next pool]: index of each row's parent
        self.history: list[list[HistoryStep]] | None = [[] for _ in range(prompts)] if history else None

    def record(self, choice: Choice, fresh: Tensor, nominal: int, view: PoolView, tokens: Tensor) -> None:
        self.nfe[self.alive] += fresh > 0
        self.rows[self.alive] += fresh
        self.nominal[self.alive] += nominal
        self.trail.append(choice.parents.repeat_interleave(choice.children, 1))
        if self.history is not None:
            everything = tokens, view.raw, view.quality, view.similarity, view.group, choice.parents
            for place, prompt in enumerate(self.alive.tolist()):
                rows, raw, quality, similarity, group, parents = (x[place] for x in everything)
                step = HistoryStep(view.step, rows, raw, quality, similarity, group, parents, choice.children)
                self.history[prompt].append(step)

    def keep(self, index: Tensor) -> None:
        self.alive, self.names = self.alive[index], self.names[index]
        self.trail = [parents[index] for parents in self.trail]

    def lineage(self, rows: Tensor) -> Tensor:
        """[P, k, steps] ancestors of the final rows [P, k] in the pool of each step."""
        path = []
        for parents in reversed(self.trail):
            rows = parents.gather(1, rows)
            path.append(rows)
        return torch.stack(path[::-1], -1)


def prompts_to_drop(returned: Any) -> list[int]:
    """The prompt numbers a callback returned, as None, a number, a tensor or any iterable of numbers."""
    if returned is None:
        return []
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    numbers = list(returned) if isinstance(returned, Iterable) else [returned]
    numbers = [n.item() if hasattr(n, "item") else n for n in numbers]
    wrong = [n for n in numbers if not isinstance(n, int) or isinstance(n, bool)]
    if wrong:
        raise D5P4Error(f"the callback returned {wrong[0]!r}; return None, or the numbers of prompts to drop")
    return numbers
