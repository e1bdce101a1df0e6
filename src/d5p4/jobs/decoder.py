"""Decode batches one after the other within a token budget, and handle prompts that fail.

The token budget is the largest number of tokens per forward. By default it is just enough to keep the device busy.
A batch takes at most eight such forwards per step. A rank that is killed loses at most one batch. On an H200
(docs/scale.md), a model of 8 B parameters reaches its full speed at 2,048 tokens per forward, and a model of 10 M
parameters between 131,072 and 262,144.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..errors import D5P4Error, NonFiniteLogits
from ..models.quant import weight_count
from ..options import Settings
from ..result import Result
from ..types import Model

NOT_FINITE = "the model gave logits that are not finite; check weights and guidance, or load the weights in float32"
NO_MEMORY = "there is too little memory for this prompt, even alone with one row per forward; use a larger device"


CUDA, OTHERS = (5e12, 8192), (4e10, 1024)
"""How large a forward must be to keep a device (CUDA, or any other) busy: the number of floating-point operations, and
the smallest token budget, in tokens per forward."""
MOST_TOKENS = 1 << 18  # the largest token budget on any device, in tokens per forward


def default_budget(model: Model) -> int:
    """Return the token budget. It is a power of two that depends on the size of the model and the kind of device."""
    operations, least = CUDA if model.head.weight.is_cuda else OTHERS
    tokens = operations / (2 * weight_count(model))
    return min(max(1 << max(0, round(tokens).bit_length() - 1), least), MOST_TOKENS)


@dataclass
class Outcome:
    """The prompts of a batch, each with its result or its error."""

    answered: list[tuple[Any, Result, int]] = field(default_factory=list)  # the int is the index in the result
    failed: list[tuple[Any, str]] = field(default_factory=list)


class Decoder:
    """Decodes batches of items. An item has a `request`, and a `name` for messages, such as "line 3".

    `attempt` decodes items together, and may raise `NonFiniteLogits` or `torch.OutOfMemoryError`. When memory runs out,
    the token budget is halved for the rest of the run, but the batches stay the same. `decode` raises an error if more
    than `patience` prompts fail for lack of memory before any succeeds, as then the prompts are hardly the cause.
    """

    def __init__(
        self, attempt: Callable[[list[Any], Settings], Result], settings: Settings, patience: float = 0
    ) -> None:
        self.attempt, self.settings, self.patience = attempt, settings, patience
        self.halvings = 0  # how often the token budget was halved
        self.too_large: set[int] = set()  # the token budgets with which memory ran out in the last batch
        self.succeeded = False  # whether any prompt has been decoded

    def decode(self, items: Sequence[Any]) -> Outcome:
        outcome, halvings_before = Outcome(), self.halvings
        self.too_large, todo = set(), [list(items)] if items else []
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
                        f"the device is out of memory with {part[0].name} alone, before any prompt was decoded; free "
                        "memory on the device, or use a smaller -k, -w or --gen-length"
                    )
                outcome.failed.append((part[0], NO_MEMORY))
                self.halvings = halvings_before  # no budget is small enough for this prompt, so undo the halvings
        return outcome

    def _try(self, part: list[Any]) -> Result | NonFiniteLogits | None:
        """Return the result, None if memory ran out, or an error with the prompts whose logits are NaN or infinite."""
        settings = self.settings
        if self.halvings and not settings.deterministic:
            settings = replace(settings, max_tokens_per_forward=max(1, self._budget()))
        try:
            return self.attempt(part, settings)
        except NonFiniteLogits as error:
            if not error.prompts:
                raise
            return NonFiniteLogits(str(error), error.prompts)  # a copy: the traceback of `error` keeps tensors alive
        except torch.OutOfMemoryError:
            pass  # we free memory after this block; inside it, the error's traceback still keeps tensors alive
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None

    def _budget(self) -> int:
        return self.settings.max_tokens_per_forward >> self.halvings

    def _most_prompts(self, part: list[Any]) -> int:
        """Return how many of these prompts may be decoded together, given how often the budget was halved."""
        if not self.halvings:
            return len(part)
        tokens = (self.settings.max_tokens_per_call >> self.halvings) // self.settings.pool_size
        return max(1, tokens // max(item.request.length for item in part))

    def _halve(self, part: list[Any]) -> bool:
        """Halve the budget. Return False if a single prompt is left and its forwards cannot become smaller."""
        smallest = self.settings.deterministic or self._budget() <= part[0].request.length
        if len(part) == 1 and smallest:
            return False
        self.too_large.add(self._budget())
        self.halvings += 1
        return True
