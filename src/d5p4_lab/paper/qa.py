"""Search compared with best-of-n on prompts that have reference answers, in all metrics of the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from d5p4.eval.lexical import (
    bleu_of_parts,
    bleu_parts,
    distinct,
    ead_of_counts,
    empirical_entropy,
    f1,
    piece_counts,
    sentence_bleu,
    word_pieces,
)

from ..statistics import Figure, figure, paired_difference, pooled_figure
from .answers import answers, numbers_of
from .continuation import (
    BOX,
    PAPER,
    POOL,
    best_internal,
    best_perplexity,
    by_chance,
    columns,
    lowest,
    measures,
    pool,
    search,
    trees,
)
from .drawing import EDGE, STYLES, Claim, Drawing, Table, agreed, all_decided, bars, decided, listed, pyplot, shown
from .plane import perplexity
from .rows import Row
from .setup import Case, Digest, Experiment, Setup

REPEATED = (
    "Repeated is the share of word triples that occurred earlier in the same answer. In confidence order a small model "
    "repeats itself, which lowers its perplexity, so low perplexity does not prove quality here."
)


def cases(setup: Setup) -> list[Case]:
    guidance = setup["guidance"]
    return [
        pool(setup, guidance),
        search(setup, "greedy beam", {"method": "greedy-beam"}, guidance),
        search(setup, "diverse beam", {"method": "diverse-beam", "alpha": setup["alpha"]}, guidance),
        search(setup, "D5P4+", {"method": "d5p4", "beta": setup["beta"]}, guidance),
        search(setup, "D5P4^P", {"method": "d5p4-p", "beta": setup["beta"]}, guidance),
        *trees(setup, guidance),
    ]


# The ways to choose k answers from a pool of independent answers.
WAYS = ("k independent", "best of n, perplexity", "best of n, internal", "best of n, F1 oracle")


def _reduce(setup: Setup, case: Case, unit: int, row: Row, scores: Mapping[str, Row]) -> Row:
    """Compute the measures of k answers, and the counts that other metrics need, for each way to choose the answers."""
    ways = {case.group: list(range(len(row["texts"])))}
    if case.group == POOL:
        oracle = lowest([-f1(text, row["references"]) for text in row["texts"]], setup["k"])
        chosen = (by_chance(setup, unit, row), best_perplexity(setup, scores), best_internal(setup), oracle)
        ways = dict(zip(WAYS, chosen, strict=True))
    by_way = {}
    for name, places in ways.items():
        texts, references = [row["texts"][place] for place in places], row["references"]
        lexical = [100 * distinct(texts, n) for n in (1, 2, 3)]
        entropy = float(np.mean([empirical_entropy(text) for text in texts]))
        by_way[name] = measures(setup, row, scores, places) | {
            **{f"D{n}": round(value, 4) for n, value in zip((1, 2, 3), lexical, strict=True)},
            "entropy": round(entropy, 6),
            "BLEU parts": np.sum([bleu_parts(text, references) for text in texts], axis=0).tolist(),
            "BLEU@k": round(max(sentence_bleu(text, references) for text in texts), 5),
            "pieces": piece_counts(texts),
        }
    return {"ways": by_way, "new": _new_pieces(setup, case.name)[unit]}


@lru_cache(maxsize=2)
def _new_pieces(setup: Setup, name: str) -> list[int]:
    """For each unit: the number of word pieces in its references that are not in the references of earlier units.

    The sum over units is the vocabulary size in the metric EAD (expectation-adjusted distinct).
    """
    (case,) = (case for case in setup.cases if case.name == name)
    rows = setup.rows(answers(setup, case))
    if all(unit in rows for unit in range(case.units)):
        references = [rows[unit]["references"] for unit in range(case.units)]
    else:
        references = [example.references for example in setup.task(case.task, case.units).examples]
    sizes = [0]
    seen: set[int] = set()
    for texts in references:
        seen |= {piece for text in texts for piece in word_pieces(text)}
        sizes.append(len(seen))
    return np.diff(sizes).tolist()


def _figures(rows: Sequence[Row], vocabulary: int, k: int, judges: Sequence[str]) -> dict[str, Any]:
    """For one way to choose answers: the value of every metric of `d5p4 score`, and the number of digits to show."""
    m = columns(rows)
    adjusted = figure([100 * ead_of_counts(row["pieces"][0], row["pieces"][1], vocabulary) for row in rows])
    metrics: dict[str, Any] = {f"PPL, {judge}": (perplexity(m[f"nats {judge}"]), 1) for judge in judges}
    metrics |= {"entropy": (figure(m["entropy"]), 3), "F1": (figure(100 * m["F1"]), 2)}
    metrics |= {f"F1@{k}": (figure(100 * m["F1@k"]), 2)}
    parts = np.array([row["BLEU parts"] for row in rows])
    metrics |= {"BLEU": (pooled_figure(parts, bleu_of_parts), 2), f"BLEU@{k}": (figure(m["BLEU@k"]), 2)}
    metrics |= {"R-COS": (figure(100 * m["R-COS"]), 2)}
    metrics |= {metric: (figure(m[metric]), 2) for metric in ("D1", "D2", "D3")}
    metrics |= {"D1-3": (figure(100 * m["D1-3"]), 2), "EAD": (adjusted, 2), "S-BLEU": (figure(m["S-BLEU"]), 2)}
    return metrics | {metric: (figure(100 * m[metric]), 2) for metric in ("S-COS", "repeated")}


def draw(setup: Setup) -> Drawing:
    judges, k = setup["judges"], setup["k"]
    by_way: dict[str, list[Row]] = {}
    vocabulary = 0
    for case in setup.cases:
        sets = numbers_of(setup, case)
        vocabulary = sum(row["new"] for row in sets)  # the same in all cases, because all have the same references
        by_way |= {name: [row["ways"][name] for row in sets] for name in sets[0]["ways"]}
    order = [name for name in (*WAYS[:3], *by_way) if name != WAYS[3]]
    by_way = {name: by_way[name] for name in dict.fromkeys((*order, WAYS[3]))}
    measured = {name: columns(rows) for name, rows in by_way.items()}
    table_rows = []
    figures: dict[str, Mapping[str, Any]] = {}
    for name, rows in by_way.items():
        cells = _figures(rows, vocabulary, k, judges)
        figures[name] = {metric: value for metric, (value, _) in cells.items()}
        table_rows.append([name, *(shown(value, digits) for value, digits in cells.values())])
    note = (
        f"{len(by_way['D5P4+'])} prompts, k = {k}, w = {setup['w']}, guidance {setup['guidance']:g}; all figures but "
        f"perplexity and entropy (nats) are in %. Best of n takes {k} of {k * setup['w']} independent answers: by "
        f"perplexity under {judges[0]}, which also judges the results, or by the model's own score of an answer "
        f"(internal, `Result.score`). {REPEATED}"
    )
    table = Table("Every metric", ["method", *next(iter(figures.values()))], table_rows, note)
    return Drawing([table], _figure(setup, figures), {"metrics": figures}, _claims(setup, measured))


def _claims(setup: Setup, measured: dict[str, dict[str, np.ndarray]]) -> list[Claim]:
    def less(metric: str, a: str, b: str) -> Figure:
        """Return how much lower the metric is for the answers of way `a` than for those of way `b`."""
        return paired_difference(measured[b][metric], measured[a][metric])

    def more_different(claim: str, paper: str, rival: str) -> Claim:
        bleu, cosine = less("S-BLEU", "D5P4+", rival), less("S-COS", "D5P4+", rival)
        values = f"S-BLEU lower by {shown(bleu)} points, S-COS lower by {shown(cosine, 2, 100)} points"
        return Claim(claim, f"S-BLEU 39.00, S-COS 95.16 against {paper}", values, all_decided([bleu, cosine]))

    def higher(claim: str, paper: str, metric: str, a: str, b: str) -> Claim:
        gain = less(metric, b, a)
        return Claim(claim, paper, f"difference: {shown(gain, 2, 100)} points", decided(gain))

    search = "D5P4's answers differ more than those of {}, at equal nominal rows"
    nearer = "D5P4's best answer is nearer to the reference than that of {} (F1@k)"
    kept = [less(f"nats {judge}", "D5P4+", "k independent") for judge in setup["judges"]]
    return [
        more_different(search.format("best of n by perplexity"), "46.27, 96.40", "best of n, perplexity"),
        more_different(search.format("best of n by the model's own score"), "45.57, 96.12", "best of n, internal"),
        more_different("D5P4's answers differ more than those of diverse beam search", "40.74, 95.36", "diverse beam"),
        higher(nearer.format("diverse beam search"), "22.71 against 22.55", "F1@k", "D5P4+", "diverse beam"),
        higher(nearer.format("k independent answers"), "22.71 against 20.74", "F1@k", "D5P4+", "k independent"),
        Claim(
            "D5P4 keeps or lowers the perplexity of independent sampling",
            "6.40 against 6.46",
            f"log perplexity of independent sampling minus that of D5P4: {listed(setup['judges'], kept, 3)}",
            agreed([decided(d) for d in kept]),
            "repetition also lowers perplexity, and the share of repeated word triples is higher by "
            f"{shown(less('repeated', 'k independent', 'D5P4+'), 2, 100)} points in D5P4's answers",
        ),
        higher(
            "D5P4's answers have more different n-grams than independent ones (D1-3)",
            "57.54 against 55.41",
            "D1-3",
            "D5P4+",
            "k independent",
        ),
        higher(
            "Guidance in the first half only (D5P4^P) raises accuracy (F1)",
            "20.71 against 19.02",
            "F1",
            "D5P4^P",
            "D5P4+",
        ),
        higher("D5P4^P also raises the best answer's F1", "24.84 against 22.71", "F1@k", "D5P4^P", "D5P4+"),
    ]


def _figure(setup: Setup, figures: dict[str, Mapping[str, Any]]) -> object:
    plt = pyplot()
    shown_metrics = (f"F1@{setup['k']}", "S-BLEU", "S-COS", f"PPL, {setup['judges'][-1]}")
    better = ("higher", "lower", "lower", "lower")
    picture, axes = plt.subplots(1, 4, figsize=(11, 3.2), sharey=True)
    names = list(figures)
    for axis, metric, way in zip(axes, shown_metrics, better, strict=True):
        for row, name in enumerate(names):
            f = figures[name][metric]
            style = STYLES.get(name, STYLES["independent" if name == "k independent" else "best of n"])
            axis.errorbar(f.value, row, xerr=bars([f]), color=style["color"], marker=style["marker"], **EDGE)
        axis.set_xlabel(f"{metric} ({way}: better)")
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    return picture


EXPERIMENT = Experiment(
    name="qa",
    title="Answers to prompts with references",
    paper="QA tables (we quote the figures for TruthfulQA)",
    settings={"box": BOX, "paper": PAPER},
    draw=draw,
    cases=cases,
    digest=Digest("qa", _reduce, ("k",)),
    scorers=("ppl", "cos"),
    needs_text=("box",),
)
