"""Measures the coverage of right answers (pass@1 to pass@k) of search and best-of-n, in three orders of decoding."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from d5p4.eval.graders import grader as grader_named
from d5p4.eval.stats import pass_at

from ..statistics import Figure, figure
from ..tables import Table, listed
from .answers import numbers_of
from .drawing import UNTESTED, Claim, Drawing, all_decided, positive
from .measures import rounded
from .qa import (
    BY_JUDGE,
    BY_MODEL,
    CHANCE,
    POOL,
    WORDS,
    Columns,
    choices,
    columns,
    common_difference,
    judge_names,
    lexical,
    lowest,
    metrics,
    new_pieces,
    points,
    tabulated,
)
from .rows import Row
from .setup import PAPER_SOLVER, SOLVER, Case, Digest, Experiment, Setup, real

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
    "sampled": (),  # the orders in which a k-DPP is sampled while decoding
    "shots": 0,  # solved problems of the training split before each problem
    "select_window": None,  # the steps at which methods select, such as [0, 128]; None: all
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
    "sampled": ("confidence",),
    "judge_dtype": "bfloat16",
}
REAL = real(
    BOX,
    task="gsm8k",
    units=100,
    units_close=100,
    gen_length=128,
    steps=128,
    beta=(25.0,),
    alpha=(20.0,),
    sampled=("confidence", "left"),
    eos="free",
)
ORDERS: Mapping[str, Mapping[str, Any]] = {
    "confidence": {"order": "confidence", "temperature": 1.0},
    "tempered": {"order": "tempered", "temperature": 1.0},
    "tempered argmax": {"order": "tempered", "temperature": 0.0},
}
LEFT = {"left": {"order": "left", "temperature": 1.0}}
STOCHASTIC = ("tempered", "tempered argmax")  # the orders that the paper calls stochastic
TREE = {"temperature": 0.0, "order": "top", "reveal": "threshold", "tau": 0.99, "diversity": 1.0}  # its defaults
TREE_CASE = "ours: tree"
TREE_NOTE = (
    "The tree runs with the defaults of the model `countdown`: up to eight beams (four of them spare), temperature 0, "
    "and all positions above probability 0.99 at once. The other methods reveal one position per step."
)
KEPT = 1.0  # pass@1 counts as kept if it falls by at most this many percentage points
GREEDY = "greedy beam"
SAMPLED = "k-DPP sample"
ORACLE = "best of n, oracle"
WAYS = (CHANCE, BY_JUDGE, BY_MODEL, ORACLE)  # the ways to choose k answers from a pool


def orders_of(setup: Setup) -> Mapping[str, Mapping[str, Any]]:
    return LEFT if setup.settings.get("order") == "left" else ORDERS


def cases(setup: Setup) -> list[Case]:
    planned = []
    for order, rule in orders_of(setup).items():
        common = {name: setup[name] for name in ("gen_length", "steps", "guidance", "eos")} | dict(rule)
        if order in STOCHASTIC:
            common["order_temperature"] = setup["order_temperature"]
        beam = common | {"k": setup["k"], "w": setup["w"]}
        if setup["select_window"] is not None:
            beam["select_window"] = list(setup["select_window"])
        ways = {
            POOL: common | {"method": "independent", "k": setup["k"] * setup["w"]},
            GREEDY: beam | {"method": "greedy-beam"},
        }
        ways |= {f"diverse beam, α {a:g}": beam | {"method": "diverse-beam", "alpha": a} for a in setup["alpha"]}
        ways |= {f"D5P4+, β {b:g}": beam | {"method": "d5p4", "beta": b} for b in setup["beta"]}
        if order in setup["sampled"]:
            ways[SAMPLED] = beam | {"method": "k-dpp", "beta": setup["beta"][0]}
        close = (f"diverse beam, α {setup['alpha'][0]:g}", f"D5P4+, β {setup['beta'][0]:g}")
        for name, options in ways.items():
            units = setup["units_close" if name in close else "units"]
            task = f"{setup['task']}:{setup['shots']}" if setup["shots"] else setup["task"]
            planned.append(Case(f"{order}: {name}", options, units, task, order))
    if setup["task"].startswith("countdown"):
        tree = {"method": "tree", "k": setup["k"], "gen_length": setup["gen_length"], **TREE}
        planned.append(Case(TREE_CASE, tree, setup["units_close"], setup["task"], "ours"))
    return planned


def _is_pool(case: Case) -> bool:
    return case.name.endswith(f": {POOL}")


def _reduce(setup: Setup, case: Case, unit: int, row: Row, scores: Mapping[str, Row]) -> Row:
    """Return measures of k answers, for each way to choose them. A pool has four ways.

    "right" counts the right answers (also of the whole pool), and "forms" the different right answers.
    """
    task = setup.task(case.task, case.units)
    grader, example = grader_named(task.grader or "exact"), task.examples[unit]
    texts = [text.split("\nQuestion:")[0] for text in row["texts"]]  # after examples a model may invent more problems
    right = grader.grade(example.prompt, texts, example.gold)
    assert right is not None, f"{task.name} {unit} cannot be graded"
    chosen, made = {"": list(range(len(right)))}, {}
    if _is_pool(case):
        chosen = choices(setup, unit, row, scores) | {ORACLE: lowest([not mark for mark in right], setup["k"])}
        made = {"right": sum(right)} | ({"new": new_pieces(setup, case.name)[unit]} if example.references else {})
    measured = {}
    for name, places in chosen.items():
        forms = len({grader.key(row["texts"][place]) for place in places if right[place]})
        values = {"right": sum(right[place] for place in places), "forms": forms}
        measured[name] = rounded(values | lexical([row["texts"][place] for place in places], example.references))
    return {"ways": measured, **made}


def _read(setup: Setup, case: Case, row: Row) -> Row:
    """Return the measures by way, with pass@n in the place of the number of right answers.

    pass@n of independent sampling is a mean over all choices of n answers from the whole pool.
    """
    k, made = setup["k"], {}
    for name, values in row["ways"].items():
        right, size = (row["right"], k * setup["w"]) if name == CHANCE else (values["right"], k)
        marks = np.arange(size)[None] < right
        passed = {f"pass@{n}": float(pass_at(marks, n)[0]) for n in range(1, k + 1)}
        made[name] = passed | {measure: value for measure, value in values.items() if measure != "right"}
    return {"ways": made, "new": row.get("new", 0)}


def ways(setup: Setup, order: str) -> dict[str, Columns]:
    by_name = {case.name.split(": ", 1)[1]: case for case in setup.cases if case.group == order}
    pooled = numbers_of(setup, by_name.pop(POOL))
    vocabulary = sum(row["new"] for row in pooled)
    made = {name: columns([row["ways"][name] for row in pooled], vocabulary) for name in WAYS[:3]}
    for name, case in by_name.items():
        made[name] = columns([row["ways"][""] for row in numbers_of(setup, case)], vocabulary)
    return made | {ORACLE: columns([row["ways"][ORACLE] for row in pooled], vocabulary)}


def draw(setup: Setup) -> Drawing:
    k = setup["k"]
    by_order: dict[str, Mapping[str, Columns]] = {order: ways(setup, order) for order in orders_of(setup)}
    units = {len(m["forms"]) for by_way in by_order.values() for m in by_way.values()}
    for case in setup.cases:
        if case.name == TREE_CASE:
            by_order["ours"] = {"tree": columns([row["ways"][""] for row in numbers_of(setup, case)], 0)}
    tables: list[Table] = []
    numbers: dict[str, dict[str, Figure]] = {}
    for order, by_way in by_order.items():
        cells = {name: _cells(m, k) for name, m in by_way.items()}
        table, by_method = tabulated("Ours" if order == "ours" else f"Order: {order}", cells)
        tables.append(table)
        numbers |= {f"{order}: {name}": figures for name, figures in by_method.items()}
    passes = f", {setup['passes']} passes" if "passes" in setup.settings else ""
    many = f", and {max(units):,} for D5P4 and diverse beam search at the paper's values" if len(units) > 1 else ""
    note = (
        f"{min(units):,} problems{many} ({setup['task']}){passes}, k = {k}, w = "
        f"{setup['w']}, guidance {setup['guidance']:g}. Different right is the number of different right "
        "answers per problem. Entropy is in nats, and all other metrics are in %. "
        f"Independent sampling takes k of {k * setup['w']} samples, averaged over all choices. Best of n takes k "
        f"of the same {k * setup['w']} samples: by perplexity under {judge_names(setup)[0]}, by the model's own "
        "entropy, or by an oracle that knows the right answers. β 25 and α 20 are the paper's values; others were "
        f"tuned for this model on other problems (docs/box.md). {WORDS}" + f" {TREE_NOTE}" * ("ours" in by_order)
    )
    tables[-1] = replace(tables[-1], note=note)
    return Drawing(tables, None, numbers, _claims(setup, by_order))


def _cells(m: Columns, k: int) -> dict[str, tuple[Figure, int]]:
    made = {f"pass@{n}": (figure(points(m, f"pass@{n}")), 1) for n in (1, 2, 4) if n <= k}
    return made | {"different right": (figure(m["forms"]), 2)} | metrics(m, k)


ByOrder = Mapping[str, Mapping[str, Columns]]  # the measures by order of decoding and method


def _claims(setup: Setup, by_order: ByOrder) -> list[Claim]:
    k = setup["k"]
    ours, rival = f"D5P4+, β {setup['beta'][0]:g}", f"diverse beam, α {setup['alpha'][0]:g}"

    known = list(orders_of(setup))
    plain, noisy = known[:1], [order for order in known if order in STOCHASTIC]

    def gains(measure: str, a: str, b: str, orders: Sequence[str] = known) -> dict[str, Figure]:
        """By how many points method a is above method b in each order, over the problems that both have."""
        pairs = {order: (by_order[order][a], by_order[order][b]) for order in orders}
        return {order: common_difference(points(x, measure), points(y, measure)) for order, (x, y) in pairs.items()}

    spoken = {CHANCE: "independent sampling", GREEDY: "greedy beam search", rival: "diverse beam search", ours: "D5P4"}
    spoken |= {BY_MODEL: "best of n by the model's own score", BY_JUDGE: "best of n by perplexity"}
    spoken |= {SAMPLED: "samples of a k-DPP while decoding"}

    def covers_more(
        a: str, b: str, paper: str, orders: Sequence[str] = known, note: str = "", where: str = ""
    ) -> Claim:
        claim = f"{where}{spoken[a]} covers more problems than {spoken[b]} (pass@{k})"
        claim = claim[0].upper() + claim[1:]
        if not orders or b not in by_order[orders[0]]:
            return Claim(claim, paper, "not measured", UNTESTED)
        return positive(claim, paper, "difference in points", gains(f"pass@{k}", a, b, orders), 1, note)

    def ahead_of_all(claim: str, paper: str, measure: str, rivals: Sequence[str]) -> Claim:
        lower = measure == "S-BLEU"
        figures = {name: gains(measure, *((name, ours) if lower else (ours, name))) for name in rivals}
        texts = "; ".join(f"{name}: {listed(by, by.values(), 1)}" for name, by in figures.items())
        verdict = all_decided(figure for by in figures.values() for figure in by.values())
        return Claim(claim, paper, f"points {'lower' if lower else 'higher'} than {texts}", verdict)

    judge = "the paper's judge solves such problems itself, and ours does not" if "countdown" in setup["task"] else ""
    keeps = f"D5P4 keeps the pass@1 of {{}} (it falls by at most {KEPT:g} point)"
    first, both = "44.4; 47.3; 47.1 against", "in both stochastic orders, "
    kept = {
        CHANCE: "44.5; 45.5; 45.2",
        GREEDY: "44.4; 47.3; 47.2",
        rival: "44.4; 47.4; 47.2",
        BY_MODEL: "44.4; 46.8; 46.2",
    }
    claims = [
        covers_more(ours, CHANCE, "59.3 against 54.5; 72.2 against 69.4; 71.8 against 69.2"),
        *(
            positive(
                keeps.format(spoken[b]),
                f"{first} {paper}",
                "difference in points",
                gains("pass@1", ours, b),
                1,
                "",
                -KEPT,
            )
            for b, paper in kept.items()
        ),
        covers_more(ours, rival, "59.3 against 58.2; 72.2 against 71.2; 71.8 against 70.7"),
        covers_more(ours, GREEDY, "59.3 against 56.3; 72.2 against 68.3; 71.8 against 67.5"),
        covers_more(rival, GREEDY, "58.2 against 56.3; 71.2 against 68.3; 70.7 against 67.5"),
        covers_more(ours, BY_MODEL, "59.3 against 54.0; 72.2 against 70.1; 71.8 against 69.4"),
        covers_more(ours, BY_JUDGE, "59.3 against 56.3", plain, where="without noise in the order, "),
        covers_more(BY_JUDGE, ours, "72.6 against 72.2; 72.0 against 71.8", noisy, judge, both),
        covers_more(ours, SAMPLED, "text: MAP “avoids the trajectory drift” of sampling", plain),
        covers_more(CHANCE, GREEDY, "69.4 against 68.3; 69.2 against 67.5", noisy, where=both),
    ]
    lowest_bleu = f"D5P4 has the lowest self-BLEU at the paper's parameters ({ours}; {rival})"
    highest_pass = "D5P4 has the highest pass@2 of the methods that need no outside judge"
    most_grams = "D5P4's answers have the most different n-grams (D1-3)"
    best = [
        (lowest_bleu, "79.13 (next best 80.77); 65.16 (66.70); 65.31 (66.70)", "S-BLEU"),
        (highest_pass, "52.5 (next best 51.9); 61.2 (60.7); 60.9 (60.3)", "pass@2"),
        (most_grams, "23.72 (next best 23.13); 28.92 (28.64); 28.84 (28.59)", "D1-3"),
    ]
    if "F1@k" in by_order[known[0]][ours]:
        paper = "31.48 (next best 31.39); 32.85 (32.76); 32.79 (32.69)"
        best.append(("D5P4's best answer is nearest to the reference (F1@k)", paper, "F1@k"))
    for claim, paper, measure in best:
        judged = () if measure == "pass@2" else (BY_JUDGE,)  # pass@2 is claimed among the methods without a judge
        claims.append(ahead_of_all(claim, paper, measure, (CHANCE, GREEDY, rival, *judged, BY_MODEL)))
    for name, tree in by_order.get("ours", {}).items():
        for method in (CHANCE, ours, rival):
            rivals = {order: points(by_order[order][method], f"pass@{k}") for order in known}
            figures = {o: common_difference(points(tree, f"pass@{k}"), one) for o, one in rivals.items()}
            claim = f"Ours: the {name} covers more problems than {spoken[method]} in each of its orders (pass@{k})"
            claims.append(positive(claim, "–", f"points above {spoken[method]} in its order", figures, 1, TREE_NOTE))
    return claims


EXPERIMENT = Experiment(
    name="math",
    title="Coverage of right answers",
    paper="GSM8K tables (three orders)",
    settings={"box": BOX, "paper": PAPER, **REAL},
    draw=draw,
    cases=cases,
    digest=Digest("math", _reduce, ("k",), read=_read),
    scorers=("ppl",),
    scored=_is_pool,  # perplexity only chooses answers of a pool: the paper's tables do not show it
)
