"""Measures the share of problems with a right answer against the number of rows that go through the model.

The experiment compares independent sampling, D5P4, D5P4 with distinct children, D5P4 with more children per beam, and
the tree. If several rows of a pool are equal, only one of them goes through the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from d5p4.eval.graders import grader as grader_named
from d5p4.eval.stats import pass_at

from ..figures import pyplot
from ..statistics import Figure, figure, ratio_figure
from ..tables import Table, listed, shown
from .answers import numbers_of
from .continuation import common_difference
from .drawing import STYLES, Claim, Drawing, all_decided, decided
from .mathematics import TREE
from .rows import Row
from .setup import PAPER_SOLVER, SOLVER, Case, Digest, Experiment, Setup

BOX: Mapping[str, Any] = {
    "model": "countdown",
    "tasks": ("countdown:4", "countdown:5"),
    "k": 4,
    "units": 1000,
    "units_close": 5000,  # problems for the cases that are compared at equal rows: those of "close"
    "close": {  # the independent answers that need about as many rows as D5P4 without and with distinct children
        "countdown:4": (8, 12),
        "countdown:5": (6, 8),
    },
    "tree": (4, 8),  # beams of the tree, which is ours
    "solver": SOLVER,
    "beta": 100.0,
    "w": (2, 4, 8, 16),
    "more": (4, 6, 8, 12, 16, 24, 32),  # numbers of independent answers per problem; each number is a case
    "gen_length": None,  # None means the length in LENGTHS
}
PAPER: Mapping[str, Any] = dict(BOX) | {
    "model": "GSAI-ML/LLaDA-8B-Instruct",
    "tasks": ("gsm8k",),
    "units": 1319,
    "units_close": 1319,
    "close": {"gsm8k": ()},
    "tree": (),
    "beta": 25.0,
    "more": (4, 8, 16, 32),
    "guidance": 2.5,  # as in the experiment math
    "eos": "free",
    "solver": PAPER_SOLVER,
}
LENGTHS = {"countdown:4": 36, "countdown:5": 48, "gsm8k": 256}
WIDTH = 4  # children per beam of the cases that are compared with independent answers
TREES = "tree (ours)"
LABELS = {
    "independent": "independent: all answers (number at the point)",
    "D5P4+": "D5P4+: {k} answers, w children per beam",
    "distinct": "D5P4+ with distinct children: {k} answers",
    TREES: "tree (ours): {k} answers from K beams",
}


def cases(setup: Setup) -> list[Case]:
    planned = []
    for task in setup["tasks"]:
        length = setup["gen_length"] or LENGTHS[task]
        bare = {"gen_length": length} | {name: setup[name] for name in ("guidance", "eos") if name in setup.settings}
        common = bare | {"steps": length, "temperature": 1.0, "order": "confidence"}
        beam = common | {"k": setup["k"], "method": "d5p4", "beta": setup["beta"]}
        ways = [("independent", f"{m} answers", common | {"method": "independent", "k": m}, m) for m in setup["more"]]
        ways += [("D5P4+", f"w {w}", beam | {"w": w}, w) for w in setup["w"]]
        ways += [("distinct", f"w {w}", beam | {"w": w, "distinct": True}, w) for w in setup["w"]]
        ways += [
            (TREES, f"K {K}", {"method": "tree", "k": setup["k"], "spare": K - setup["k"], **bare | TREE}, K)
            for K in setup["tree"]
        ]
        close = {("D5P4+", WIDTH), ("distinct", WIDTH), *(("independent", m) for m in setup["close"].get(task, ()))}
        close |= {(TREES, K) for K in setup["tree"]}
        for group, name, options, value in ways:
            units = setup["units_close" if (group, value) in close else "units"]
            planned.append(Case(f"{task} {group}, {name}", options, units, task, group, float(value)))
    return planned


def _reduce(setup: Setup, case: Case, unit: int, row: Row, scores: Mapping[str, Row]) -> Row:
    """Return counts: right answers, right answers among the k best, different right answers, and the cost of the set.

    The k best are the first k, because answers are sorted by the model's own score.
    """
    task = setup.task(case.task, case.units)
    grader, example = grader_named(task.grader or "exact"), task.examples[unit]
    right = grader.grade(example.prompt, row["texts"], example.gold)
    assert right is not None, f"{task.name} {unit} cannot be graded"
    forms = len({grader.key(text) for text, mark in zip(row["texts"], right, strict=True) if mark})
    counts = {"right": sum(right), "best": sum(right[: setup["k"]]), "forms": forms}
    return counts | {name: row[name] for name in ("rows", "nominal", "nfe")}


def _read(setup: Setup, case: Case, row: Row) -> Row:
    """Return whether any answer is right (covered), whether one of the k best is (best), pass@k, forms and costs."""
    k, answers, covered = setup["k"], case.options["k"], float(row["right"] > 0)
    at_k = float(pass_at(np.arange(answers)[None] < row["right"], k)[0]) if answers >= k else covered
    costs = {name: row[name] for name in ("forms", "rows", "nominal", "nfe")}
    return costs | {"covered": covered, "best": float(row["best"] > 0), "pass@k": at_k}


class Spent:
    """The right answers of a case, and its cost in rows per problem. The arrays have one entry per problem."""

    def __init__(self, setup: Setup, case: Case) -> None:
        rows = numbers_of(setup, case)
        made = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        self.covered, self.best, self.at_k, self.forms = (made[n] for n in ("covered", "best", "pass@k", "forms"))
        self.rows, self.nominal = figure(made["rows"]), float(made["nominal"].mean())
        self.steps, self.share = float(made["nfe"].mean()), ratio_figure(made["rows"], made["nominal"])


def draw(setup: Setup) -> Drawing:
    by_case = {case.name: Spent(setup, case) for case in setup.cases}
    k = setup["k"]
    tables, numbers = [], {}
    for task in setup["tasks"]:
        rows = []
        for case in (case for case in setup.cases if case.task == task):
            spent = by_case[case.name]
            values = {"covered": spent.covered, f"pass@{k}": spent.at_k, f"best {k}": spent.best}
            figures = {name: figure(100 * value) for name, value in values.items()} | {"forms": figure(spent.forms)}
            numbers[case.name] = figures | {"rows": spent.rows, "nominal": spent.nominal, "steps": spent.steps}
            cells = [shown(f, 2 if name == "forms" else 1) for name, f in figures.items()]
            cost = [f"{spent.rows.value:.0f}", f"{spent.nominal:.0f}", f"{spent.steps:.1f}"]
            rows.append([case.name.removeprefix(f"{task} "), f"{len(spent.covered):,}", *cells, *cost])
        share = ["covered, %", f"pass@{k}, %", f"best {k}, %"]
        heads = ["case", "problems", *share, "different right", "rows", "nominal", "steps"]
        note = (
            "Covered: the share of problems with at least one right answer. "
            f"pass@{k}: the same for {k} of the answers, averaged over all choices. Best {k}: the same for the {k} "
            "answers with the best score of the model itself, as best of n takes them. Rows: the rows that went "
            "through the model per problem. Nominal: the rows that the paper counts, equal rows included. Steps: "
            "forward passes one after another. The tree reveals all positions above probability 0.99 at once, the "
            "other methods one position per step. docs/box.md compares methods that share this rule."
        )
        tables.append(Table(task, heads, rows, note))
    return Drawing(tables, _figure(setup, by_case), numbers, _claims(setup, by_case))


def _claims(setup: Setup, by_case: Mapping[str, Spent]) -> list[Claim]:
    width = WIDTH if WIDTH in setup["w"] else setup["w"][0]
    return [claim for task in setup["tasks"] for claim in _task_claims(setup, by_case, task, width, max(setup["w"]))]


def _task_claims(setup: Setup, by_case: Mapping[str, Spent], task: str, width: int, largest: int) -> list[Claim]:
    k = setup["k"]
    plain, wide = (by_case[f"{task} D5P4+, w {w}"] for w in (width, largest))
    other, many = (by_case[f"{task} distinct, w {w}"] for w in (width, largest))

    def gain(claim: str, a: Spent, b: Spent, more: Mapping[str, Figure] | None = None) -> Claim:
        """The claim that `b` covers more problems than `a`, and is better in what else is given."""
        figures = {"points": _gain(b, a)} | dict(more or {})
        text = listed(figures, figures.values()) + f"; rows per problem: {a.rows.value:.0f} → {b.rows.value:.0f}"
        return Claim(f"Ours ({task}): {claim}", "–", text, all_decided(figures.values()))

    claims = [
        Claim(
            f"Ours ({task}): running equal rows only once saves more than half of the rows (D5P4, w {width})",
            "–",
            f"{plain.rows.value:.0f} rows per problem instead of {plain.nominal:.0f}, that is "
            f"{shown(plain.share, 1, 100)} % of them",
            decided(-plain.share, -0.5),
            scale=-100.0,
        ),
        gain(
            "with distinct children, D5P4 covers more problems and finds more different right answers",
            plain,
            other,
            {"different right answers": common_difference(other.forms, plain.forms)},
        ),
        gain(f"D5P4 covers more problems with more children (w {largest} instead of {width})", plain, wide),
        gain(f"D5P4 with distinct children covers more problems with w {largest} than with w {width}", other, many),
    ]
    for name, ours in ((f"D5P4 (w {width})", plain), (f"D5P4 with distinct children (w {width})", other)):
        rival, lead = _same_rows(setup, by_case, task, ours)
        claim = f"the {k} answers of {name} cover more problems than independent answers for as many rows"
        values = f"difference to {rival}: {shown(lead, 1)} points"
        claims.append(Claim(f"Ours ({task}): {claim}", "–", values, decided(lead)))
    return claims + [_tree_claim(setup, by_case, task, width, K) for K in setup["tree"]]


def _tree_claim(setup: Setup, by_case: Mapping[str, Spent], task: str, width: int, beams: int) -> Claim:
    """The claim on a tree against rivals that have at least as many rows: of each kind the cheapest such rival."""
    k, ours = setup["k"], by_case[f"{task} {TREES}, K {beams}"]

    def cheapest(name: str, values: Iterable[int]) -> tuple[int, Spent]:
        pairs = [(value, by_case[f"{task} {name.format(value)}"]) for value in values]
        enough = [pair for pair in pairs if pair[1].rows.value >= ours.rows.value]
        return min(enough or pairs[-1:], key=lambda pair: pair[1].rows.value)

    many = "independent, {} answers"
    m, alone = cheapest(many, setup["more"])
    n, best = cheapest(many, [m for m in setup["more"] if m > k] or setup["more"])
    w, beam = cheapest("D5P4+, w {}", [w for w in setup["w"] if w >= width])
    leads = {
        f"{m} independent answers ({alone.rows.value:.0f} rows)": common_difference(ours.covered, alone.covered),
        f"the best {k} of {n} independent answers ({best.rows.value:.0f} rows)": common_difference(
            ours.covered, best.best
        ),
        f"D5P4, w {w} ({beam.rows.value:.0f} rows)": common_difference(ours.covered, beam.covered),
    }
    return Claim(
        f"Ours ({task}): the tree with {beams} beams covers more problems than independent sampling, best of n and "
        "D5P4 for as many rows",
        "–",
        f"at {ours.rows.value:.0f} rows, points above {listed((f'{name}:' for name in leads), leads.values(), 1, 100)}",
        all_decided(leads.values()),
        "the tree reveals all positions above probability 0.99 at once, the others one position per step",
        scale=100.0,
    )


def _gain(a: Spent, b: Spent) -> Figure:
    return common_difference(100 * a.covered, 100 * b.covered)


def _same_rows(setup: Setup, by_case: Mapping[str, Spent], task: str, ours: Spent) -> tuple[str, Figure]:
    """Find the independent case whose number of rows is nearest to `ours`. Return its name and the gain of `ours`.

    If the setting "close" names independent cases for the task, the case is one of these: they have the most problems.
    """
    chosen = [m for m in setup["close"].get(task, ()) if m in setup["more"]] or setup["more"]
    alone = {m: by_case[f"{task} independent, {m} answers"] for m in chosen}
    m = min(alone, key=lambda m: abs(alone[m].rows.value - ours.rows.value))
    name = f"{m} independent answers ({alone[m].rows.value:.0f} rows against {ours.rows.value:.0f})"
    return name, _gain(ours, alone[m])


def _figure(setup: Setup, by_case: Mapping[str, Spent]) -> object:
    """Draw covered problems against rows. The letters at the points are the number of answers, w or K."""
    tasks = setup["tasks"]
    picture, grid = pyplot().subplots(1, len(tasks), figsize=(5.2 * len(tasks), 4.5), squeeze=False)
    for axis, task in zip(grid[0], tasks, strict=True):
        for group, label in LABELS.items():
            line = [case for case in setup.cases if case.task == task and case.group == group]
            if not line:
                continue
            points = [by_case[case.name] for case in line]
            figures = [figure(100 * spent.covered) for spent in points]
            rows, covered = [spent.rows.value for spent in points], [f.value for f in figures]
            color = STYLES[group]["color"]
            axis.fill_between(
                rows, [f.low for f in figures], [f.high for f in figures], color=color, alpha=0.08, linewidth=0
            )
            axis.plot(rows, covered, **STYLES[group], label=label.format(k=setup["k"]), linewidth=1.4)
            letter = {"independent": "", TREES: "K "}.get(group, "w ")
            place = (6, -10) if group == "independent" else (5, 5) if group == "distinct" else (-22, 5)
            for case, x, y in zip(line, rows, covered, strict=True):
                text = f"{letter}{case.value:g}"
                axis.annotate(text, (x, y), fontsize=7, color=color, textcoords="offset points", xytext=place)
            if group == "D5P4+":
                look = STYLES[group] | {"linestyle": ":", "markerfacecolor": "white", "linewidth": 1}
                nominal = [spent.nominal for spent in points]
                axis.plot(nominal, covered, label="D5P4+ at the rows the paper counts", **look)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("rows through the model per problem")
        axis.set_ylabel("problems with a right answer, %")
        axis.set_title(task.replace(":", ", ") + (" numbers" if "countdown" in task else ""))
    picture.legend(*grid[0][0].get_legend_handles_labels(), fontsize=8.5, loc="outside lower center", ncols=2)
    return picture


EXPERIMENT = Experiment(
    name="budget",
    title="Coverage against rows",
    paper="not there, this experiment is ours",
    settings={"box": BOX, "paper": PAPER},
    draw=draw,
    cases=cases,
    digest=Digest("budget", _reduce, ("k",), read=_read),
)
