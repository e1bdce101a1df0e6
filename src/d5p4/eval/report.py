"""The report on grouped answers: every metric that what is given allows, each with its doubt.

Shares, cosines and BLEU are in percent, as in the paper. The unit of chance is the group: the answers of one prompt are
not independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import D5P4Error
from .graders import Grader
from .groups import Group, read_groups
from .lexical import (
    bleu_of_parts,
    bleu_parts,
    distinct,
    ead,
    empirical_entropy,
    f1,
    self_bleu,
    sentence_bleu,
    vocabulary_size,
)
from .representation import average_cosine
from .stats import Figure, best_of, figure, majority, pass_at, pooled_figure, ratio_figure
from .wordpieces import WordPieces

__all__ = ["METRICS", "Encoder", "Group", "Judge", "Report", "read_groups", "report"]

# Name up to "@" -> unit, and what it is.
METRICS = {
    "answers": ("", "answers a group"),
    "different": ("", "different texts among a group's answers"),
    "PPL": ("", "exp of the mean nats a token under the judge"),
    "entropy": ("nats", "of an answer's word pieces"),
    "F1": ("%", "words shared with the nearest reference"),
    "F1@": ("%", "the best of k answers"),
    "BLEU": ("%", "of all answers as one corpus"),
    "BLEU@": ("%", "the best of k answers, one by one"),
    "R-COS": ("%", "the best cosine of k answers with a reference"),
    "D1": ("%", "different word pieces of a group over all"),
    "D2": ("%", "different pairs of neighbours over all"),
    "D3": ("%", "different triples over all"),
    "D1-3": ("%", "mean of the three"),
    "EAD": ("%", "D1 over that of as many uniform draws"),
    "S-BLEU": ("%", "of an answer against the rest of its group"),
    "S-COS": ("%", "cosine of two answers of a group"),
    "pass@": ("%", "groups with a right one among n answers"),
    "maj@": ("%", "groups whose majority of k answers is right"),
    "right": ("", "different right texts a group"),
    "right forms": ("", "right answers the grader tells apart"),
}


class Judge(Protocol):
    """What PPL is taken under: `eval.perplexity.CausalJudge` with start="", as in the paper."""

    def per_text(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Mean nats a token of each text, [n]."""


class Encoder(Protocol):
    """What cosines are taken of: `eval.encoder.Encoder`."""

    def encode(self, texts: Sequence[str]) -> NDArray[Any]:
        """A unit row for each text, [n, D]."""


