"""Measures how guidance changes the diversity and the accuracy of independent sampling, best-of-n and search."""

from collections.abc import Mapping
from dataclasses import replace

from d5p4.errors import D5P4Error

from ..statistics import Figure, paired_difference
from ..tables import listed, shown
from .drawing import Claim, Drawing, agreed, all_decided, decided, every, positive
from .qa import (
    BOX,
    BY_JUDGE,
    BY_MODEL,
    CHANCE,
    DIGEST,
    LOWER,
    ORACLE,
    PAPER,
    REFERENCES,
    REPEATED,
    WORDS,
    Columns,
    by_way,
    judge_names,
    likelier,
    metrics,
    perplexities,
    points,
    pool,
    search,
    tabulated,
    tree,
    trees,
)
from .setup import Case, Experiment, Setup, real

STRENGTHS = {"guidances": (1, 1.5, 2, 2.5, 3)}
EQUAL = 1.0  # a method counts as equally accurate if its F1 is lower by at most this many percentage points
ALIKE = 0.05  # a method counts as equally likely if its nats per token are higher by at most this (perplexity by 5 %)
PAPERS = "−.0031, −.0121, −.0078, −.0055, −.0067 at g = 1, 1.5, 2, 2.5, 3"
GREEDY, OURS = "greedy beam", "D5P4+"
ByStrength = Mapping[float, Mapping[str, Columns]]  # by strength of guidance and method: the measures of all prompts


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
    numbers: dict[str, dict[str, dict[str, Figure]]] = {}  # by method, strength and metric
    for strength in setup["guidances"]:
        measured = by_way(setup, [case for case in setup.cases if case.value == strength])
        measured.pop(ORACLE, None)
        by_strength[strength] = measured
        cells = {name: metrics(m, setup["k"]) for name, m in measured.items()}
        table, by_method = tabulated(f"Guidance {strength:g}", cells)
        tables.append(table)
        for name, figures in by_method.items():
            numbers.setdefault(name, {})[f"{strength:g}"] = figures
    k = setup["k"]
    note = (
        f"{setup.cases[0].units} prompts ({setup['tasks'][0]}), k = {k}, w = {setup['w']}; all figures but perplexity "
        f"and entropy (nats) are in %. Guidance 1 is no guidance. Best of n takes {k} of {k * setup['w']} independent "
        f"answers: by perplexity under {judge_names(setup)[0]}, or by the model's own score (internal). {WORDS} "
        f"{REFERENCES} {REPEATED}"
    )
    tables[-1] = replace(tables[-1], note=note)
    return Drawing(tables, None, numbers, _claims(setup, by_strength))


