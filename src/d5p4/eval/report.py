"""The report on groups of answers: every metric that can be computed from the given data, with its uncertainty.

Shares, cosines and BLEU are in percent, as in the paper. Standard errors and intervals treat groups as independent,
not answers, because the answers to one prompt depend on each other. `eval.stats` explains how intervals are computed.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import D5P4Error
from . import lexical
from .graders import Grader
from .groups import Group, read_groups
from .stats import FEWEST, Figure, average_cosine, best_of, majority, mean_figure, pass_at

__all__ = ["METRICS", "Group", "Metric", "Report", "read_groups", "report"]

Embed = Callable[[Sequence[str]], "NDArray[np.floating]"]
"""`embed(texts)` returns one vector of length 1 per text: [n, D]."""


class Metric(NamedTuple):
    """The description of a metric: its unit, what it measures (at most 36 characters), and the range of its values."""

    unit: str
    what: str
    least: float = 0.0
    most: float = math.inf


METRICS = {  # a key is the name of a metric without the number that follows "@"
    "answers": Metric("", "answers per group"),
    "different": Metric("", "different texts per group"),
    "near copies": Metric("", "near copies of earlier texts"),
    "distance": Metric("%", "distance of two answers of a group", 0, 100),
    "entropy": Metric("nats", "entropy of an answer's words"),
    "F1": Metric("%", "words shared with a reference", 0, 100),
    "F1@": Metric("%", "best F1 of k answers", 0, 100),
    "BLEU": Metric("%", "mean BLEU of an answer", 0, 100),
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
        """Return one row per metric, with the cells `COLUMNS`. A dash stands for a number that is not known."""
        rows: list[tuple[str, ...]] = []
        for name, figure in self.figures.items():
            metric = _metric(name)
            digits = 3 if metric.unit == "nats" else 2
            value, se, low, high = (f"{x:.{digits}f}" if math.isfinite(x) else "–" for x in figure[:4])
            doubt = ("–", "–") if low == "–" else (se, f"{low} … {high}")
            rows.append((f"{name} {metric.unit}".strip(), value, *doubt, f"{figure.n:,}", metric.what))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return the whole report, ready for JSON. A value that is not a finite number becomes None."""
        metrics = {}
        for name, figure in self.figures.items():
            numbers = {key: x if math.isfinite(x) else None for key, x in figure._asdict().items()}
            metrics[name] = {**numbers, "unit": _metric(name).unit, "what": _metric(name).what}
        return {"groups": self.groups, "k": self.k, "metrics": metrics, "notes": list(self.notes)}


def report(
    groups: Iterable[Group], *, embed: Embed | None = None, grader: Grader | None = None, k: int | None = None
) -> Report:
    """Compute every metric of the groups that the arguments allow.

    embed   turns texts into vectors of length 1 (`sentence_encoder`); adds S-COS and, with references, R-COS
    grader  adds pass@n, maj@k and the number of different right answers, over the groups that it can judge
    k       the number of answers in F1@k, BLEU@k, R-COS, pass@k and maj@k. The default is the number of answers of the
            smallest group. Groups with fewer than k answers are left out of these metrics

    F1, BLEU and EAD need references that are answers; F1 and BLEU are means over the answers of a group, then over
    groups. F1@k, BLEU@k and R-COS are the expected best values among k answers of a group, in closed form.
    """
    skipped, groups = getattr(groups, "skipped", 0), list(groups)
    if not groups or not all(group.answers for group in groups):
        raise D5P4Error("a report needs groups with at least one answer each" + (", got none" if not groups else ""))
    sizes = [len(group.answers) for group in groups]
    k = min(sizes) if k is None else k
    if not 1 <= k <= max(sizes):
        raise D5P4Error(f"k={k} must be between 1 and {max(sizes)}, the number of answers of the largest group")
    notes = []
    if min(sizes) < max(sizes):
        notes.append(f"groups have {min(sizes)} to {max(sizes)} answers; metrics at k are for {k} answers")
    if single := sizes.count(1):
        notes.append(f"{single} of {len(groups)} groups have one answer: their S-BLEU and S-COS are 0 by definition")
    if 0 < (without := sum(not group.references for group in groups)) < len(groups):
        notes.append(f"{without} of {len(groups)} groups have no reference")
    if skipped:
        notes.append(f"lines that were left out because they hold an error instead of answers: {skipped}")
    correctness = _correctness(groups, grader, k) if grader is not None else {}
    if grader is not None and not grader.compares:
        groups = [replace(group, references=()) for group in groups]
    figures = {"answers": Figure(float(np.mean(sizes)), math.nan, math.nan, math.nan, len(sizes))}

    def mean(name: str, values: Iterable[float], scale: float = 1.0) -> None:
        figures[name] = _mean_figure(name, [scale * value for value in values])

    figures["different"] = mean_figure([len(set(group.answers)) for group in groups], 0, max(sizes))
    apart = [lexical.distances(group.answers) for group in groups]
    figures["near copies"] = mean_figure([sum(lexical.near_copies(rows)) for rows in apart], 0, max(sizes))
    means = [sum(map(sum, rows)) / (len(rows) - 1) / len(rows) if len(rows) > 1 else math.nan for rows in apart]
    mean("distance", means, 100)
    mean("entropy", [float(np.mean([*map(lexical.empirical_entropy, group.answers)])) for group in groups])
    known = [group for group in groups if group.references]
    for name, scale, closeness in (("F1", 100, lexical.f1), ("BLEU", 1, lexical.sentence_bleu)) if known else ():
        scores = [np.array([closeness(text, group.references) for text in group.answers]) for group in known]
        mean(name, [row.mean() for row in scores], scale)
        mean(f"{name}@{k}", [_best(row, k) for row in scores], scale)
    vectors = _vectors(groups, embed) if embed is not None else None
    if vectors is not None and known:
        nearest = [answers @ goals.T for answers, goals in vectors]
        mean("R-COS", [_best(rows.max(axis=1), k) if rows.size else math.nan for rows in nearest], 100)
    shares = np.array([[lexical.distinct(group.answers, n) for n in (1, 2, 3)] for group in groups])
    for n in (1, 2, 3):
        mean(f"D{n}", shares[:, n - 1], 100)
    mean("D1-3", shares.mean(axis=1), 100)
    _, vocabulary = lexical.unit_counts([text for group in groups for text in group.references])
    if vocabulary:
        mean("EAD", [lexical.ead(*lexical.unit_counts(group.answers), vocabulary) for group in groups], 100)
        notes.append(f"EAD uses the {vocabulary:,} different words of the references")
    mean("S-BLEU", [lexical.self_bleu(group.answers) for group in groups])
    if vectors is not None:
        mean("S-COS", [average_cosine(answers) for answers, _ in vectors], 100)
    figures |= correctness
    if any(figure.n < FEWEST for figure in figures.values()):
        notes.append(f"figures over fewer than {FEWEST} groups have no interval")
    return Report(figures, len(groups), k, tuple(notes))