@dataclass(frozen=True)
class Report:
    """Figures by metric, in the order of a table."""

    figures: dict[str, Figure]
    groups: int
    k: int
    notes: tuple[str, ...] = ()

    COLUMNS = ("metric", "value", "±", "95 %", "groups", "what")

    def __getitem__(self, metric: str) -> Figure:
        return self.figures[metric]

    def table(self) -> list[tuple[str, ...]]:
        """A row for each metric under `COLUMNS`: value, standard error, interval, groups counted."""
        rows: list[tuple[str, ...]] = []
        for name, found in self.figures.items():
            unit, what = _kind(name)
            digits = 3 if unit == "nats" else 2
            value, se, low, high = (f"{x:.{digits}f}" if math.isfinite(x) else "–" for x in found[:4])
            label = f"{name} {unit}".strip()
            rows.append((label, value, se, "–" if low == "–" else f"{low} … {high}", f"{found.n:,}", what))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON; None where there is no number."""
        metrics = {}
        for name, found in self.figures.items():
            unit, what = _kind(name)
            numbers = {key: None if not math.isfinite(x) else x for key, x in found._asdict().items()}
            metrics[name] = {**numbers, "unit": unit, "what": what}
        return {"groups": self.groups, "k": self.k, "metrics": metrics, "notes": list(self.notes)}


def report(
    groups: Iterable[Group],
    *,
    judge: Judge | None = None,
    encoder: Encoder | None = None,
    grader: Grader | None = None,
    k: int | None = None,
    pieces: WordPieces | None = None,
    seed: int = 0,
) -> Report:
    """Measure groups of answers.

    judge    adds PPL; encoder adds S-COS and, with references, R-COS
    grader   adds pass@n, maj@k and how many right answers differ; `countdown` is graded by the prompt, which holds the
             problem, the others by references
    k        of F1@k, BLEU@k, R-COS, pass@k and maj@k: the expected best of k of a group's answers, in closed form. By
             default the fewest answers of a group; groups with fewer are left out of these
    pieces   word pieces to count instead of the paper's
    seed     of the bootstrap

    References add F1, BLEU and EAD; groups without any are left out of the first two.
    """
    skipped = getattr(groups, "skipped", 0)
    groups = list(groups)
    if not groups or not all(group.answers for group in groups):
        raise D5P4Error("a report needs groups with at least one answer each" + (", got none" if not groups else ""))
    sizes = [len(group.answers) for group in groups]
    if k is None:
        k = min(sizes)
    if not 1 <= k <= max(sizes):
        raise D5P4Error(f"k={k} must be between 1 and {max(sizes)}, the most answers of a group")
    notes = _notes(groups, k)
    if skipped:
        notes.append(f"lines with an error instead of answers, left out: {skipped}")
    found: dict[str, Figure] = {}

    def mean(name: str, values: Iterable[float], scale: float = 1.0) -> None:
        found[name] = figure(np.asarray(list(values), dtype=np.float64) * scale, seed)

    mean("answers", sizes)
    mean("different", [len(set(group.answers)) for group in groups])
    if judge is not None:
        sums, counts = _nats(groups, judge)
        found["PPL"] = ratio_figure(sums, counts, np.exp, seed)
        notes.append(f"PPL under {getattr(judge, 'describe', type(judge).__name__)}: every answer weighs the same")
    mean("entropy", [_mean(empirical_entropy(text, pieces) for text in group.answers) for group in groups])
    if any(group.references for group in groups):
        found |= _closeness(groups, k, seed)
    vectors = _vectors(groups, encoder) if encoder is not None else None
    if vectors is not None and any(group.references for group in groups):
        nearest = [answers @ goals.T for answers, goals in vectors]
        mean("R-COS", [_best(rows.max(axis=1), k) if rows.size else np.nan for rows in nearest], 100)
    each = [[distinct(group.answers, n, pieces) for n in (1, 2, 3)] for group in groups]
    for n in (1, 2, 3):
        mean(f"D{n}", [row[n - 1] for row in each], 100)
    mean("D1-3", [_mean(row) for row in each], 100)
    vocabulary = vocabulary_size([text for group in groups for text in group.references], pieces)
    if vocabulary:
        mean("EAD", [ead(group.answers, vocabulary, pieces) for group in groups], 100)
        notes.append(f"EAD: the references hold {vocabulary:,} different word pieces")
    mean("S-BLEU", [self_bleu(group.answers) for group in groups])
    if vectors is not None:
        mean("S-COS", [average_cosine(answers) for answers, _ in vectors], 100)
    if grader is not None:
        found |= _correctness(groups, grader, k, seed)
    return Report(found, len(groups), k, tuple(notes))


def _kind(name: str) -> tuple[str, str]:
    base, at, _ = name.partition("@")
    return METRICS[base + at]


def _notes(groups: Sequence[Group], k: int) -> list[str]:
    sizes = [len(group.answers) for group in groups]
    notes = []
    if min(sizes) < max(sizes):
        notes.append(f"groups have {min(sizes)} to {max(sizes)} answers; metrics at k take the expected best of {k}")
    if single := sizes.count(1):
        notes.append(f"{single} of {len(groups)} groups have one answer: their S-BLEU and S-COS are 0 by definition")
    without = sum(not group.references for group in groups)
    if 0 < without < len(groups):
        notes.append(f"{without} of {len(groups)} groups have no reference")
    return notes


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _best(values: NDArray[Any] | Sequence[float], k: int) -> float:
    """Metric@k of one group; NaN when it has fewer answers."""
    return float(best_of(np.asarray(values)[None], k)[0]) if len(values) >= k else np.nan


def _once(texts: Iterable[str], measure: Callable[[list[str]], NDArray[Any]]) -> tuple[dict[str, int], NDArray[Any]]:
    """What is measured of every different text, and its row there."""
    rows = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    return rows, np.asarray(measure(list(rows)))


def _nats(groups: Sequence[Group], judge: Judge) -> tuple[list[float], list[int]]:
    """Of each group the sum over answers of nats a token, and the answers."""
    rows, values = _once((text for group in groups for text in group.answers), judge.per_text)
    sums = [float(sum(values[rows[text]] for text in group.answers)) for group in groups]
    return sums, [len(group.answers) for group in groups]


def _vectors(groups: Sequence[Group], encoder: Encoder) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Of each group the rows of its answers and of its references."""
    rows, values = _once((text for group in groups for text in (*group.answers, *group.references)), encoder.encode)
    return [
        (values[[rows[text] for text in group.answers]], values[[rows[text] for text in group.references]])
        if group.references
        else (values[[rows[text] for text in group.answers]], values[:0])
        for group in groups
    ]


