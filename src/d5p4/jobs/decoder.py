"""Decode one planned batch, whatever happens to single prompts in it: NaN logits, or too little memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

import torch

from ..errors import D5P4Error, NonFiniteLogits
from ..options import Settings
from ..prompts import Request
from ..types import Result

NOT_FINITE = "the model gave logits that are not finite; check the weights and guidance, or load them in float32"
NO_MEMORY = "there is too little memory to decode this prompt alone, one row a forward"


class Planned(Protocol):
    """A prompt of a batch."""

    @property
    def request(self) -> Request: ...

    @property
    def name(self) -> str:
        """What an error calls it."""
        ...


Item = TypeVar("Item", bound=Planned)
Attempt = Callable[[list[Item], Settings], Result]
"""Decodes prompts together; raises where one of them spoils it."""


@dataclass
class Outcome(Generic[Item]):
    """What came of a batch."""

    answered: list[tuple[Item, Result, int]] = field(default_factory=list)  # the result, and its place in it
    failed: list[tuple[Item, str]] = field(default_factory=list)


class Decoder(Generic[Item]):
    """Decodes batches. Too little memory halves the budget that later ones are executed with, never their plan.

    patience: how many prompts may lack memory even alone before one is decoded; more are the device's fault.
    """

    def __init__(self, attempt: Attempt[Item], settings: Settings, patience: float = 0) -> None:
        self.attempt, self.settings, self.patience = attempt, settings, patience
        self.halvings = 0
        self.too_large: set[int] = set()  # token budgets that the last batch had to halve
        self.succeeded = False  # whether a prompt was decoded by this decoder

    def decode(self, items: Sequence[Item]) -> Outcome[Item]:
        outcome: Outcome[Item] = Outcome()
        self.too_large = set()
        todo, halvings = [list(items)], self.halvings
        while todo:
            part = todo.pop()
            if len(part) > (most := self._most(part)):
                todo += reversed([part[i : i + most] for i in range(0, len(part), most)])
                continue
            found = self._try(part)
            if isinstance(found, Result):
                self.succeeded = True
                outcome.answered += [(item, found, place) for place, item in enumerate(part)]
            elif isinstance(found, NonFiniteLogits):
                outcome.failed += [(part[i], NOT_FINITE) for i in found.prompts]
                part = [item for i, item in enumerate(part) if i not in found.prompts]
                todo += [part] if part else []
            elif self._halve(part):
                todo.append(part)
            else:
                self.patience -= not self.succeeded
                if self.patience < 0:  # perhaps it is not this prompt but somebody else on the device
                    raise D5P4Error(
                        f"out of memory with {part[0].name} alone, before any prompt was decoded; free the "
                        "device, or use a smaller -k, -w or --gen-length"
                    )
                outcome.failed.append((part[0], NO_MEMORY))
                self.halvings = halvings  # nothing would have been small enough for it
        return outcome

    def _try(self, part: list[Item]) -> Result | NonFiniteLogits | None:
        """The result, which prompts spoiled it, or None for too little memory."""
        settings = self.settings
        if self.halvings and not settings.deterministic:
            settings = replace(settings, max_tokens_per_forward=max(1, self._budget()))
        try:
            return self.attempt(part, settings)
        except NonFiniteLogits as error:
            if not error.prompts:
                raise
            return NonFiniteLogits(str(error), error.prompts)  # without the traceback, which holds tensors
        except torch.OutOfMemoryError:
            pass  # leave the block: its traceback holds tensors
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None

    def _budget(self) -> int:
        return self.settings.max_tokens_per_forward >> self.halvings

    def _most(self, part: list[Item]) -> int:
        """Prompts of a part that may share a decode after what was halved."""
        if not self.halvings:
            return len(part)
        longest = max(item.request.length for item in part)
        tokens = (self.settings.max_tokens_per_call >> self.halvings) // self.settings.pool_size
        return max(1, tokens // longest)

    def _halve(self, part: list[Item]) -> bool:
        """Take half the budget; False where a prompt is alone and its rows go one by one already."""
        alone = len(part) == 1
        least = self.settings.deterministic or self._budget() <= part[0].request.length
        if alone and least:
            return False
        self.too_large.add(self._budget())
        self.halvings += 1
        return True
