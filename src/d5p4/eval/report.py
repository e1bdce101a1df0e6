"""The report on groups of answers: every metric that can be computed from the given data, with its uncertainty.

Shares, cosines and BLEU are in percent, as in the paper. Standard errors and intervals treat groups as independent,
not answers, because the answers to one prompt depend on each other. `eval.stats` explains how intervals are computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import D5P4Error
from . import lexical
from .graders import Grader
from .groups import Group, read_groups
from .similarity import Embed, average_cosine
from .stats import FEWEST, Figure, best_of, majority, mean_figure, pass_at, pooled_figure, ratio

__all__ = ["METRICS", "Group", "Metric", "Report", "read_groups", "report"]


class Metric(NamedTuple):
    """The description of a metric: its unit, what it measures (at most 36 characters), and the range of its values."""

    unit: str
    what: str
    least: float = 0.0
    most: float = math.inf


METRICS = {  # a key is the name of a metric without the number that follows "@"
    "answers": Metric("", "answers per group"),
    "different": Metric("", "different texts per group"),
    "entropy": Metric("nats", "entropy of an answer's words"),
    "F1": Metric("%", "words shared with a reference", 0, 100),
    "F1@": Metric("%", "best F1 of k answers", 0, 100),
    "BLEU": Metric("%", "all answers as one corpus", 0, 100),
    "BLEU@": Metric("%", "best BLEU of k answers", 0, 100),
    "R-COS": Metric("%", "best of k cosines with a reference", -100, 100),
    "D1": Metric("%", "share of words that differ", 0, 100),
    "D2": Metric("%", "share of word pairs that differ", 0, 100),
    "D3": Metric("%", "share of word triples that differ", 0, 100),
    "D1-3": Metric("%", "mean of D1, D2 and D3", 0, 100),
    "EAD": Metric("%", "D1 relative to uniform random draws"),
    "S-BLEU": Metric("%", "BLEU against the group's other texts", 0, 100),
    "S-COS": Metric("%", "cosine of two answers of a group", -100, 100),
    "pass@": Metric("%", "groups with a right answer among n", 0, 100),
    "maj@": Metric("%", "groups whose majority vote is right", 0, 100),
    "right": Metric("", "different right texts per group"),
    "right forms": Metric("", "different right answers per group"),
}


@dataclass(frozen=True)
class Report:
    """The figures of a report, by the name of the metric, in the order of the table."""

    figures: dict[str, Figure]
    groups: int
    k: int
    notes: tuple[str, ...] = ()

    COLUMNS = ("metric", "value", "±", "95 % interval", "groups", "what")

    def __getitem__(self, metric: str) -> Figure:
        return self.figures[metric]

    def table(self) -> list[tuple[str, ...]]:
        """Return one row per metric: name, value, standard error, interval, groups counted, explanation (`COLUMNS`).

        A figure over too few groups has a dash in place of its standard error and interval.
        """
        rows: list[tuple[str, ...]] = []
        for name, figure in self.figures.items():
            metric = _metric(name)
            digits = 3 if metric.unit == "nats" else 2
            value, se, low, high = (f"{x:.{digits}f}" if math.isfinite(x) else "–" for x in figure[:4])
            label = f"{name} {metric.unit}".strip()
            doubt = ("–", "–") if low == "–" else (se, f"{low} … {high}")
            rows.append((label, value, *doubt, f"{figure.n:,}", metric.what))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return the whole report, ready for JSON. A value that is not a finite number becomes None."""
        metrics = {}
        for name, figure in self.figures.items():
            metric = _metric(name)
            numbers = {key: None if not math.isfinite(x) else x for key, x in figure._asdict().items()}
            metrics[name] = {**numbers, "unit": metric.unit, "what": metric.what}
        return {"groups": self.groups, "k": self.k, "metrics": metrics, "notes": list(self.notes)}


