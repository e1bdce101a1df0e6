"""Best-of-n: k*w independent answers, of which the k best by entropy, log-probability or a scorer are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from ..errors import D5P4Error
from ..ops.precision import wide
from ..ops.ties import first_of_each, ranked
from ..options import Option
from ..types import Final, Kept
from .beam import Identity
from .common import Checked

Scorer = Callable[..., Any]
"""`scorer(texts) -> numbers`, or `scorer(text, reference) -> number` when references are given; higher is better."""


@dataclass(frozen=True)
class BestOfN(Checked, Identity):
    """Nothing is selected before the end."""

    rank: Annotated[
        Literal["auto", "entropy", "logprob", "scorer"],
        Option("What the best are chosen by; auto: the scorer, or entropy without one."),
    ] = "auto"
    repeats: Annotated[bool, Option("Keep the best even where texts repeat.")] = True

    def check_scorer(self, scorer: Scorer | None, references: Sequence[Any] | None) -> None:
        """Raise where scorer, references and rank do not go together."""
        if self.rank == "scorer" and scorer is None:
            reason = "needs scorer=, a function of texts or of text and reference"
        elif self.rank in ("entropy", "logprob") and scorer is not None:
            reason = "ignores the scorer that was given; leave one of them out"
        elif references is not None and scorer is None:
            raise D5P4Error("give scorer= too, a function of a text and a reference", option="references")
        else:
            return
        raise D5P4Error(reason, option="rank", value=self.rank)

    def finish(self, final: Final, k: int, scorer: Scorer | None, references: Sequence[Any] | None) -> Kept:
        """The k best rows; without `repeats` every text comes once before any comes again."""
        judged = scorer is not None
        if scorer is not None:
            values = torch.tensor(
                [
                    _judge(scorer, texts, None if references is None else (references[prompt],))
                    for prompt, texts in zip(final.prompts.tolist(), final.texts(), strict=True)
                ],
                dtype=wide(final.tie.device),
                device=final.tie.device,
            )
        else:
            values = final.logprob() if self.rank == "logprob" else final.score("entropy", "all")
        order = ranked(values, final.tie)
        rows = (order if self.repeats else first_of_each(order, final.texts()))[:, :k]
        return Kept(rows, values.gather(1, rows) if judged else None)


def _judge(scorer: Scorer, texts: list[str], reference: tuple[Any] | None) -> list[float]:
    """A number for each text; empty texts and NaN are the worst."""
    marks = scorer(texts) if reference is None else [scorer(text, *reference) for text in texts]
    try:
        numbers = [float(mark) for mark in marks]
    except (TypeError, ValueError, OverflowError):
        raise D5P4Error(f"the scorer gave {marks!r}, which is not a number for each text") from None
    if len(numbers) != len(texts):
        raise D5P4Error(f"the scorer gave {len(numbers)} numbers for {len(texts)} texts")
    return [x if text.strip() and not math.isnan(x) else -math.inf for x, text in zip(numbers, texts, strict=True)]
