"""Measures the share of problems with a right answer against the number of rows that go through the model.

The experiment compares four methods: independent sampling, D5P4, D5P4 with distinct children, and D5P4 with more
children per beam. If several rows of a pool are equal, only one of them goes through the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from d5p4.eval.graders import grader as grader_named
from d5p4.eval.stats import pass_at

from ..statistics import Figure, figure, paired_difference
from .answers import numbers_of
from .drawing import STYLES, Claim, Drawing, Table, all_decided, decided, pyplot, shown
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
LABELS = {
    "independent": "independent: all answers (number at the point)",
    "D5P4+": "D5P4+: 4 answers, w children per beam",
    "distinct": "D5P4+ with distinct children: 4 answers",
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
            ("tree (ours)", f"K {K}", {"method": "tree", "k": setup["k"], "spare": K - setup["k"], **bare | TREE}, K)
            for K in setup["tree"]
        ]
        close = {("D5P4+", WIDTH), ("distinct", WIDTH), *(("independent", m) for m in setup["close"][task])}
        close |= {("tree (ours)", K) for K in setup["tree"]}
        for group, name, options, value in ways:
            units = setup["units_close" if (group, value) in close else "units"]
            planned.append(Case(f"{task} {group}, {name}", options, units, task, group, float(value)))
    return planned


def reduce_graded(setup: Setup, case: Case, unit: int, row: Row, scores: Mapping[str, Row]) -> Row:
    """Return which answers are right (1 or 0 each), the number of different right answers, and the cost of the set."""
    task = setup.task(case.task, case.units)
    grader, example = grader_named(task.grader or "exact"), task.examples[unit]
    right = grader.grade(example.prompt, row["texts"], example.gold)
    assert right is not None, f"{task.name} {unit} cannot be graded"
    forms = len({grader.key(text) for text, mark in zip(row["texts"], right, strict=True) if mark})
    counts = {name: row[name] for name in ("nfe", "rows", "nominal")}
    return {"right": "".join("01"[mark] for mark in right), "forms": forms, **counts}


class Spent:
    """The right answers of a case, and the cost of the case in rows per step. The arrays have one entry per problem."""

    def __init__(self, setup: Setup, case: Case) -> None:
        rows = numbers_of(setup, case)
        self.right = np.array([[mark == "1" for mark in row["right"]] for row in rows])  # [P, m]
        self.covered = self.right.any(1).astype(float)
        self.forms = np.array([row["forms"] for row in rows])
        steps = rows[0]["nfe"]
        self.rows = figure(np.array([row["rows"] / steps for row in rows]))
        self.nominal = float(np.mean([row["nominal"] / steps for row in rows]))


def draw(setup: Setup) -> Drawing:
    by_case = {case.name: Spent(setup, case) for case in setup.cases}
    tables, numbers = [], {}
    for task in setup["tasks"]:
        rows = []
        for case in setup.cases:
            if case.task != task:
                continue
            spent = by_case[case.name]
            k = setup["k"]
            any_right = figure(100 * spent.covered)
            at_k = figure(100 * pass_at(spent.right, k)) if spent.right.shape[1] >= k else any_right
            forms = figure(spent.forms)
            values = {"covered": any_right, f"pass@{k}": at_k, "forms": forms}
            numbers[case.name] = values | {"rows": spent.rows, "nominal": spent.nominal}
            cells = [shown(any_right, 1), shown(at_k, 1), shown(forms), f"{spent.rows.value:.2f}"]
            rows.append([case.name.removeprefix(f"{task} "), *cells, f"{spent.nominal:g}"])
        columns = ["case", "covered, %", f"pass@{setup['k']}, %", "different right", "rows per step", "nominal"]
        note = (
            "Covered: the share of problems with at least one right answer. Rows per step: the rows that went through "
            "the model for one problem. Nominal: the rows per step that the paper counts, equal rows included."
        )
        tables.append(Table(task, columns, rows, note))
    return Drawing(tables, _figure(setup, by_case), numbers, _claims(setup, by_case))


def _claims(setup: Setup, by_case: Mapping[str, Spent]) -> list[Claim]:
    width = 4 if 4 in setup["w"] else setup["w"][0]
    return [claim for task in setup["tasks"] for claim in _task_claims(setup, by_case, task, width, max(setup["w"]))]


def _task_claims(setup: Setup, by_case: Mapping[str, Spent], task: str, width: int, largest: int) -> list[Claim]:
    plain, wide = (by_case[f"{task} D5P4+, w {w}"] for w in (width, largest))
    other, many = (by_case[f"{task} distinct, w {w}"] for w in (width, largest))
    share = plain.rows.value / plain.nominal
    distinct_gain, forms = _gain(other, plain), paired_difference(other.forms, plain.forms)
    wide_gain, many_gain = _gain(wide, plain), _gain(many, other)
    claims = [
        Claim(
            f"Ours ({task}): running equal rows only once saves most of the forward",
            "–",
            f"{plain.rows.value:.2f} rows per step instead of {plain.nominal:g} ({share:.0%})",
            "holds" if share < 0.5 else "does not hold",
        ),
        Claim(
            f"Ours ({task}): D5P4 covers more problems with distinct children",
            "–",
            f"change of pass@{setup['k']}: {shown(distinct_gain, 1)} points; of different right answers: {shown(forms)}"
            f"; rows per step: {plain.rows.value:.2f} → {other.rows.value:.2f}",
            all_decided([distinct_gain, forms]),
        ),
        Claim(
            f"Ours ({task}): D5P4 covers more problems with more children (w {largest} instead of {width})",
            "–",
            f"change: {shown(wide_gain, 1)} points; rows per step: {plain.rows.value:.2f} → {wide.rows.value:.2f}",
            decided(wide_gain),
        ),
    ]
    for name, ours in ((f"D5P4 (w {width})", plain), (f"D5P4 with distinct children (w {width})", other)):
        rival, lead = _same_rows(setup, by_case, task, ours)
        claim = f"the {setup['k']} answers of {name} cover more problems than independent answers for as many rows"
        values = f"difference to {rival}: {shown(lead, 1)} points"
        claims.append(Claim(f"Ours ({task}): {claim}", "–", values, decided(lead)))
    claims.append(
        Claim(
            f"Ours ({task}): D5P4 with distinct children covers more problems with w {largest} than with w {width}",
            "–",
            f"change: {shown(many_gain, 1)} points; rows per step: {other.rows.value:.2f} → {many.rows.value:.2f}",
            decided(many_gain),
        )
    )
    return claims


def _gain(a: Spent, b: Spent) -> Figure:
    """The share of problems that a solves minus the share that b solves, in percentage points."""
    return paired_difference(100 * a.covered, 100 * b.covered)


def _same_rows(setup: Setup, by_case: Mapping[str, Spent], task: str, ours: Spent) -> tuple[str, Figure]:
    """Find the independent case whose number of rows is nearest to `ours`. Return its name and the gain of `ours`."""
    alone = {m: by_case[f"{task} independent, {m} answers"] for m in setup["more"]}
    m = min(alone, key=lambda m: abs(alone[m].rows.value - ours.rows.value))
    name = f"{m} independent answers ({alone[m].rows.value:.2f} rows against {ours.rows.value:.2f})"
    return name, _gain(ours, alone[m])


OFFSETS = {"independent": (6, -10), "D5P4+": (-22, 5), "distinct": (5, 5)}  # label minus point, in 1/72 inch


def _figure(setup: Setup, by_case: Mapping[str, Spent]) -> object:
    plt = pyplot()
    tasks = setup["tasks"]
    picture, grid = plt.subplots(1, len(tasks), figsize=(5.2 * len(tasks), 4.3), squeeze=False)
    for axis, task in zip(grid[0], tasks, strict=True):
        for group, label in LABELS.items():
            line = [case for case in setup.cases if case.task == task and case.group == group]
            points = [by_case[case.name] for case in line]
            figures = [figure(100 * spent.covered) for spent in points]
            rows, covered = [spent.rows.value for spent in points], [f.value for f in figures]
            color, marker = STYLES[group]["color"], STYLES[group]["marker"]
            low, high = [f.low for f in figures], [f.high for f in figures]
            axis.fill_between(rows, low, high, color=color, alpha=0.08, linewidth=0)
            axis.plot(rows, covered, **STYLES[group], label=label, linewidth=1.4)
            for case, x, y in zip(line, rows, covered, strict=True):
                text = f"{case.value:g}" if group == "independent" else f"w {case.value:g}"
                place = {"textcoords": "offset points", "xytext": OFFSETS[group]}
                axis.annotate(text, (x, y), fontsize=7, color=color, **place)
            if group == "D5P4+":
                look = {"linestyle": ":", "marker": marker, "markerfacecolor": "white", "linewidth": 1}
                nominal = [spent.nominal for spent in points]
                axis.plot(nominal, covered, color=color, label="D5P4+ at the rows the paper counts", **look)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("rows through the model per problem and step")
        axis.set_ylabel("problems with a right answer, %")
        axis.set_title(task.replace(":", ", ") + (" numbers" if "countdown" in task else ""))
    handles, labels = grid[0][0].get_legend_handles_labels()
    picture.legend(handles, labels, fontsize=8.5, loc="outside lower center", ncols=2)
    return picture


EXPERIMENT = Experiment(
    name="budget",
    title="Coverage against rows",
    paper="not there, this experiment is ours",
    settings={"box": BOX, "paper": PAPER},
    draw=draw,
    cases=cases,
    digest=Digest("budget", reduce_graded),
)