def report(
    groups: Iterable[Group],
    *,
    embed: Embed | None = None,
    grader: Grader | None = None,
    k: int | None = None,
) -> Report:
    """Compute every metric of the groups that the arguments allow.

    embed   turns texts into vectors of length 1 (`similarity.sentence_encoder`); adds S-COS and, with references, R-COS
    grader  adds pass@n, maj@k and the number of different right answers. Groups that the grader cannot judge are left
            out
    k       the number of answers in F1@k, BLEU@k, R-COS, pass@k and maj@k. The default is the number of answers of the
            smallest group. Groups with fewer than k answers are left out of these metrics

    F1@k, BLEU@k and R-COS are the expected best values among k answers of a group, computed in closed form. If groups
    have references, F1, BLEU and EAD are added, if the grader's references are answers. Groups without
    references are left out of F1 and BLEU.
    """
    skipped = getattr(groups, "skipped", 0)
    groups = list(groups)
    if not groups or not all(group.answers for group in groups):
        raise D5P4Error("a report needs groups with at least one answer each" + (", got none" if not groups else ""))
    sizes = [len(group.answers) for group in groups]
    if k is None:
        k = min(sizes)
    if not 1 <= k <= max(sizes):
        raise D5P4Error(f"k={k} must be between 1 and {max(sizes)}, the number of answers of the largest group")
    notes = _notes(groups, k)
    if skipped:
        notes.append(f"lines that were left out because they hold an error instead of answers: {skipped}")
    correctness = _correctness(groups, grader, k) if grader is not None else {}
    if grader is not None and not grader.compares:
        groups = [replace(group, references=()) for group in groups]
    figures: dict[str, Figure] = {"answers": Figure(_mean(sizes), math.nan, math.nan, math.nan, len(sizes))}

    def mean(name: str, values: Iterable[float], scale: float = 1.0) -> None:
        figures[name] = _mean_figure(name, [scale * value for value in values])

    figures["different"] = mean_figure([len(set(group.answers)) for group in groups], 0, max(sizes))
    mean("entropy", [_mean(lexical.empirical_entropy(text) for text in group.answers) for group in groups])
    if any(group.references for group in groups):
        figures |= _closeness(groups, k)
    vectors = _vectors(groups, embed) if embed is not None else None
    if vectors is not None and any(group.references for group in groups):
        nearest = [answers @ goals.T for answers, goals in vectors]
        mean("R-COS", [_best(rows.max(axis=1), k) if rows.size else math.nan for rows in nearest], 100)
    shares = [[lexical.distinct(group.answers, n) for n in (1, 2, 3)] for group in groups]
    for n in (1, 2, 3):
        mean(f"D{n}", [row[n - 1] for row in shares], 100)
    mean("D1-3", [_mean(row) for row in shares], 100)
    _, vocabulary = lexical.unit_counts([text for group in groups for text in group.references])
    if vocabulary:
        mean("EAD", [lexical.ead(group.answers, vocabulary) for group in groups], 100)
        notes.append(f"EAD uses the {vocabulary:,} different words of the references")
    mean("S-BLEU", [lexical.self_bleu(group.answers) for group in groups])
    if vectors is not None:
        mean("S-COS", [average_cosine(answers) for answers, _ in vectors], 100)
    figures |= correctness
    if any(figure.n < FEWEST for figure in figures.values()):
        notes.append(f"figures over fewer than {FEWEST} groups have no interval")
    return Report(figures, len(groups), k, tuple(notes))


def _metric(name: str) -> Metric:
    base, at, _ = name.partition("@")
    return METRICS[base + at]


def _mean_figure(name: str, values: Sequence[float]) -> Figure:
    metric = _metric(name)
    return mean_figure(values, metric.least, metric.most)


