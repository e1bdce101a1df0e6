"""Measures how guidance changes the diversity and the accuracy of independent sampling, best-of-n and search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from d5p4.errors import D5P4Error

from ..statistics import Figure, paired_difference
from .continuation import (
    BOX,
    BY_JUDGE,
    BY_MODEL,
    CHANCE,
    DIGEST,
    ORACLE,
    PAPER,
    REFERENCES,
    ROUNDED,
    WORDS,
    Columns,
    by_way,
    judge_names,
    metrics,
    points,
    pool,
    search,
    tree,
    trees,
)
from .drawing import Claim, Drawing, Table, agreed, all_decided, bars, decided, every, listed, pyplot, shown
from .qa import LOWER, REPEATED, perplexities, style_of
from .setup import Case, Experiment, Setup

STRENGTHS = {"guidances": (1, 1.5, 2, 2.5, 3)}
EQUAL = 1.0  # a method counts as equally accurate if its F1 is lower by at most this many percentage points
ALIKE = 0.05  # a method counts as equally likely if its nats per token are higher by at most this (perplexity by 5 %)
PAPERS = "−.0031, −.0121, −.0078, −.0055, −.0067 at g = 1, 1.5, 2, 2.5, 3"
GREEDY, OURS = "greedy beam", "D5P4+"
ByStrength = Mapping[float, Mapping[str, Columns]]
"""By strength of guidance and method: the measures of all prompts."""


def cases(setup: Setup) -> list[Case]:
    if len(setup["tasks"]) != 1:
        raise D5P4Error(f"tasks={setup['tasks']!r}: guidance has one task; name one, and run it again for another one")
    task, planned = setup["tasks"][0], []
    for guidance in setup["guidances"]:
        planned += [
            pool(setup, task, guidance),
            search(setup, task, GREEDY, {"method": "greedy-beam"}, guidance),
            search(setup, task, OURS, {"method": "d5p4", "beta": setup["beta"]}, guidance),
            *trees(setup, task, guidance),
        ]
    return planned


def draw(setup: Setup) -> Drawing:
    by_strength: dict[float, dict[str, Columns]] = {}
    tables = []
    numbers: dict[str, dict[str, dict[str, Figure]]] = {}
    for strength in setup["guidances"]:
        measured = by_way(setup, [case for case in setup.cases if case.value == strength])
        measured.pop(ORACLE, None)
        by_strength[strength] = measured
        cells = {name: metrics(m, setup["k"]) for name, m in measured.items()}
        rows = [[name, *(shown(*cell) for cell in line.values())] for name, line in cells.items()]
        tables.append(Table(f"Guidance {strength:g}", ["method", *next(iter(cells.values()))], rows))
        for name, line in cells.items():
            of_method = numbers.setdefault(name, {})
            of_method[f"{strength:g}"] = {metric: cell[0] for metric, cell in line.items()}
    k = setup["k"]
    note = (
        f"{setup.cases[0].units} prompts ({setup['tasks'][0]}), k = {k}, w = {setup['w']}; all figures but perplexity "
        f"and entropy (nats) are in %. Guidance 1 is no guidance. Best of n takes {k} of {k * setup['w']} independent "
        f"answers: by perplexity under {judge_names(setup)[0]}, or by the model's own score (internal). {WORDS} "
        f"{REFERENCES} {ROUNDED} {REPEATED}"
    )
    last = tables[-1]
    tables[-1] = Table(last.title, last.columns, last.rows, note)
    return Drawing(tables, _figure(setup, by_strength, numbers), numbers, _claims(setup, by_strength))


def _claims(setup: Setup, by_strength: ByStrength) -> list[Claim]:
    def gaps(metric: str, a: str, b: str) -> list[Figure]:
        """Return at each strength of guidance the metric of method `a` minus the metric of method `b`, in points."""
        return [paired_difference(points(m[a], metric), points(m[b], metric)) for m in by_strength.values()]

    def at_strengths(what: str, figures: Iterable[Figure], unit: str = "points of ", digits: int = 2) -> str:
        return f"{unit}{what}: {listed((f'g {g:g}:' for g in by_strength), figures, digits)}"

    def above(claim: str, paper: str, metric: str, a: str, b: str, what: str, note: str = "") -> Claim:
        """The claim that the metric of `a` is above that of `b` at every strength."""
        figures = gaps(metric, a, b)
        return Claim(claim, paper, at_strengths(f"{metric} {what}", figures), all_decided(figures), note)

    low, high = min(by_strength), max(by_strength)
    most, least = (points(by_strength[g][CHANCE], "S-COS") for g in (high, low))
    rise = paired_difference(most, least)
    accuracy = gaps("F1", OURS, GREEDY)
    nats = {
        judge: [paired_difference(m[OURS][f"nats {judge}"], m[GREEDY][f"nats {judge}"]) for m in by_strength.values()]
        for judge in judge_names(setup)
    }
    spread = {
        metric: gaps(metric, *((GREEDY, OURS) if metric in LOWER else (OURS, GREEDY)))
        for metric in ("S-COS", "S-BLEU", "D1-3", "EAD")
    }
    claims = [
        Claim(
            f"Guidance makes independent answers more alike (g = {high:g} against g = {low:g})",
            "Fig. cfg: cosine rises with g",
            f"S-COS higher by {shown(rise)} points",
            decided(rise),
        ),
        above(
            "D5P4's answers differ more than independent answers at every strength of guidance",
            f"cosine against independent: {PAPERS}",
            "S-COS",
            CHANCE,
            OURS,
            "below independent sampling",
        ),
        above(
            "The answers of greedy beam search are more alike than independent answers",
            "cosine +.033 at g = 1, +.001 to +.003 at larger g",
            "S-COS",
            GREEDY,
            CHANCE,
            "above independent sampling",
        ),
        Claim(
            "D5P4's answers differ more than those of greedy beam search",
            "Fig. cfg: cosine −.036, −.014, −.011, −.009, −.008 at g = 1, 1.5, 2, 2.5, 3",
            at_strengths("S-COS below greedy beam search", spread["S-COS"]),
            all_decided(spread["S-COS"]),
        ),
        Claim(
            "D5P4's answers differ more than those of greedy beam search in all metrics (S-COS, S-BLEU, D1-3, EAD)",
            "text: “substantially higher diversity across all metrics”",
            "; ".join(
                at_strengths(f"{metric} {'below' if metric in LOWER else 'above'} greedy beam search", figures, "")
                for metric, figures in spread.items()
            ),
            all_decided(f for figures in spread.values() for f in figures),
        ),
        Claim(
            f"D5P4 is as accurate as greedy beam search (its F1 is lower by at most {EQUAL:g} point)",
            "Fig. cfg: at every g",
            at_strengths("F1 above greedy beam search", accuracy),
            every(decided(f, -EQUAL) for f in accuracy),
        ),
        Claim(
            "D5P4 keeps the perplexity of greedy beam search (its nats per token are higher by at most "
            f"{ALIKE:g}, that is, its perplexity by at most {ALIKE:.0%})",
            "text: “matching the generation quality … of GBS”",
            "; ".join(
                at_strengths(f"nats per token above greedy beam search under {judge}", figures, "", 3)
                for judge, figures in nats.items()
            ),
            agreed(every(decided(-f, -ALIKE) for f in figures) for figures in nats.values()),
        ),
    ]
    for way, name, paper in (
        (BY_JUDGE, "perplexity", "cosine +.0150, +.0056, +.0044, +.0040, +.0023 at g = 1, 1.5, 2, 2.5, 3"),
        (BY_MODEL, "the model's own score", "appendix, text"),
    ):
        claims += [
            above(
                f"Best of n by {name} is less accurate than independent sampling",
                "appendix, text",
                "F1",
                CHANCE,
                way,
                "below independent sampling",
            ),
            above(
                f"The answers of best of n by {name} are more alike than independent answers",
                paper,
                "S-COS",
                way,
                CHANCE,
                "above independent sampling",
            ),
        ]
    ours = "Ours: {} best answer is nearer to the reference than that of independent sampling at every strength (F1@k)"
    what = "above independent sampling"
    claims.append(above(ours.format("D5P4's"), "–", "F1@k", OURS, CHANCE, what))
    for t in setup["tree_temperature"]:
        rows = f"with {setup['k']} rows per step instead of {setup['k'] * setup['w']}"
        more = f"Ours: the tree's answers (T {t:g}) differ more than D5P4's at every strength, {rows} (S-COS)"
        note = perplexities(setup, by_strength[high], tree(t), OURS, f"at g = {high:g}")
        claims += [
            above(ours.format(f"at T {t:g}, the tree's"), "–", "F1@k", tree(t), CHANCE, what),
            above(more, "–", "S-COS", OURS, tree(t), "below D5P4", note),
        ]
    return claims


def _figure(setup: Setup, by_strength: ByStrength, numbers: Mapping[str, Mapping[str, Mapping[str, Figure]]]) -> object:
    """Draw the paper's figure (S-COS minus that of independent sampling), then the metrics of its appendix."""
    plt = pyplot()
    picture, axes = plt.subplots(3, 4, figsize=(12.5, 8.4), sharex=True)
    k, strengths = setup["k"], list(by_strength)
    gap = "S-COS minus independent"
    judged = f"PPL, {judge_names(setup)[-1]}"
    shown_metrics = (gap, "S-COS", "S-BLEU", "D1-3", judged, "entropy", "F1", f"F1@{k}", "BLEU", "R-COS", "D1", "EAD")
    for axis, metric in zip(axes.flat, shown_metrics, strict=True):
        for name, of_method in numbers.items():
            if metric == gap:
                pairs = [(points(m[name], "S-COS"), points(m[CHANCE], "S-COS")) for m in by_strength.values()]
                figures = [paired_difference(*pair) for pair in pairs]
            else:
                figures = [of_method[f"{g:g}"][metric] for g in strengths]
            look = style_of(name) | {"capsize": 2, "linewidth": 1.1, "elinewidth": 0.6, "markersize": 4}
            axis.errorbar(strengths, [f.value for f in figures], yerr=bars(figures), label=name, **look)
            if metric == judged:
                axis.set_yscale("log")
                axis.yaxis.set_major_formatter("{x:g}")
        unit = "" if metric.startswith("PPL") else ", nats" if metric == "entropy" else ", %"
        axis.set_title(metric + unit, fontsize=10)
        axis.set_xticks(strengths)
    for axis in axes[-1]:
        axis.set_xlabel("guidance g (1: none)")
    picture.legend(*axes[0][0].get_legend_handles_labels(), fontsize=9, loc="outside lower center", ncols=4)
    return picture


EXPERIMENT = Experiment(
    name="guidance",
    title="Diversity and accuracy under guidance",
    paper="Figure cfg and its appendix",
    settings={
        "box": dict(BOX) | STRENGTHS,
        "paper": dict(PAPER) | {"tasks": ("truthfulqa",), "units": 817} | STRENGTHS,
    },
    draw=draw,
    cases=cases,
    digest=DIGEST,
    scorers=("ppl", "cos"),
    needs_text=("box",),
)
