"""Measures the coverage of right answers (pass@1 to pass@k) of search and best-of-n, in three orders of decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from d5p4.eval.graders import grader as grader_named
from d5p4.eval.lexical import self_bleu
from d5p4.eval.stats import pass_at

from ..statistics import Figure, figure, paired_difference
from .answers import numbers_by_unit
from .continuation import POOL, best_internal, best_perplexity, by_chance, lowest
from .drawing import Claim, Drawing, Table, all_decided, bars, listed, pyplot, shown
from .rows import Row
from .setup import PAPER_SOLVER, SOLVER, Case, Digest, Experiment, Setup

BOX: Mapping[str, Any] = {
    "model": "countdown",
    "judges": ("smollm2",),
    "task": "countdown:5",
    "k": 4,
    "w": 4,
    "gen_length": 48,
    "steps": 48,
    "units": 1000,
    "units_close": 6000,  # problems for D5P4 and diverse beam search at the paper's parameters, which lie close
    "guidance": 1.0,
    "solver": SOLVER,
    "beta": (25.0, 100.0),  # the paper's value, and the value tuned for this model
    "alpha": (20.0, 100.0),  # for diverse beam search: the paper's value, and the value tuned for this model
    "order_temperature": 0.1,
    "eos": "last",
}
PAPER: Mapping[str, Any] = dict(BOX) | {
    "model": "GSAI-ML/LLaDA-8B-Instruct",
    "judges": ("meta-llama/Meta-Llama-3-8B",),
    "task": "gsm8k",
    "gen_length": 256,
    "steps": 256,
    "units": 1319,
    "units_close": 1319,
    "guidance": 2.5,
    "solver": PAPER_SOLVER,
    "beta": (25.0,),
    "alpha": (20.0,),
    "eos": "free",
    "judge_dtype": "bfloat16",
    "passes": 20,  # each problem is decoded so often; the paper's standard errors (0.3 points) need about 20
}
ORDERS: Mapping[str, Mapping[str, Any]] = {
    "confidence": {"order": "confidence", "temperature": 1.0},
    "tempered": {"order": "tempered", "temperature": 1.0},
    "tempered argmax": {"order": "tempered", "temperature": 0.0},
}
TREE = {"temperature": 0.0, "order": "top", "reveal": "threshold", "tau": 0.99, "diversity": 1.0}  # its defaults
KEPT = 1.0  # pass@1 counts as kept if it falls by at most this many percentage points


def cases(setup: Setup) -> list[Case]:
    planned = []
    for order, rule in ORDERS.items():
        common = {name: setup[name] for name in ("gen_length", "steps", "guidance", "eos")} | dict(rule)
        if order != "confidence":
            common["order_temperature"] = setup["order_temperature"]
        beam = common | {"k": setup["k"], "w": setup["w"]}
        ways = {
            "pool": common | {"method": "independent", "k": setup["k"] * setup["w"]},
            "greedy beam": beam | {"method": "greedy-beam"},
        }
        ways |= {f"diverse beam, α {a:g}": beam | {"method": "diverse-beam", "alpha": a} for a in setup["alpha"]}
        ways |= {f"D5P4+, β {b:g}": beam | {"method": "d5p4", "beta": b} for b in setup["beta"]}
        close = (f"diverse beam, α {setup['alpha'][0]:g}", f"D5P4+, β {setup['beta'][0]:g}")
        for name, options in ways.items():
            units = setup["units_close" if name in close else "units"]
            planned.append(Case(f"{order}: {name}", options, units, setup["task"], order))
    tree = {"method": "tree", "k": setup["k"], "gen_length": setup["gen_length"], **TREE}
    if setup["task"].startswith("countdown"):
        planned.append(Case("ours: tree", tree, setup["units_close"], setup["task"], "ours"))
    return planned


# The ways to choose k answers from a pool, in the same order as the tuple `chosen` in `_reduce`.
WAYS = ("independent", "best of n, perplexity", "best of n, internal", "best of n, oracle")


def _reduce(setup: Setup, case: Case, unit: int, row: Row, scores: Mapping[str, Row]) -> Row:
    """Return the marks of all answers (1: right, 0: wrong) and three values for each way to choose k of the answers.

    The three values are the marks, the self-BLEU and the number of different right answers of the chosen answers.
    """
    task = setup.task(case.task, case.units)
    grader, example = grader_named(task.grader or "exact"), task.examples[unit]
    right = grader.grade(example.prompt, row["texts"], example.gold)
    assert right is not None, f"{task.name} {unit} cannot be graded"
    ways = {"": list(range(len(right)))}
    if case.name.endswith(POOL):
        oracle = lowest([not mark for mark in right], setup["k"])
        chosen = (by_chance(setup, unit, row), best_perplexity(setup, scores), best_internal(setup), oracle)
        ways = dict(zip(WAYS, chosen, strict=True))
    by_way = {}
    for name, places in ways.items():
        texts = [row["texts"][place] for place in places]
        forms = len({grader.key(row["texts"][place]) for place in places if right[place]})
        marks = "".join("01"[right[place]] for place in places)
        by_way[name] = [marks, round(self_bleu(texts), 4), forms]
    return {"right": "".join("01"[mark] for mark in right), "ways": by_way}


class Judged:
    """The graded answers of one method: right or wrong [P, passes, m]. Other figures are means over passes, [P].

    `groups` has the rows of each problem, one row per pass (`numbers_by_unit`).
    """

    def __init__(self, groups: Sequence[Sequence[Row]], way: str) -> None:
        marks, same, forms = zip(*(row["ways"][way] for rows in groups for row in rows), strict=True)
        if way == WAYS[0]:
            # Of the whole pool: pass@n is a mean over all choices of n answers.
            marks = tuple(row["right"] for rows in groups for row in rows)
        shape = len(groups), -1
        right = np.array([[mark == "1" for mark in answers] for answers in marks])
        self.right = right.reshape(*shape, right.shape[1])
        self.same, self.forms = (np.array(values).reshape(shape).mean(1) for values in (same, forms))

    def solved(self, n: int) -> np.ndarray:
        """pass@n of each problem [P], a mean over the passes."""
        return pass_at(self.right.reshape(-1, self.right.shape[2]), n).reshape(self.right.shape[:2]).mean(1)


def ways(setup: Setup, order: str) -> dict[str, Judged]:
    """Return the graded answers of every method in one order of decoding."""
    by_name = {case.name.split(": ", 1)[1]: case for case in setup.cases if case.group == order}
    rows = numbers_by_unit(setup, by_name.pop(POOL))
    by_way = {way: Judged(rows, way) for way in WAYS}
    oracle = by_way.pop(WAYS[3])
    by_way |= {name: Judged(numbers_by_unit(setup, case), "") for name, case in by_name.items()}
    return by_way | {WAYS[3]: oracle}


def draw(setup: Setup) -> Drawing:
    k = setup["k"]
    passes = [n for n in (1, 2, 4) if n <= k]
    by_order = {order: ways(setup, order) for order in ORDERS}
    tables, numbers = [], {}
    for order, by_way in by_order.items():
        rows = []
        for name, judged in by_way.items():
            figures = {f"pass@{n}": figure(100 * judged.solved(n)) for n in passes}
            figures |= {"S-BLEU": figure(judged.same), "different right": figure(judged.forms)}
            numbers[f"{order}: {name}"] = figures
            rows.append([name, *(shown(f, 2 if metric == "different right" else 1) for metric, f in figures.items())])
        columns = ["method", *(f"pass@{n}, %" for n in passes), "S-BLEU", "different right"]
        tables.append(Table(f"Order: {order}", columns, rows))
    note = (
        f"{setup['units']} problems ({setup['task']}), k = {k}, w = {setup['w']}, guidance {setup['guidance']:g}. "
        f"Independent sampling takes k of {k * setup['w']} samples, averaged over all choices. Best of n takes k of "
        f"the same {k * setup['w']} samples: by perplexity under {setup['judges'][0]}, by the model's own entropy, or "
        "by an oracle that knows the right answers. β 25 and α 20 are the paper's values; the others were tuned for "
        "this model on other problems (docs/box.md)."
    )
    tables[-1] = Table(tables[-1].title, tables[-1].columns, tables[-1].rows, note)
    return Drawing(tables, _figure(by_order, k), numbers, _claims(setup, by_order))


ByOrder = Mapping[str, Mapping[str, Judged]]
"""The answers by order of decoding and method."""


def _coverage(by_order: ByOrder, a: str, b: str, n: int) -> list[Figure]:
    """Return by how many percentage points method a has a higher pass@n than method b, in each order of decoding."""
    return [paired_difference(100 * by_way[a].solved(n), 100 * by_way[b].solved(n)) for by_way in by_order.values()]


def _less_alike(by_order: ByOrder, a: str, b: str) -> list[Figure]:
    """Return how much lower the self-BLEU of method a is than that of method b, in each order of decoding."""
    return [paired_difference(by_way[b].same, by_way[a].same) for by_way in by_order.values()]


def _claims(setup: Setup, by_order: ByOrder) -> list[Claim]:
    k = setup["k"]
    ours, rival = f"D5P4+, β {setup['beta'][0]:g}", f"diverse beam, α {setup['alpha'][0]:g}"

    def covers_more(claim: str, paper: str, a: str, b: str) -> Claim:
        gains = _coverage(by_order, a, b, k)
        return Claim(
            f"{claim} (pass@{k})", paper, f"difference in points: {listed(by_order, gains, 1)}", all_decided(gains)
        )

    single = _coverage(by_order, ours, "independent", 1)
    rivals = ("independent", "greedy beam", rival, "best of n, perplexity", "best of n, internal")
    alike = {name: _less_alike(by_order, ours, name) for name in rivals}
    return [
        covers_more(
            "D5P4 covers more problems than independent sampling",
            "59.3 against 54.5; 72.2 against 69.4; 71.8 against 69.2",
            ours,
            "independent",
        ),
        Claim(
            "D5P4 keeps the pass@1 of independent sampling",
            "44.4 against 44.5; 47.3 against 45.5; 47.1 against 45.2",
            f"difference in points: {listed(by_order, single, 1)}",
            all_decided(f.plus(KEPT) for f in single),
            f"pass@1 counts as kept if it falls by at most {KEPT:g} point",
        ),
        covers_more(
            "D5P4 covers more problems than diverse beam search",
            "59.3 against 58.2; 72.2 against 71.2; 71.8 against 70.7",
            ours,
            rival,
        ),
        covers_more(
            "Diverse beam search covers more problems than greedy beam search",
            "58.2 against 56.3; 71.2 against 68.3; 70.7 against 67.5",
            rival,
            "greedy beam",
        ),
        covers_more(
            "D5P4 covers more problems than best-of-n by the model's own score",
            "59.3 against 54.0; 72.2 against 70.1; 71.8 against 69.4",
            ours,
            "best of n, internal",
        ),
        Claim(
            f"D5P4 has the lowest self-BLEU at the paper's parameters ({ours}; {rival})",
            "79.13 (next best 80.77); 65.16 (66.70); 65.31 (66.70)",
            "points lower than "
            + "; ".join(f"{name}: {listed(by_order, figures, 1)}" for name, figures in alike.items()),
            all_decided(f for figures in alike.values() for f in figures),
        ),
        *_tuned(setup, by_order),
    ]


def _tuned(setup: Setup, by_order: ByOrder) -> list[Claim]:
    """Return the claims that compare D5P4 with diverse beam search at the parameters tuned for the model."""
    if len(setup["beta"]) < 2 or len(setup["alpha"]) < 2:
        return []
    ours, rival = f"D5P4+, β {setup['beta'][-1]:g}", f"diverse beam, α {setup['alpha'][-1]:g}"
    alike, coverage = _less_alike(by_order, ours, rival), _coverage(by_order, ours, rival, setup["k"])
    pair = f"{ours} against {rival}"
    return [
        Claim(
            f"Ours: tuned D5P4 has a lower self-BLEU than tuned diverse beam search ({pair})",
            "–",
            f"points lower: {listed(by_order, alike, 1)}",
            all_decided(alike),
        ),
        Claim(
            f"Ours: tuned D5P4 covers more problems than tuned diverse beam search ({pair})",
            "–",
            f"difference in points: {listed(by_order, coverage, 1)}",
            all_decided(coverage),
        ),
    ]


def _figure(by_order: ByOrder, k: int) -> object:
    plt = pyplot()
    picture, axes = plt.subplots(1, len(by_order), figsize=(11.5, 3.6), sharey=True)
    for axis, (order, by_way) in zip(axes, by_order.items(), strict=True):
        names = list(by_way)
        for row, name in enumerate(names):
            for n, marker in ((1, "o"), (k, "s")):
                f = figure(100 * by_way[name].solved(n))
                colour = "#0072B2" if name.startswith("D5P4") else "#555555"
                look = {"color": colour, "markerfacecolor": colour if n == k else "white", "linewidth": 1}
                axis.errorbar(f.value, row, xerr=bars([f]), marker=marker, **look)
        axis.set_title(order)
        axis.set_xlabel("problems solved, %")
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    axes[-1].plot([], [], "o", color="#555555", markerfacecolor="white", label="pass@1")
    axes[-1].plot([], [], "s", color="#555555", label=f"pass@{k}")
    picture.legend(fontsize=9, loc="outside lower center", ncols=2)
    return picture


EXPERIMENT = Experiment(
    name="math",
    title="Coverage of right answers",
    paper="GSM8K tables (three orders)",
    settings={"box": BOX, "paper": PAPER},
    draw=draw,
    cases=cases,
    digest=Digest("math", _reduce, ("k",)),
    scorers=("ppl",),
)