def _notes(groups: Sequence[Group], k: int) -> list[str]:
    sizes = [len(group.answers) for group in groups]
    notes = []
    if min(sizes) < max(sizes):
        notes.append(f"groups have {min(sizes)} to {max(sizes)} answers; metrics at k are for {k} answers")
    if single := sizes.count(1):
        notes.append(f"{single} of {len(groups)} groups have one answer: their S-BLEU and S-COS are 0 by definition")
    without = sum(not group.references for group in groups)
    if 0 < without < len(groups):
        notes.append(f"{without} of {len(groups)} groups have no reference")
    return notes


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _best(values: NDArray[Any] | Sequence[float], k: int) -> float:
    """Return the expected best of k random values of a group, or NaN if the group has fewer than k values."""
    return float(best_of(np.asarray(values)[None], k)[0]) if len(values) >= k else math.nan


def _vectors(groups: Sequence[Group], embed: Embed) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Return for each group the vectors of its answers and the vectors of its references."""
    texts = dict.fromkeys(text for group in groups for text in (*group.answers, *group.references))
    values, rows = embed(list(texts)), {text: row for row, text in enumerate(texts)}  # every text is embedded once

    def take(texts: Sequence[str]) -> NDArray[Any]:
        return values[[rows[text] for text in texts]] if texts else values[:0]

    return [(take(group.answers), take(group.references)) for group in groups]


def _closeness(groups: Sequence[Group], k: int) -> dict[str, Figure]:
    """Return the figures F1 and BLEU over all answers, and F1@k and BLEU@k."""
    known = [group for group in groups if group.references]
    shared = [[100 * lexical.f1(text, group.references) for text in group.answers] for group in known]
    scores = [[lexical.sentence_bleu(text, group.references) for text in group.answers] for group in known]
    parts = [np.sum([lexical.bleu_parts(text, group.references) for text in group.answers], axis=0) for group in known]
    figures = {
        "F1": pooled_figure([(sum(row), len(row)) for row in shared], ratio, 0, 100),
        f"F1@{k}": _mean_figure("F1@", [_best(row, k) for row in shared]),
        "BLEU": pooled_figure(parts, lexical.bleu_of_parts, 0, 100),
        f"BLEU@{k}": _mean_figure("BLEU@", [_best(row, k) for row in scores]),
    }
    without = len(groups) - len(known)
    return {name: figure._replace(dropped=figure.dropped + without) for name, figure in figures.items()}


def _correctness(groups: Sequence[Group], grader: Grader, k: int) -> dict[str, Figure]:
    """Return pass@n for n = 1, 2, 4 … and k, maj@k, and the numbers of different right texts and answers."""
    graded = [(group, grader.grade(group.prompt, group.answers, list(group.references) or None)) for group in groups]
    known = [(group, np.array(marks)) for group, marks in graded if marks is not None]
    if not known:
        needs = f": it needs {grader.needs}" if grader.needs else ""
        raise D5P4Error(f"the grader {grader.name!r} can judge none of the {len(groups)} groups{needs}")
    right = [marks for _, marks in known]
    keys = [[grader.key(text) for text in group.answers] for group, _ in known]
    unknown = [math.nan] * (len(groups) - len(known))
    figures = {}
    for n in sorted({1, k, *(2**i for i in range(1, k.bit_length()) if 2**i < k)}):
        shares = [100 * float(pass_at(marks[None], n)[0]) if len(marks) >= n else math.nan for marks in right]
        figures[f"pass@{n}"] = _mean_figure("pass@", shares + unknown)
    votes = [
        100.0 * _majority_is_right(own[:k], marks) if len(marks) >= k else math.nan
        for own, marks in zip(keys, right, strict=True)
    ]
    figures[f"maj@{k}"] = _mean_figure("maj@", votes + unknown)
    texts = [
        len({text.strip() for text, good in zip(group.answers, marks, strict=True) if good}) for group, marks in known
    ]
    forms = [grader.count_right(group.answers, marks.tolist()) for group, marks in known]
    most = max(map(len, right))
    figures["right"] = mean_figure([*texts, *unknown], 0, most)
    figures["right forms"] = mean_figure([*forms, *unknown], 0, most)
    return figures


def _majority_is_right(keys: Sequence[Any], right: NDArray[np.bool_]) -> bool:
    chosen = majority(keys)
    return chosen is not None and bool(right[list(keys).index(chosen)])
