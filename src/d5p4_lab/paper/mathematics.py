"""Measures the coverage of right answers (pass@1 to pass@k) of search and best-of-n, in three orders of decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from d5p4.eval.graders import grader as grader_named
from d5p4.eval.stats import pass_at

from ..statistics import Figure, figure
from . import continuation
from .answers import numbers_of
from .continuation import (
    BY_JUDGE,
    BY_MODEL,
    CHANCE,
    LEXICAL,
    POOL,
    REFERRED,
    ROUNDED,
    WORDS,
    Columns,
    Measures,
    Step,
    best_internal,
    best_perplexity,
    by_chance,
    columns,
    common_difference,
    from_letters,
    judge_names,
    lexical,
    lowest,
    metrics,
    new_pieces,
    points,
    to_letters,
    unit_of_row,
)
from .drawing import Claim, Drawing, Table, all_decided, bars, decided, every, listed, pyplot, shown
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
    "units_close": 6000,  # problems for D5P4 and diverse beam search at the paper's values, which lie close together
    "guidance": 1.0,
    "solver": SOLVER,
    "beta": (25.0, 100.0),  # the paper's value, and the value tuned for this model
    "alpha": (20.0, 100.0),  # for diverse beam search: the paper's value, and the value tuned for this model
    "order_temperature": 0.1,
    "eos": "last",
    "rounding": 1.0,  # numbers are rounded to this many steps of `continuation.STEPS`
}
PAPER: Mapping[str, Any] = dict(BOX) | {
    "model": "GSAI-ML/LLaDA-8B-Instruct",
    "judges": ("meta-llama/Meta-Llama-3-8B",),
    "task": "gsm8k",
    "gen_length": 256,
    "steps": 256,
    "units": 1319,
    "units_close": 1319,
    "passes": 1,  # how often each problem is decoded; standard errors of 0.3 points, as in the paper, need about 20
    "guidance": 2.5,
    "solver": PAPER_SOLVER,
    "beta": (25.0,),
    "alpha": (20.0,),
    "eos": "free",
    "rounding": 0.02,
    "judge_dtype": "bfloat16",
}
ORDERS: Mapping[str, Mapping[str, Any]] = {
    "confidence": {"order": "confidence", "temperature": 1.0},
    "tempered": {"order": "tempered", "temperature": 1.0},
    "tempered argmax": {"order": "tempered", "temperature": 0.0},
}
STOCHASTIC = ("tempered", "tempered argmax")  # the orders that the paper calls stochastic
TREE = {"temperature": 0.0, "order": "top", "reveal": "threshold", "tau": 0.99, "diversity": 1.0}  # its defaults
TREE_CASE = "ours: tree"
TREE_NOTE = (
    "The tree runs with the defaults of the model `countdown`: up to eight beams (four of them spare), temperature 0, "
    "and all positions above probability 0.99 at once. The other methods reveal one position per step."
)
KEPT = 1.0  # pass@1 counts as kept if it falls by at most this many percentage points
GREEDY = "greedy beam"
ORACLE = "best of n, oracle"
WAYS = (CHANCE, BY_JUDGE, BY_MODEL, ORACLE)  # the ways to choose k answers from a pool


def cases(setup: Setup) -> list[Case]:
    planned = []
    for order, rule in ORDERS.items():
        common = {name: setup[name] for name in ("gen_length", "steps", "guidance", "eos")} | dict(rule)
        if order != "confidence":
            common["order_temperature"] = setup["order_temperature"]
        beam = common | {"k": setup["k"], "w": setup["w"]}
        ways = {
            POOL: common | {"method": "independent", "k": setup["k"] * setup["w"]},
            GREEDY: beam | {"method": "greedy-beam"},
        }
        ways |= {f"diverse beam, α {a:g}": beam | {"method": "diverse-beam", "alpha": a} for a in setup["alpha"]}
        ways |= {f"D5P4+, β {b:g}": beam | {"method": "d5p4", "beta": b} for b in setup["beta"]}
        close = (f"diverse beam, α {setup['alpha'][0]:g}", f"D5P4+, β {setup['beta'][0]:g}")
        for name, options in ways.items():
            units = setup["units_close" if name in close else "units"]
            planned.append(Case(f"{order}: {name}", options, units, setup["task"], order))
    tree = {"method": "tree", "k": setup["k"], "gen_length": setup["gen_length"], **TREE}
    if setup["task"].startswith("countdown"):
        planned.append(Case(TREE_CASE, tree, setup["units_close"], setup["task"], "ours"))
    return planned


def _is_pool(case: Case) -> bool:
    return case.name.endswith(f": {POOL}")


NAMES = ("right", "forms", *LEXICAL, *REFERRED)
STEPS = dict(continuation.STEPS) | {"entropy": Step(0.04), "D1": Step(0.012), "S-BLEU": Step(5.0)}  # not prose


def _reduce(setup: Setup, case: Case, unit: int, row: Row, scores: Mapping[str, Row]) -> Row:
    """Return measures of k answers as letters, for each way to choose them (see `continuation`). A pool has four ways.

    "right" is the number of right answers, and "forms" is the number of different right answers. The numbers of a pool
    also have the number of right answers in the whole pool and, if there are references, their new word pieces.
    """
    task = setup.task(case.task, case.units)
    grader, example = grader_named(task.grader or "exact"), task.examples[unit]
    right = grader.grade(example.prompt, row["texts"], example.gold)
    assert right is not None, f"{task.name} {unit} cannot be graded"
    ways = {"": list(range(len(right)))}
    made: Row = {}
    if _is_pool(case):
        oracle = lowest([not mark for mark in right], setup["k"])
        chosen = (by_chance(setup, unit, row), best_perplexity(setup, scores), best_internal(setup), oracle)
        ways = dict(zip(WAYS, chosen, strict=True))
        made = {"right": sum(right)} | ({"new": new_pieces(setup, case.name)[unit]} if example.references else {})
    for name, places in ways.items():
        forms = len({grader.key(row["texts"][place]) for place in places if right[place]})
        values: Measures = {"right": sum(right[place] for place in places), "forms": forms}
        values |= lexical([row["texts"][place] for place in places], example.references)
        made[name] = to_letters(values, STEPS, setup["rounding"], unit)
    return made


def _read(setup: Setup, case: Case, row: Row) -> Row:
    """Return {"ways": measures by way}. The measures pass@n take the place of the number of right answers.

    pass@n of independent sampling is a mean over all choices of n answers from the whole pool.
    """
    k, made = setup["k"], {}
    for name in WAYS if _is_pool(case) else ("",):
        values = from_letters(row[name], NAMES, STEPS, setup["rounding"], unit_of_row(row))
        right, size = values.pop("right"), k
        if name == CHANCE:
            right, size = row["right"], k * setup["w"]
        marks = np.arange(size)[None] < right
        made[name] = {f"pass@{n}": float(pass_at(marks, n)[0]) for n in range(1, k + 1)} | values
    return {"ways": made, "new": row.get("new", 0)}


def ways(setup: Setup, order: str) -> dict[str, Columns]:
    """Return the measures of every method in one order of decoding."""
    by_name = {case.name.split(": ", 1)[1]: case for case in setup.cases if case.group == order}
    pooled = numbers_of(setup, by_name.pop(POOL))
    vocabulary = sum(row["new"] for row in pooled)
    made = {name: columns([row["ways"][name] for row in pooled], vocabulary) for name in WAYS[:3]}
    for name, case in by_name.items():
        made[name] = columns([row["ways"][""] for row in numbers_of(setup, case)], vocabulary)
    return made | {ORACLE: columns([row["ways"][ORACLE] for row in pooled], vocabulary)}


def draw(setup: Setup) -> Drawing:
    k = setup["k"]
    by_order = {order: ways(setup, order) for order in ORDERS}
    shown_orders: dict[str, Mapping[str, Columns]] = dict(by_order)
    for case in setup.cases:
        if case.name == TREE_CASE:
            rows = [row["ways"][""] for row in numbers_of(setup, case)]
            shown_orders["ours"] = {"tree": columns(rows, 0)}
    tables: list[Table] = []
    numbers: dict[str, dict[str, Figure]] = {}
    for order, by_way in shown_orders.items():
        cells = {name: _cells(m, k) for name, m in by_way.items()}
        rows = [[name, *(shown(*cell) for cell in line.values())] for name, line in cells.items()]
        heads = [f"{head}, %" if head.startswith("pass@") else head for head in next(iter(cells.values()))]
        tables.append(Table(f"Order: {order}" if order in ORDERS else "Ours", ["method", *heads], rows))
        numbers |= {
            f"{order}: {name}": {metric: cell[0] for metric, cell in line.items()} for name, line in cells.items()
        }
    passes = f", {setup['passes']} passes" if "passes" in setup.settings else ""
    units = {len(m["forms"]) for by_way in by_order.values() for m in by_way.values()}
    many = f", and {max(units):,} for D5P4 and diverse beam search at the paper's values" if len(units) > 1 else ""
    note = (
        f"{min(units):,} problems{many} ({setup['task']}){passes}, k = {k}, w = "
        f"{setup['w']}, guidance {setup['guidance']:g}. Different right is the number of different right "
        "answers per problem. Entropy is in nats, and all other metrics are in %. "
        f"Independent sampling takes k of {k * setup['w']} samples, averaged over all choices. Best of n takes k "
        f"of the same {k * setup['w']} samples: by perplexity under {judge_names(setup)[0]}, by the model's own "
        "entropy, or by an oracle that knows the right answers. β 25 and α 20 are the paper's values; others were "
        f"tuned for this model on other problems (docs/box.md). {WORDS} {ROUNDED} Right answers are counted exactly."
    )
    if "ours" in shown_orders:
        note += f" {TREE_NOTE}"
    tables[-1] = Table(tables[-1].title, tables[-1].columns, tables[-1].rows, note)
    return Drawing(tables, _figure(shown_orders, k), numbers, _claims(setup, shown_orders))


def _cells(m: Columns, k: int) -> dict[str, tuple[Figure, int]]:
    made = {f"pass@{n}": (figure(points(m, f"pass@{n}")), 1) for n in (1, 2, 4) if n <= k}
    return made | {"different right": (figure(m["forms"]), 2)} | metrics(m, k)


ByOrder = Mapping[str, Mapping[str, Columns]]
"""The measures by order of decoding and method."""


def _gains(by_order: ByOrder, measure: str, a: str, b: str, orders: Sequence[str] = tuple(ORDERS)) -> list[Figure]:
    """Return by how many points method a is above method b in each order, over the problems that both have."""
    ours = [by_order[order] for order in orders]
    return [common_difference(points(by_way[a], measure), points(by_way[b], measure)) for by_way in ours]


def _claims(setup: Setup, by_order: ByOrder) -> list[Claim]:
    k = setup["k"]
    ours, rival = f"D5P4+, β {setup['beta'][0]:g}", f"diverse beam, α {setup['alpha'][0]:g}"

    def covers_more(
        claim: str, paper: str, a: str, b: str, orders: Sequence[str] = tuple(ORDERS), note: str = ""
    ) -> Claim:
        gains = _gains(by_order, f"pass@{k}", a, b, orders)
        values = f"difference in points: {listed(orders, gains, 1)}"
        return Claim(f"{claim} (pass@{k})", paper, values, all_decided(gains), note)

    def least_alike(claim: str, paper: str, measure: str, sign: int) -> Claim:
        rivals = (CHANCE, GREEDY, rival, BY_JUDGE, BY_MODEL)
        gains = {name: [f if sign > 0 else -f for f in _gains(by_order, measure, ours, name)] for name in rivals}
        texts = "; ".join(f"{name}: {listed(ORDERS, figures, 1)}" for name, figures in gains.items())
        verdict = all_decided(f for figures in gains.values() for f in figures)
        return Claim(claim, paper, f"points {'higher' if sign > 0 else 'lower'} than {texts}", verdict)

    single = _gains(by_order, "pass@1", ours, CHANCE)
    claims = [
        covers_more(
            "D5P4 covers more problems than independent sampling",
            "59.3 against 54.5; 72.2 against 69.4; 71.8 against 69.2",
            ours,
            CHANCE,
        ),
        Claim(
            f"D5P4 keeps the pass@1 of independent sampling (it falls by at most {KEPT:g} point)",
            "44.4 against 44.5; 47.3 against 45.5; 47.1 against 45.2",
            f"difference in points: {listed(ORDERS, single, 1)}",
            every(decided(f, -KEPT) for f in single),
        ),
        covers_more(
            "D5P4 covers more problems than diverse beam search",
            "59.3 against 58.2; 72.2 against 71.2; 71.8 against 70.7",
            ours,
            rival,
        ),
        covers_more(
            "D5P4 covers more problems than greedy beam search",
            "59.3 against 56.3; 72.2 against 68.3; 71.8 against 67.5",
            ours,
            GREEDY,
        ),
        covers_more(
            "Diverse beam search covers more problems than greedy beam search",
            "58.2 against 56.3; 71.2 against 68.3; 70.7 against 67.5",
            rival,
            GREEDY,
        ),
        covers_more(
            "D5P4 covers more problems than best of n by the model's own score",
            "59.3 against 54.0; 72.2 against 70.1; 71.8 against 69.4",
            ours,
            BY_MODEL,
        ),
        covers_more(
            "In confidence order, D5P4 covers more problems than best of n by perplexity",
            "59.3 against 56.3",
            ours,
            BY_JUDGE,
            ["confidence"],
        ),
        covers_more(
            "In both stochastic orders, best of n by perplexity covers more problems than D5P4",
            "72.6 against 72.2; 72.0 against 71.8",
            BY_JUDGE,
            ours,
            STOCHASTIC,
            "the paper's judge solves such problems itself, and ours does not" if "countdown" in setup["task"] else "",
        ),
        covers_more(
            "In both stochastic orders, independent sampling covers more problems than greedy beam search",
            "69.4 against 68.3; 69.2 against 67.5",
            CHANCE,
            GREEDY,
            STOCHASTIC,
        ),
        least_alike(
            f"D5P4 has the lowest self-BLEU at the paper's parameters ({ours}; {rival})",
            "79.13 (next best 80.77); 65.16 (66.70); 65.31 (66.70)",
            "S-BLEU",
            -1,
        ),
    ]
    if k >= 2:
        gains = {name: _gains(by_order, "pass@2", ours, name) for name in (CHANCE, GREEDY, rival, BY_MODEL)}
        claims.append(
            Claim(
                "D5P4 has the highest pass@2 of the methods that need no outside judge",
                "52.5 (next best 51.9); 61.2 (60.7); 60.9 (60.3)",
                "points higher than " + "; ".join(f"{name}: {listed(ORDERS, f, 1)}" for name, f in gains.items()),
                all_decided(f for figures in gains.values() for f in figures),
            )
        )
    claims.append(
        least_alike(
            "D5P4's answers have the most different n-grams (D1-3)",
            "23.72 (next best 23.13); 28.92 (28.64); 28.84 (28.59)",
            "D1-3",
            1,
        )
    )
    if "F1@k" in by_order["confidence"][ours]:
        claims.append(
            least_alike(
                "D5P4's best answer is nearest to the reference (F1@k)",
                "31.48 (next best 31.39); 32.85 (32.76); 32.79 (32.69)",
                "F1@k",
                1,
            )
        )
    return claims + _our_claims(setup, by_order)


def _our_claims(setup: Setup, by_order: ByOrder) -> list[Claim]:
    """Return the claims that the paper does not make: on parameters tuned for the model, and on the tree."""
    k, claims = setup["k"], []
    if len(setup["beta"]) > 1 and len(setup["alpha"]) > 1:
        ours, rival = f"D5P4+, β {setup['beta'][-1]:g}", f"diverse beam, α {setup['alpha'][-1]:g}"
        alike = [-f for f in _gains(by_order, "S-BLEU", ours, rival)]
        coverage = _gains(by_order, f"pass@{k}", ours, rival)
        pair = f"{ours} against {rival}"
        claims += [
            Claim(
                f"Ours: tuned D5P4 has a lower self-BLEU than tuned diverse beam search ({pair})",
                "–",
                f"points lower: {listed(ORDERS, alike, 1)}",
                all_decided(alike),
            ),
            Claim(
                f"Ours: tuned D5P4 covers more problems than tuned diverse beam search ({pair})",
                "–",
                f"difference in points: {listed(ORDERS, coverage, 1)}",
                all_decided(coverage),
            ),
        ]
    for name, tree in by_order.get("ours", {}).items():
        methods = {CHANCE: "independent sampling", f"D5P4+, β {setup['beta'][0]:g}": "D5P4"}
        methods[f"diverse beam, α {setup['alpha'][0]:g}"] = "diverse beam search"
        for method, text in methods.items():
            rivals = [points(by_order[order][method], f"pass@{k}") for order in ORDERS]
            gains = [common_difference(points(tree, f"pass@{k}"), one) for one in rivals]
            values = f"points above {text} in its order: {listed(ORDERS, gains, 1)}"
            claim = f"Ours: the {name} covers more problems than {text} in each of its orders (pass@{k})"
            claims.append(Claim(claim, "–", values, all_decided(gains), TREE_NOTE))
    return claims


def _figure(by_order: ByOrder, k: int) -> object:
    plt = pyplot()
    names = list(dict.fromkeys(name for by_way in by_order.values() for name in by_way))
    picture, axes = plt.subplots(1, len(ORDERS), figsize=(11.5, 3.9), sharey=True)
    for axis, order in zip(axes, ORDERS, strict=True):
        by_way = dict(by_order[order]) | dict(by_order.get("ours", {}))
        for row, name in enumerate(names):
            for n, marker in ((1, "o"), (k, "s")):
                f = figure(points(by_way[name], f"pass@{n}"))
                colour = {"D5P4": "#0072B2", "tree": "#CC79A7"}.get(name[:4], "#555555")
                look = {"color": colour, "markerfacecolor": colour if n == k else "white", "linewidth": 1}
                axis.errorbar(f.value, row, xerr=bars([f]), marker=marker, **look)
        axis.set_title(order)
        axis.set_xlabel("problems solved, %")
    axes[0].set_yticks(
        range(len(names)), [f"{name} (ours, any order)" if name[:4] == "tree" else name for name in names]
    )
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
    digest=Digest("math", _reduce, ("k", "rounding"), STEPS, _read),
    scorers=("ppl",),
    scored=_is_pool,  # perplexity only chooses answers of a pool: the paper's tables do not show it
)
