"""The answers to one prompt as Python texts and numbers instead of tensors, for JSON and for tables."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .types import Result


@dataclass(frozen=True, repr=False)
class Answers:
    """The answers to prompt number `place` of a result. Scores and counts are Python numbers, not tensors. A NaN or
    infinite score is None."""

    result: Result
    place: int

    def __repr__(self) -> str:
        return f"Answers(prompt {self.place}: {self.distinct} of {len(self)} differ; texts={self.texts})"

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)

    def _repr_html_(self) -> str:
        """Return a table of the answers, for notebooks."""
        row = "<tr><td>{}</td><td>{}</td><td>{}</td><td style='text-align:left;white-space:pre-wrap'>{}</td></tr>"
        head = "<tr><th>#</th><th>score</th><th>distance</th><th>answer</th></tr>"
        numbers = zip(self.score, self.distance, self.texts, strict=True)
        rows = [row.format(i + 1, *map(_cell, cells)) for i, cells in enumerate(numbers)]
        return f"<table>{head}{''.join(rows)}</table>"

    @property
    def texts(self) -> list[str]:
        return self.result.texts[self.place]

    @property
    def score(self) -> list[float | None]:
        return finite(self.result.score[self.place].tolist())

    @property
    def distance(self) -> list[float | None]:
        """The distance of each answer to the nearest other answer, which is 1 minus the similarity of the two.

        The distance of equal texts is set to 0. Their similarity may be less than 1, because it also compares tokens
        after the end of the text.
        """
        repeats = {i for i, text in enumerate(self.texts) if self.texts.count(text) > 1}
        others = [[s for j, s in enumerate(row) if j != i] for i, row in enumerate(self._similarity)]
        return finite(
            [0.0 if i in repeats else max(0.0, 1 - max(row)) if row else None for i, row in enumerate(others)]
        )

    @property
    def _similarity(self) -> list[list[float]]:
        return self.result.similarity[self.place].tolist()

    @property
    def distinct(self) -> int:
        return int(self.result.distinct[self.place])

    @property
    def rows(self) -> int:
        return int(self.result.rows[self.place])

    @property
    def rows_nominal(self) -> int:
        return int(self.result.rows_nominal[self.place])

    @property
    def nfe(self) -> int:
        return int(self.result.nfe[self.place])

    @property
    def mean_cosine(self) -> float | None:
        """The mean of the similarity over all pairs of answers."""
        pairs = [s for i, row in enumerate(self._similarity) for j, s in enumerate(row) if j != i]
        return finite(sum(pairs) / len(pairs)) if pairs else None

    @property
    def mean_score(self) -> float | None:
        scores = self.result.score[self.place].tolist()
        return finite(sum(scores) / len(scores))

    def to_dict(self) -> dict[str, Any]:
        result, place = self.result, self.place
        record = {
            "answers": self.texts,
            "tokens": result.answers[place],
            "score": self.score,
            "score_kind": result.score_kind,
            "distance": self.distance,
            "distinct": self.distinct,
            "logdet": float(result.logdet[place]),
            "rows": self.rows,
            "rows_nominal": self.rows_nominal,
            "nfe": self.nfe,
            "seed": result.seed,
            "method": result.settings.method,
            "settings": result.settings.to_dict(),
        }
        if result.logprobs is not None and result.reveal_step is not None:
            record |= {"logprobs": result.logprobs[place], "reveal_step": result.reveal_step[place]}
        return record


def _cell(value: float | str | None) -> str:
    return "–" if value is None else escape(value) if isinstance(value, str) else f"{value:.3f}"


def finite(value: Any) -> Any:
    """Replace every NaN and infinity in a value by None, because JSON has no such numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