def _closeness(groups: Sequence[Group], k: int, seed: int) -> dict[str, Figure]:
    """F1 and BLEU against references, each over answers and at k."""
    known = [group for group in groups if group.references]
    shared = [[100 * f1(text, group.references) for text in group.answers] for group in known]
    scores = [[sentence_bleu(text, group.references) for text in group.answers] for group in known]
    parts = [np.sum([bleu_parts(text, group.references) for text in group.answers], axis=0) for group in known]
    found = {
        "F1": ratio_figure([sum(row) for row in shared], [len(row) for row in shared], seed=seed),
        f"F1@{k}": figure([_best(row, k) for row in shared], seed),
        "BLEU": pooled_figure(parts, bleu_of_parts, seed),
        f"BLEU@{k}": figure([_best(row, k) for row in scores], seed),
    }
    without = len(groups) - len(known)
    return {name: value._replace(dropped=value.dropped + without) for name, value in found.items()}


def _correctness(groups: Sequence[Group], grader: Grader, k: int, seed: int) -> dict[str, Figure]:
    """pass@n for n = 1, 2, 4 … and k, the majority of k, and right answers that differ."""
    graded = [(group, grader.grade(group.prompt, group.answers, list(group.references) or None)) for group in groups]
    known = [(group, np.array(marks)) for group, marks in graded if marks is not None]
    if not known:
        needs = f": it needs {grader.needs}" if grader.needs else ""
        raise D5P4Error(f"the grader {grader.name!r} can judge none of the {len(groups)} groups{needs}")
    right = [marks for _, marks in known]
    keys = [[grader.key(text) for text in group.answers] for group, _ in known]
    found: dict[str, list[float]] = {}
    for n in sorted({1, k, *(2**i for i in range(1, k.bit_length()) if 2**i < k)}):
        found[f"pass@{n}"] = [100 * float(pass_at(row[None], n)[0]) if len(row) >= n else np.nan for row in right]
    both = list(zip(keys, right, strict=True))
    found[f"maj@{k}"] = [100.0 * _majority_is_right(own[:k], row) if len(row) >= k else np.nan for own, row in both]
    found["right"] = [
        float(len({text.strip() for text, good in zip(group.answers, row, strict=True) if good}))
        for (group, _), row in zip(known, right, strict=True)
    ]
    found["right forms"] = [float(len({key for key, good in zip(*pair, strict=True) if good})) for pair in both]
    without = len(groups) - len(known)
    return {name: figure([*values, *[np.nan] * without], seed) for name, values in found.items()}


def _majority_is_right(keys: Sequence[Any], right: NDArray[np.bool_]) -> bool:
    chosen = majority(keys)
    return chosen is not None and bool(right[list(keys).index(chosen)])