def _claims(setup: Setup, by_strength: ByStrength) -> list[Claim]:
    def gaps(metric: str, a: str, b: str) -> dict[str, Figure]:
        """Return at each strength of guidance the metric of method `a` minus the metric of method `b`, in points."""
        pairs = {f"g {g:g}:": (points(m[a], metric), points(m[b], metric)) for g, m in by_strength.items()}
        return {name: paired_difference(*pair) for name, pair in pairs.items()}

    def above(claim: str, paper: str, metric: str, a: str, b: str, note: str = "") -> Claim:
        return positive(claim, paper, f"points of {metric}, {a} minus {b}", gaps(metric, a, b), note=note)

    low, high = min(by_strength), max(by_strength)
    most, least = (points(by_strength[g][CHANCE], "S-COS") for g in (high, low))
    rise = paired_difference(most, least)
    spread = {
        metric: gaps(metric, *((GREEDY, OURS) if metric in LOWER else (OURS, GREEDY)))
        for metric in ("S-COS", "S-BLEU", "D1-3", "EAD")
    }
    nats = [likelier(setup, m[OURS], m[GREEDY]) for m in by_strength.values()]  # by strength, then by judge
    by_judge = dict(zip(judge_names(setup), zip(*nats, strict=True), strict=True))
    strengths = list(spread["S-COS"])
    alike = f"Guidance makes independent answers more alike (g = {high:g} against g = {low:g})"
    greedy = "The answers of greedy beam search are more alike than independent answers"
    differ = "D5P4's answers differ more than independent answers at every strength of guidance"
    own = {metric: gaps(metric, *((CHANCE, OURS) if metric in LOWER else (OURS, CHANCE))) for metric in spread}
    claims = [
        Claim(alike, "Fig. cfg: cosine rises with g", f"S-COS higher by {shown(rise)} points", decided(rise)),
        above(f"{differ} (S-COS)", f"cosine against independent: {PAPERS}", "S-COS", CHANCE, OURS),
        *(
            positive(f"{differ} ({metric})", "text: “across all metrics”", f"points of {metric} in favour", own[metric])
            for metric in ("S-BLEU", "D1-3", "EAD")
        ),
        above(greedy, "cosine +.033 at g = 1, +.001 to +.003 at larger g", "S-COS", GREEDY, CHANCE),
        positive(
            "D5P4's answers differ more than those of greedy beam search",
            "Fig. cfg: cosine −.036, −.014, −.011, −.009, −.008 at g = 1, 1.5, 2, 2.5, 3",
            "points of S-COS below greedy beam search",
            spread["S-COS"],
        ),
        Claim(
            "D5P4's answers differ more than those of greedy beam search in all metrics (S-COS, S-BLEU, D1-3, EAD)",
            "text: “substantially higher diversity across all metrics”",
            "points in favour: " + "; ".join(f"{metric} {listed(f, f.values())}" for metric, f in spread.items()),
            all_decided(f for figures in spread.values() for f in figures.values()),
        ),
        positive(
            f"D5P4 is as accurate as greedy beam search (its F1 is lower by at most {EQUAL:g} point)",
            "Fig. cfg: at every g",
            "points of F1 above greedy beam search",
            gaps("F1", OURS, GREEDY),
            least=-EQUAL,
        ),
        Claim(
            f"D5P4 keeps the perplexity of greedy beam search (higher by at most {ALIKE:.0%})",
            "text: “matching the generation quality … of GBS”",
            f"nats per token below greedy beam search (at least −{ALIKE:g}): "
            + "; ".join(f"under {judge}: {listed(strengths, figures, 3)}" for judge, figures in by_judge.items()),
            agreed(every(decided(f, -ALIKE) for f in figures) for figures in by_judge.values()),
        ),
    ]
    for way, name, paper in (
        (BY_JUDGE, "perplexity", "cosine +.0150, +.0056, +.0044, +.0040, +.0023 at g = 1, 1.5, 2, 2.5, 3"),
        (BY_MODEL, "the model's own score", "appendix, text"),
    ):
        accurate = f"Best of n by {name} is less accurate than independent sampling"
        closer = f"The answers of best of n by {name} are more alike than independent answers"
        claims.append(above(accurate, "appendix, text", "F1", CHANCE, way))
        claims.append(above(closer, paper, "S-COS", way, CHANCE))
    ours = "Ours: {} best answer is nearer to the reference than that of independent sampling at every strength (F1@k)"
    claims.append(above(ours.format("D5P4's"), "–", "F1@k", OURS, CHANCE))
    for t in setup["tree_temperature"]:
        rows = f"with 1/{setup['w']} of the rows"
        more = f"Ours: the tree's answers (T {t:g}) differ more than D5P4's at every strength, {rows} (S-COS)"
        note = perplexities(setup, by_strength[high], tree(t), OURS, f"at g = {high:g}")
        claims.append(above(ours.format(f"at T {t:g}, the tree's"), "–", "F1@k", tree(t), CHANCE))
        claims.append(above(more, "–", "S-COS", OURS, tree(t), note))
    return claims


EXPERIMENT = Experiment(
    name="guidance",
    title="Diversity and accuracy under guidance",
    paper="Figure cfg and its appendix",
    settings={
        "box": dict(BOX) | STRENGTHS,
        "paper": dict(PAPER) | {"tasks": ("truthfulqa",), "units": 817} | STRENGTHS,
        **real(BOX, tasks=("truthfulqa",), units=80, guidances=(1, 2, 3)),
    },
    draw=draw,
    cases=cases,
    digest=DIGEST,
    scorers=("ppl", "cos"),
    needs_text=("box",),
)
