"""Best-of-n decodes k*w independent answers and keeps the k best by entropy, log-probability or a scorer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch

from ..errors import D5P4Error, shown
from ..ops.precision import wide
from ..ops.ties import first_of_each, ranked
from ..options import Checked, Option
from ..types import Kept
from .beam import Identity

if TYPE_CHECKING:
    from ..decode.answers import Final

Scorer = Callable[..., Any]
"""`scorer(texts) -> numbers`, or `scorer(text, reference) -> number` if references are given. Higher is better."""


@dataclass(frozen=True)
class BestOfN(Checked, Identity):
    """Selects nothing during the decode. `finish` keeps the k best answers."""

    score_kind = "the scorer's number"

    rank: Annotated[
        Literal["auto", "entropy", "logprob", "scorer"],
        Option("How answers are ranked; auto: by the scorer, else log-probability (carry_over) or entropy."),
    ] = "auto"
    repeats: Annotated[bool, Option("Keep the best answers even if texts repeat.")] = True

    def check_scorer(self, method: str, scorer: Any = None, references: Any = None) -> None:
        """Raise an error if scorer, references and rank do not fit together."""
        if self.rank == "scorer" and scorer is None:
            reason = "needs scorer=, a function of texts or of a text and a reference"
        elif self.rank in ("entropy", "logprob") and scorer is not None:
            reason = "ignores the scorer that was given; leave out rank or scorer"
        elif references is not None and scorer is None:
            raise D5P4Error("need scorer=, a function of a text and a reference", option="references")
        else:
            return
        raise D5P4Error(reason, option="rank", value=self.rank)

    def finish(self, final: Final, k: int) -> Kept:
        """Return the k best rows. If `repeats` is False, rows that repeat the text of a better row come last."""
        device, scorer, references = final.tie.device, self.call.scorer, final.references
        if scorer is not None:
            own = [None] * len(final.tie) if references is None else [(reference,) for reference in references]
            given = [_judge(scorer, *pair) for pair in zip(final.texts(), own, strict=True)]
            values = torch.tensor(given, dtype=wide(device), device=device)
        elif self.rank == "logprob" or (self.rank == "auto" and final.carry_over):
            values = final.logprob()
        else:
            values = final.score("entropy", "all")
        order = ranked(values, final.tie)
        rows = (order if self.repeats else first_of_each(order, final.texts()))[:, :k]
        return Kept(rows, None if scorer is None else values.gather(1, rows))


def _judge(scorer: Scorer, texts: list[str], reference: tuple[Any] | None) -> list[float]:
    """Return the scorer's number for each text. Minus infinity replaces the number of an empty text."""
    marks = scorer(texts) if reference is None else [scorer(text, *reference) for text in texts]
    try:
        numbers = [float(mark) for mark in marks]
    except (TypeError, ValueError, OverflowError):
        raise D5P4Error(f"the scorer returned {marks!r}; it must return one number per text") from None
    if len(numbers) != len(texts):
        raise D5P4Error(f"the scorer returned {len(numbers)} numbers for {len(texts)} texts")
    for number, text in zip(numbers, texts, strict=True):
        if math.isnan(number):
            raise D5P4Error(f"the scorer returned NaN for {shown(text)}; return a number, or -inf for the worst text")
    return [x if text.strip() else -math.inf for x, text in zip(numbers, texts, strict=True)]
