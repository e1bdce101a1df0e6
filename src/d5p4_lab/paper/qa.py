"""Search compared with best-of-n on prompts that have reference answers, in all metrics of the paper."""

from __future__ import annotations

from collections.abc import Mapping

from ..statistics import Figure, paired_difference
from ..tables import listed, shown
from .continuation import (
    BOX,
    BY_JUDGE,
    BY_MODEL,
    CHANCE,
    DIGEST,
    ORACLE,
    PAPER,
    REFERENCES,
    WAYS,
    WORDS,
    Columns,
    by_way,
    judge_names,
    likelier,
    metrics,
    points,
    pool,
    search,
    tabulated,
    tree,
    trees,
)
from .drawing import Claim, Drawing, agreed, all_decided, decided
from .open_ended import perplexity
from .setup import Case, Experiment, Setup

REPEATED = (
    "Repeated is the share of word triples that occurred earlier in the same answer. In confidence order a small model "
    "repeats itself, which lowers its perplexity, so low perplexity does not prove quality here."
)
DIVERSE, OURS, PARTIAL = "diverse beam", "D5P4+", "D5P4^P"
QUOTED = (CHANCE, BY_JUDGE, BY_MODEL, DIVERSE, OURS, PARTIAL)  # the columns of the paper's tables that we quote
QUOTES = ("PPL", "F1", "F1@k", "R-COS", "D1-3", "EAD", "S-BLEU", "S-COS")
TABLES = {  # by task: the figures of the paper, one row per metric of `QUOTES`
    "truthfulqa": (
        (6.46, 5.24, 6.64, 6.37, 6.40, 6.72),
        (18.32, 17.31, 19.39, 19.07, 19.02, 20.71),
        (20.74, 19.16, 22.00, 22.55, 22.71, 24.84),
        (87.36, 87.29, 87.41, 87.53, 87.56, 87.82),
        (55.41, 53.54, 54.66, 57.00, 57.54, 56.37),
        (36.19, 34.57, 36.03, 37.52, 37.78, 37.53),
        (44.07, 46.27, 45.57, 40.74, 39.00, 41.64),
        (96.08, 96.40, 96.12, 95.36, 95.16, 94.88),
    ),
    "arc-challenge": (
        (5.84, 4.93, 5.86, 5.78, 5.78, 5.82),
        (5.16, 5.01, 5.35, 5.22, 5.24, 5.46),
        (6.14, 5.85, 6.38, 6.36, 6.42, 6.74),
        (76.12, 76.11, 76.08, 76.23, 76.28, 76.25),
        (49.41, 47.42, 48.82, 50.86, 51.30, 50.10),
        (31.61, 30.17, 31.39, 32.56, 32.78, 32.24),
        (52.16, 55.04, 53.54, 49.03, 47.71, 49.70),
        (97.44, 97.65, 97.50, 97.00, 96.87, 96.76),
    ),
    "commonsenseqa": (
        (11.35, 8.86, 11.81, 11.24, 11.23, 12.74),
        (1.23, 1.18, 1.27, 1.22, 1.22, 1.37),
        (1.80, 1.63, 1.80, 1.87, 1.90, 2.14),
        (74.19, 74.12, 74.18, 74.39, 74.41, 74.53),
        (52.31, 50.50, 51.24, 53.79, 54.42, 52.20),
        (37.70, 36.00, 37.29, 38.88, 39.18, 38.68),
        (51.70, 53.84, 54.42, 48.27, 46.86, 51.91),
        (96.52, 96.94, 96.76, 95.91, 95.77, 95.59),
    ),
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
        order = [name for name in dict.fromkeys((*WAYS[:3], *measured)) if name != ORACLE]
        measured = {name: measured[name] for name in (*order, ORACLE)}
        note = (
            f"{len(measured[OURS]['F1'])} prompts ({task}), k = {k}, w = {setup['w']}, guidance "
            f"{setup['guidance']:g}; all figures but perplexity and entropy (nats) are in %. Best of n takes {k} of "
            f"{k * setup['w']} independent answers: by perplexity under {judges[0]}, which also judges the results, or "
            f"by the model's own score of an answer (internal, `Result.score`). {WORDS} "
            f"{REFERENCES} {REPEATED}"
        )
        cells = {name: metrics(m, k) for name, m in measured.items()}
        table, numbers[task] = tabulated(f"Every metric: {task}", cells, note)
        tables.append(table)
        claims += _claims(setup, task, measured)
    return Drawing(tables, None, numbers, claims)


def _claims(setup: Setup, task: str, measured: Mapping[str, Columns]) -> list[Claim]:
    quoted, judges = dict(zip(QUOTES, TABLES.get(task, TABLES["truthfulqa"]), strict=True)), judge_names(setup)
    of_task = f" ({task})" if len(setup["tasks"]) > 1 else ""

    def gain(metric: str, a: str, b: str) -> Figure:
        """Return by how many percentage points `a` is better than `b`. A metric of LOWER is better if it is lower."""
        high, low = (b, a) if metric in LOWER else (a, b)
        return paired_difference(points(measured[high], metric), points(measured[low], metric))

    def paper(metric: str, a: str, b: str) -> str:
        left, right = (quoted[metric][QUOTED.index(name)] for name in (a, b))
        return f"{metric} {left:.2f} against {right:.2f}"

    def better(claim: str, a: str, b: str, *names: str, note: str = "") -> Claim:
        gains = [gain(metric, a, b) for metric in names]
        figures = "; ".join(paper(metric, a, b) for metric in names) if b in QUOTED and a in QUOTED else "–"
        return Claim(claim + of_task, figures, f"points in favour: {listed(names, gains)}", all_decided(gains), note)

    def lower(claim: str, a: str, b: str, note: str) -> Claim:
        figures = likelier(setup, measured[a], measured[b])
        what = f"log perplexity of {spoken[b]} minus that of {spoken[a]}: {listed(judges, figures, 3)}"
        return Claim(claim + of_task, paper("PPL", a, b), what, agreed(map(decided, figures)), note)

    spoken = {OURS: "D5P4", CHANCE: "independent answers", DIVERSE: "diverse beam search", PARTIAL: "D5P4^P"}
    spoken |= {BY_JUDGE: "best of n by perplexity", BY_MODEL: "best of n by the model's own score"}
    differ = "D5P4's answers differ more than those of {} (S-BLEU, S-COS)"
    nearer = "D5P4's best answer is nearer to the reference than that of {} (F1@k)"
    repeated, alone = shown(gain("repeated", OURS, CHANCE)), shown(gain("F1", OURS, BY_MODEL))
    difference = quoted["F1"][QUOTED.index(OURS)] - quoted["F1"][QUOTED.index(BY_MODEL)]
    claims = [
        *(better(differ.format(spoken[b]), OURS, b, "S-BLEU", "S-COS") for b in (BY_JUDGE, BY_MODEL, DIVERSE)),
        *(
            better(f"D5P4's answers have more different n-grams than {spoken[b]} (D1-3, EAD)", OURS, b, "D1-3", "EAD")
            for b in (BY_JUDGE, BY_MODEL, DIVERSE, CHANCE)
        ),
        *(better(nearer.format(spoken[b]), OURS, b, "F1@k") for b in (DIVERSE, CHANCE, BY_MODEL, BY_JUDGE)),
        better("D5P4 is more accurate than best of n by perplexity (F1)", OURS, BY_JUDGE, "F1"),
        better(
            "D5P4^P (guided in the first half) is more accurate than best of n by the model's own score (F1)",
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
        better("D5P4's answers have more different n-grams than D5P4^P's (D1-3, EAD)", OURS, PARTIAL, "D1-3", "EAD"),
        lower(
            "D5P4 keeps or lowers the perplexity of independent sampling",
            OURS,
            CHANCE,
            "repetition also lowers perplexity, and the share of repeated word triples is higher by "
            f"{repeated} points in D5P4's answers",
        ),
        lower(
            "Best of n by perplexity has a lower perplexity than D5P4",
            BY_JUDGE,
            OURS,
            f"best of n chose its answers by their perplexity under {judges[0]}",
        ),
    ]
    for t in setup["tree_temperature"]:
        for rival, text in ((CHANCE, "independent answers"), (OURS, f"D5P4's, with 1/{setup['w']} of the rows")):
            best, note = gain("F1@k", tree(t), rival), perplexities(setup, measured, tree(t), rival)
            more = f"Ours: the tree's answers (T {t:g}) differ more than {text} (S-BLEU, S-COS)"
            near = f"Ours: the F1@k of the tree's answers (T {t:g}) is at most {KEPT:g} point below that of {text}"
            claims += [
                better(more, tree(t), rival, *LOWER, note=note),
                Claim(near + of_task, "–", f"difference of F1@k: {shown(best)} points", decided(best, -KEPT)),
            ]
    return claims


def perplexities(setup: Setup, measured: Mapping[str, Columns], a: str, b: str, where: str = "") -> str:
    """Say what perplexities two methods have. Answers of high perplexity differ more, whatever the method."""
    judges = judge_names(setup)
    pairs = ((measured[name][f"nats {judge}"] for name in (a, b)) for judge in judges)
    texts = [" against ".join(f"{perplexity(nats).value:.1f}" for nats in pair) for pair in pairs]
    named = "; ".join(f"{text} ({judge})" for text, judge in zip(texts, judges, strict=True))
    return f"the perplexities of the two methods are {named} {where}".strip()


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