def sentence_encoder(folder: str | Path, device: object = None, remote_code: bool = False) -> Embed:
    """Return an `Embed` by the sentence-transformers model in a folder. Its own code runs only with `remote_code`."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as reason:
        raise D5P4Error("similarity needs sentence-transformers: pip install 'd5p4[eval]'") from reason
    try:
        where = None if device is None else str(device)
        model = SentenceTransformer(str(folder), device=where, trust_remote_code=remote_code, local_files_only=True)
    except Exception as reason:  # the library raises errors of many unrelated classes
        first = (str(reason).strip() or "no reason given").splitlines()[0]
        what = f"cannot be read as a sentence encoder ({type(reason).__name__}: {first})"
        raise D5P4Error(f"{str(folder)!r} {what}") from reason

    def embed(texts: Sequence[str]) -> NDArray[np.floating]:
        return model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)

    return embed


def _metric(name: str) -> Metric:
    base, at, _ = name.partition("@")
    return METRICS[base + at]


def _mean_figure(name: str, values: Sequence[float]) -> Figure:
    return mean_figure(values, *_metric(name)[2:])


def _best(values: NDArray[Any], k: int) -> float:
    """Return the expected best of k random values of a group, or NaN if the group has fewer than k values."""
    return float(best_of(values[None], k)[0]) if len(values) >= k else math.nan


def _vectors(groups: Sequence[Group], embed: Embed) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    texts = list(dict.fromkeys(text for group in groups for text in (*group.answers, *group.references)))
    values, rows = embed(texts), {text: row for row, text in enumerate(texts)}  # every text is embedded once
    places = [[np.array([*map(rows.get, part)], np.int64) for part in (one.answers, one.references)] for one in groups]
    return [(values[answers], values[references]) for answers, references in places]


def _correctness(groups: Sequence[Group], grader: Grader, k: int) -> dict[str, Figure]:
    """Return pass@n for n = 1, 2, 4 … and k, maj@k, and the numbers of different right texts and answers."""
    graded = [(group, grader.grade(group.prompt, group.answers, list(group.references) or None)) for group in groups]
    known = [(group, np.array(marks)) for group, marks in graded if marks is not None]
    if not known:
        needs = f": it needs {grader.needs}" if grader.needs else ""
        raise D5P4Error(f"the grader {grader.name!r} can judge none of the {len(groups)} groups{needs}")
    figures = {}
    for n in sorted({k, *(2**i for i in range(k.bit_length()))}):
        chances = [100 * float(pass_at(marks[None], n)[0]) for _, marks in known if len(marks) >= n]
        figures[f"pass@{n}"] = _mean_figure("pass@", chances)
    votes, texts, forms = list[float](), list[int](), list[int]()
    for group, marks in known:
        keys = [grader.key(text) for text in group.answers]
        if len(marks) >= k:
            chosen = majority(keys[:k])
            votes.append(100.0 * (chosen is not None and bool(marks[keys.index(chosen)])))
        texts.append(len({text.strip() for text, good in zip(group.answers, marks, strict=True) if good}))
        forms.append(grader.count_right(group.answers, marks.tolist()))
    most = max(len(marks) for _, marks in known)
    figures[f"maj@{k}"] = _mean_figure("maj@", votes)
    return figures | {"right": mean_figure(texts, 0, most), "right forms": mean_figure(forms, 0, most)}
