"""Decode one batch after the other: the token budget of each forward, and what happens when prompts fail.

A forward takes enough tokens to keep the device busy, and no more. A batch is eight forwards per step, and a kill loses
one batch per rank. Measured on an H200 (docs/scale.md): 8 B parameters reach their full speed at 2,048 tokens, 10 M
parameters between 131,072 and 262,144.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from ..errors import D5P4Error, NonFiniteLogits
from ..options import DETERMINISTIC_TOKENS, Settings
from ..prompts import Request
from ..types import Model, Result

NOT_FINITE = "the model gave logits that are not finite; check the weights and guidance, or load them in float32"
NO_MEMORY = "there is too little memory to decode this prompt alone, one row per forward"


class FullForward(NamedTuple):
    """The size of a forward that keeps one kind of device busy."""

    operations: float  # floating-point operations
    least: int  # tokens


CUDA, OTHERS = FullForward(5e12, 8192), FullForward(4e10, 1024)
MOST_TOKENS = 1 << 18


def default_budget(model: Model, deterministic: bool = False) -> int:
    """Tokens per forward: a power of two that depends only on the size of the model and the kind of device.

    A deterministic forward is padded to its full size, so its budget is a quarter.
    """
    module: Any = getattr(model, "module", model)
    weights = module.parameters() if isinstance(module, nn.Module) else [model.head.weight]
    forward = CUDA if model.head.weight.is_cuda else OTHERS
    tokens = forward.operations / (2 * sum(weight.numel() for weight in weights))
    budget = min(max(1 << max(0, round(tokens).bit_length() - 1), forward.least), MOST_TOKENS)
    return max(budget // 4, min(budget, DETERMINISTIC_TOKENS)) if deterministic else budget


class Planned(Protocol):
    """A prompt of a batch; errors call it by its name."""

    @property
    def request(self) -> Request: ...

    @property
    def name(self) -> str: ...


Item = TypeVar("Item", bound=Planned)
Attempt = Callable[[list[Item], Settings], Result]
"""Decodes prompts together; raises `NonFiniteLogits` or `torch.OutOfMemoryError` if that fails."""


@dataclass
class Outcome(Generic[Item]):
    """The prompts of a batch with their results or errors."""

    answered: list[tuple[Item, Result, int]] = field(default_factory=list)  # the int is the prompt's place in it
    failed: list[tuple[Item, str]] = field(default_factory=list)


class Decoder(Generic[Item]):
    """Decodes batches. After an error for lack of memory, all later batches run with half the token budget.

    The plan of the batches stays the same. `patience` is how many prompts may lack memory even alone before the first
    prompt is decoded; if there are more, something else must fill the device.
    """

    def __init__(self, attempt: Attempt[Item], settings: Settings, patience: float = 0) -> None:
        self.attempt, self.settings, self.patience = attempt, settings, patience
        self.halvings = 0
        self.too_large: set[int] = set()  # token budgets that the last batch had to halve
        self.succeeded = False  # whether any prompt was decoded

    def decode(self, items: Sequence[Item]) -> Outcome[Item]:
        outcome: Outcome[Item] = Outcome()
        self.too_large = set()
        todo, halvings_before = [list(items)], self.halvings
        while todo:
            part = todo.pop()
            if len(part) > (most := self._most_prompts(part)):
                todo += reversed([part[i : i + most] for i in range(0, len(part), most)])
                continue
            result = self._try(part)
            if isinstance(result, Result):
                self.succeeded = True
                outcome.answered += [(item, result, place) for place, item in enumerate(part)]
            elif isinstance(result, NonFiniteLogits):
                outcome.failed += [(part[i], NOT_FINITE) for i in result.prompts]
                part = [item for i, item in enumerate(part) if i not in result.prompts]
                todo += [part] if part else []
            elif self._halve(part):
                todo.append(part)
            else:
                self.patience -= not self.succeeded
                if self.patience < 0:
                    raise D5P4Error(
                        f"out of memory with {part[0].name} alone, before any prompt was decoded; free the "
                        "device, or use a smaller -k, -w or --gen-length"
                    )
                outcome.failed.append((part[0], NO_MEMORY))
                self.halvings = halvings_before  # no budget is small enough for this prompt
        return outcome

    def _try(self, part: list[Item]) -> Result | NonFiniteLogits | None:
        """The result, the error that names the prompts at fault, or None for lack of memory."""
        settings = self.settings
        if self.halvings and not settings.deterministic:
            settings = replace(settings, max_tokens_per_forward=max(1, self._budget()))
        try:
            return self.attempt(part, settings)
        except NonFiniteLogits as error:
            if not error.prompts:
                raise
            return NonFiniteLogits(str(error), error.prompts)  # a new error: the old one's traceback keeps tensors
        except torch.OutOfMemoryError:
            pass  # leave the block: the traceback keeps tensors
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None

    def _budget(self) -> int:
        return self.settings.max_tokens_per_forward >> self.halvings

    def _most_prompts(self, part: list[Item]) -> int:
        """How many prompts may be decoded together under the halved budget."""
        if not self.halvings:
            return len(part)
        longest = max(item.request.length for item in part)
        tokens = (self.settings.max_tokens_per_call >> self.halvings) // self.settings.pool_size
        return max(1, tokens // longest)

    def _halve(self, part: list[Item]) -> bool:
        """Halve the budget. False if a prompt is alone and its rows already run one by one."""
        smallest = self.settings.deterministic or self._budget() <= part[0].request.length
        if len(part) == 1 and smallest:
            return False
        self.too_large.add(self._budget())
        self.halvings += 1
        return True
