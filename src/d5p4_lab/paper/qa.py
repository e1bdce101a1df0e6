"""Search compared with best-of-n on prompts that have reference answers, in all metrics of the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
    WAYS,
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
from .drawing import EDGE, STYLES, Claim, Drawing, Table, agreed, all_decided, bars, decided, listed, pyplot, shown
from .plane import perplexity
from .setup import Case, Experiment, Setup

REPEATED = (
    "Repeated is the share of word triples that occurred earlier in the same answer. In confidence order a small model "
    "repeats itself, which lowers its perplexity, so low perplexity does not prove quality here."
)
DIVERSE, OURS, PARTIAL = "diverse beam", "D5P4+", "D5P4^P"
QUOTED = (CHANCE, BY_JUDGE, BY_MODEL, DIVERSE, OURS, PARTIAL)  # the columns of the paper's tables that we quote
TABLES: Mapping[str, Mapping[str, Sequence[float]]] = {
    "truthfulqa": {
        "PPL": (6.46, 5.24, 6.64, 6.37, 6.40, 6.72),
        "F1": (18.32, 17.31, 19.39, 19.07, 19.02, 20.71),
        "F1@k": (20.74, 19.16, 22.00, 22.55, 22.71, 24.84),
        "R-COS": (87.36, 87.29, 87.41, 87.53, 87.56, 87.82),
        "D1-3": (55.41, 53.54, 54.66, 57.00, 57.54, 56.37),
        "EAD": (36.19, 34.57, 36.03, 37.52, 37.78, 37.53),
        "S-BLEU": (44.07, 46.27, 45.57, 40.74, 39.00, 41.64),
        "S-COS": (96.08, 96.40, 96.12, 95.36, 95.16, 94.88),
    },
    "arc-challenge": {
        "PPL": (5.84, 4.93, 5.86, 5.78, 5.78, 5.82),
        "F1": (5.16, 5.01, 5.35, 5.22, 5.24, 5.46),
        "F1@k": (6.14, 5.85, 6.38, 6.36, 6.42, 6.74),
        "R-COS": (76.12, 76.11, 76.08, 76.23, 76.28, 76.25),
        "D1-3": (49.41, 47.42, 48.82, 50.86, 51.30, 50.10),
        "EAD": (31.61, 30.17, 31.39, 32.56, 32.78, 32.24),
        "S-BLEU": (52.16, 55.04, 53.54, 49.03, 47.71, 49.70),
        "S-COS": (97.44, 97.65, 97.50, 97.00, 96.87, 96.76),
    },
    "commonsenseqa": {
        "PPL": (11.35, 8.86, 11.81, 11.24, 11.23, 12.74),
        "F1": (1.23, 1.18, 1.27, 1.22, 1.22, 1.37),
        "F1@k": (1.80, 1.63, 1.80, 1.87, 1.90, 2.14),
        "R-COS": (74.19, 74.12, 74.18, 74.39, 74.41, 74.53),
        "D1-3": (52.31, 50.50, 51.24, 53.79, 54.42, 52.20),
        "EAD": (37.70, 36.00, 37.29, 38.88, 39.18, 38.68),
        "S-BLEU": (51.70, 53.84, 54.42, 48.27, 46.86, 51.91),
        "S-COS": (96.52, 96.94, 96.76, 95.91, 95.77, 95.59),
    },
}
LOWER = ("S-BLEU", "S-COS")  # metrics that are lower if answers differ more
KEPT = 1.0  # an F1@k counts as kept if it falls by at most this many percentage points


def cases(setup: Setup) -> list[Case]:
    guidance, planned = setup["guidance"], []
    for task in setup["tasks"]:
        planned += [
            pool(setup, task, guidance),
            search(setup, task, "greedy beam", {"method": "greedy-beam"}, guidance),
            search(setup, task, DIVERSE, {"method": "diverse-beam", "alpha": setup["alpha"]}, guidance),
            search(setup, task, OURS, {"method": "d5p4", "beta": setup["beta"]}, guidance),
            search(setup, task, PARTIAL, {"method": "d5p4-p", "beta": setup["beta"]}, guidance),
            *trees(setup, task, guidance),
        ]
    return planned


def draw(setup: Setup) -> Drawing:
    judges, k = judge_names(setup), setup["k"]
    tables, claims, numbers = [], [], {}
    for task in setup["tasks"]:
        measured = by_way(setup, [case for case in setup.cases if case.task == task])
        measured = {name: measured[name] for name in dict.fromkeys((*WAYS[:3], *measured)) if name != ORACLE} | {
            ORACLE: measured[ORACLE]
        }
        cells = {name: metrics(m, k) for name, m in measured.items()}
        rows = [[name, *(shown(*cell) for cell in line.values())] for name, line in cells.items()]
        note = (
            f"{len(measured[OURS]['F1'])} prompts ({task}), k = {k}, w = {setup['w']}, guidance "
            f"{setup['guidance']:g}; all figures but perplexity and entropy (nats) are in %. Best of n takes {k} of "
            f"{k * setup['w']} independent answers: by perplexity under {judges[0]}, which also judges the results, or "
            f"by the model's own score of an answer (internal, `Result.score`). {WORDS} "
            f"{REFERENCES} {ROUNDED} {REPEATED}"
        )
        tables.append(Table(f"Every metric: {task}", ["method", *next(iter(cells.values()))], rows, note))
        numbers[task] = {name: {metric: cell[0] for metric, cell in line.items()} for name, line in cells.items()}
        claims += _claims(setup, task, measured)
    return Drawing(tables, _figure(setup, numbers), numbers, claims)


def _claims(setup: Setup, task: str, measured: Mapping[str, Columns]) -> list[Claim]:
    quoted, judges = TABLES.get(task, TABLES["truthfulqa"]), judge_names(setup)
    of_task = f" ({task})" if len(setup["tasks"]) > 1 else ""

    def gain(metric: str, a: str, b: str) -> Figure:
        """Return by how many percentage points `a` is better than `b`. A metric of LOWER is better if it is lower."""
        high, low = (b, a) if metric in LOWER else (a, b)
        return paired_difference(points(measured[high], metric), points(measured[low], metric))

    def paper(metric: str, a: str, b: str) -> str:
        left, right = (quoted[metric][QUOTED.index(name)] for name in (a, b))
        return f"{metric} {left:.2f} against {right:.2f}"

    def better(claim: str, a: str, b: str, *names: str, note: str = "") -> Claim:
        """The claim that `a` is better than `b` in all of these metrics."""
        gains = [gain(metric, a, b) for metric in names]
        figures = "; ".join(paper(metric, a, b) for metric in names) if b in QUOTED and a in QUOTED else "–"
        return Claim(claim + of_task, figures, f"points in favour: {listed(names, gains)}", all_decided(gains), note)

    def likelier(a: str, b: str) -> list[Figure]:
        """Return by how many nats per token the answers of `a` are likelier than those of `b`, under each judge."""
        names = [f"nats {judge}" for judge in judges]
        return [paired_difference(measured[b][name], measured[a][name]) for name in names]

    differ = "D5P4's answers differ more than those of {} (S-BLEU, S-COS), at equal nominal rows"
    ngrams = "D5P4's answers have more different n-grams than {} (D1-3, EAD)"
    nearer = "D5P4's best answer is nearer to the reference than {} (F1@k)"
    kept, chosen = likelier(OURS, CHANCE), likelier(BY_JUDGE, OURS)
    repeated, alone = shown(gain("repeated", OURS, CHANCE)), shown(gain("F1", OURS, BY_MODEL))
    difference = quoted["F1"][QUOTED.index(OURS)] - quoted["F1"][QUOTED.index(BY_MODEL)]
    claims = [
        better(differ.format("best of n by perplexity"), OURS, BY_JUDGE, "S-BLEU", "S-COS"),
        better(differ.format("best of n by the model's own score"), OURS, BY_MODEL, "S-BLEU", "S-COS"),
        better(differ.format("diverse beam search"), OURS, DIVERSE, "S-BLEU", "S-COS"),
        better(ngrams.format("those of best of n by perplexity"), OURS, BY_JUDGE, "D1-3", "EAD"),
        better(ngrams.format("those of best of n by the model's own score"), OURS, BY_MODEL, "D1-3", "EAD"),
        better(ngrams.format("those of diverse beam search"), OURS, DIVERSE, "D1-3", "EAD"),
        better(ngrams.format("independent answers"), OURS, CHANCE, "D1-3", "EAD"),
        better(nearer.format("that of diverse beam search"), OURS, DIVERSE, "F1@k"),
        better(nearer.format("that of k independent answers"), OURS, CHANCE, "F1@k"),
        better(nearer.format("that of best of n by the model's own score"), OURS, BY_MODEL, "F1@k"),
        better(nearer.format("that of best of n by perplexity"), OURS, BY_JUDGE, "F1@k"),
        better("D5P4 is more accurate than best of n by perplexity (F1)", OURS, BY_JUDGE, "F1"),
        better(
            "D5P4 with guidance in the first half only (D5P4^P) is more accurate than best of n by the model's own "
            "score (F1)",
            PARTIAL,
            BY_MODEL,
            "F1",
            note=f"D5P4 with guidance in all steps: {alone} points here, {difference:.2f} points in the paper",
        ),
        better("Guidance in the first half only (D5P4^P) raises accuracy (F1)", PARTIAL, OURS, "F1"),
        better("D5P4^P also raises the best answer's F1 (F1@k)", PARTIAL, OURS, "F1@k"),
        better("D5P4^P's answers are nearer in meaning to the reference than D5P4's (R-COS)", PARTIAL, OURS, "R-COS"),
        better("D5P4^P's answers differ more in meaning than D5P4's (S-COS)", PARTIAL, OURS, "S-COS"),
        better("D5P4's answers have fewer phrases in common than D5P4^P's (S-BLEU)", OURS, PARTIAL, "S-BLEU"),
        better(ngrams.format("D5P4^P's"), OURS, PARTIAL, "D1-3", "EAD"),
        Claim(
            f"D5P4 keeps or lowers the perplexity of independent sampling{of_task}",
            paper("PPL", OURS, CHANCE),
            f"log perplexity of independent sampling minus that of D5P4: {listed(judges, kept, 3)}",
            agreed([decided(d) for d in kept]),
            "repetition also lowers perplexity, and the share of repeated word triples is higher by "
            f"{repeated} points in D5P4's answers",
        ),
        Claim(
            f"Best of n by perplexity has a lower perplexity than D5P4{of_task}",
            paper("PPL", BY_JUDGE, OURS),
            f"log perplexity of D5P4's answers minus that of the chosen answers: {listed(judges, chosen, 3)}",
            agreed([decided(d) for d in chosen]),
            f"best of n chose its answers by their perplexity under {judges[0]}",
        ),
    ]
    rows = f"with {setup['k']} rows per step instead of {setup['k'] * setup['w']}"
    for t in setup["tree_temperature"]:
        for rival, text in ((CHANCE, "independent answers"), (OURS, f"D5P4's, {rows}")):
            best, note = gain("F1@k", tree(t), rival), perplexities(setup, measured, tree(t), rival)
            more = f"Ours: the tree's answers (T {t:g}) differ more than {text} (S-BLEU, S-COS)"
            claims += [
                better(more, tree(t), rival, *LOWER, note=note),
                Claim(
                    f"Ours: the tree's best answer (T {t:g}) is as near to the reference as the best of {text} (its "
                    f"F1@k is lower by at most {KEPT:g} point){of_task}",
                    "–",
                    f"F1@k of the tree minus that of the other method: {shown(best)} points",
                    decided(best, -KEPT),
                ),
            ]
    return claims


def perplexities(setup: Setup, measured: Mapping[str, Columns], a: str, b: str, where: str = "") -> str:
    """Say what perplexities two methods have. Answers of high perplexity differ more, whatever the method."""
    judges = judge_names(setup)
    pairs = ((measured[name][f"nats {judge}"] for name in (a, b)) for judge in judges)
    texts = [" against ".join(f"{perplexity(nats).value:.1f}" for nats in pair) for pair in pairs]
    named = "; ".join(f"{text} ({judge})" for text, judge in zip(texts, judges, strict=True))
    return f"the perplexities of the two methods are {named} {where}".strip()


def _figure(setup: Setup, numbers: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> object:
    plt = pyplot()
    shown_metrics = (f"F1@{setup['k']}", "S-BLEU", "S-COS", f"PPL, {judge_names(setup)[-1]}")
    better = ("higher", "lower", "lower", "lower")
    picture, grid = plt.subplots(len(numbers), 4, figsize=(11, 3.4 * len(numbers)), sharey=True, squeeze=False)
    for axes, (task, figures) in zip(grid, numbers.items(), strict=True):
        names = list(figures)
        for axis, metric, way in zip(axes, shown_metrics, better, strict=True):
            for row, name in enumerate(names):
                f = figures[name][metric]
                style = style_of(name)
                axis.errorbar(f.value, row, xerr=bars([f]), color=style["color"], marker=style["marker"], **EDGE)
            axis.set_xlabel(f"{metric} ({way}: better)")
            if metric.startswith("PPL"):
                axis.set_xscale("log")
                axis.xaxis.set_minor_formatter("")
                axis.xaxis.set_major_formatter("{x:g}")
        axes[0].set_yticks(range(len(names)), names)
        if len(numbers) > 1:
            axes[0].set_title(task)
    grid[0][0].invert_yaxis()
    return picture


def style_of(name: str) -> dict[str, str]:
    """The style of a way to get k answers. Ways with the same start, such as best of n, share a style."""
    return STYLES.get(name) or next(style for start, style in STYLES.items() if name.startswith(start))


EXPERIMENT = Experiment(
    name="qa",
    title="Answers to prompts with references",
    paper="QA tables (at scale box we quote the figures for TruthfulQA)",
    settings={"box": BOX, "paper": PAPER},
    draw=draw,
    cases=cases,
    digest=DIGEST,
    scorers=("ppl", "cos"),
    needs_text=("box",),
)
