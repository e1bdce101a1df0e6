"""Coverage against what it costs: the paper's D5P4, de-duplicated, with distinct children, with more children."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from d5p4.eval.graders import grader as grader_named
from d5p4.eval.stats import pass_at

from ..statistics import Figure, figure, paired_difference
from .answers import numbers_of
from .drawing import STYLES, Claim, Drawing, Table, decided, every, pyplot, shown
from .rows import Row
from .setup import Case, Digest, Experiment, Setup

BOX: Mapping[str, Any] = {
    "model": "countdown", "tasks": ("countdown:4", "countdown:5"), "k": 4, "units": 1000, "beta": 100.0,
    "w": (2, 4, 8, 16), "more": (4, 6, 8, 12, 16, 24, 32), "gen_length": None,
}  # fmt: skip
PAPER: Mapping[str, Any] = dict(BOX) | {
    "model": "GSAI-ML/LLaDA-8B-Instruct", "tasks": ("gsm8k",), "units": 1319, "beta": 25.0, "more": (4, 8, 16, 32),
}  # fmt: skip
LENGTHS = {"countdown:4": 36, "countdown:5": 48, "gsm8k": 256}
LABELS = {
    "independent": "independent: so many answers, all counted",
    "D5P4+": "D5P4+: 4 answers, w children each",
    "distinct": "D5P4+ with distinct children: 4 answers",
}


def cases(setup: Setup) -> list[Case]:
    found = []
    for task in setup["tasks"]:
        length = setup["gen_length"] or LENGTHS[task]
        common = {"gen_length": length, "steps": length, "temperature": 1.0, "order": "confidence"}
        beam = common | {"k": setup["k"], "method": "d5p4", "beta": setup["beta"]}
        ways = [("independent", f"{m} answers", common | {"method": "independent", "k": m}, m) for m in setup["more"]]
        ways += [("D5P4+", f"w {w}", beam | {"w": w}, w) for w in setup["w"]]
        ways += [("distinct", f"w {w}", beam | {"w": w, "distinct": True}, w) for w in setup["w"]]
        for group, name, options, value in ways:
            found.append(Case(f"{task} {group}, {name}", options, setup["units"], task, group, float(value)))
    return found


def reduce_graded(setup: Setup, case: Case, unit: int, row: Row, said: Mapping[str, Row]) -> Row:
    """Which answers are right (one digit each), how many right ones differ, and the rows they cost."""
    task = setup.task(case.task, case.units)
    grader, example = grader_named(task.grader or "exact"), task.examples[unit]
    right = grader.grade(example.prompt, row["texts"], example.gold)
    assert right is not None, f"{task.name} {unit} cannot be graded"
    forms = len({grader.key(text) for text, mark in zip(row["texts"], right, strict=True) if mark})
    counts = {name: row[name] for name in ("nfe", "rows", "nominal")}
    return {"right": "".join("01"[mark] for mark in right), "forms": forms, **counts}


class Spent:
    """What one case covers and costs per problem."""

    def __init__(self, setup: Setup, case: Case) -> None:
        rows = numbers_of(setup, case)
        self.right = np.array([[mark == "1" for mark in row["right"]] for row in rows])  # [P, m]
        self.covered = self.right.any(1).astype(float)
        self.forms = np.array([row["forms"] for row in rows])
        steps = rows[0]["nfe"]
        self.rows = figure(np.array([row["rows"] / steps for row in rows]))
        self.nominal = float(np.mean([row["nominal"] / steps for row in rows]))


def draw(setup: Setup) -> Drawing:
    found = {case.name: Spent(setup, case) for case in setup.cases}
    tables, numbers = [], {}
    for task in setup["tasks"]:
        rows = []
        for case in setup.cases:
            if case.task != task:
                continue
            spent = found[case.name]
            k = setup["k"]
            any_right = figure(100 * spent.covered)
            at_k = figure(100 * pass_at(spent.right, k)) if spent.right.shape[1] >= k else any_right
            forms = figure(spent.forms)
            numbers[case.name] = {"covered": any_right, f"pass@{k}": at_k, "forms": forms, "rows": spent.rows,
                                  "nominal": spent.nominal}  # fmt: skip
            rows.append([case.name.removeprefix(f"{task} "), shown(any_right, 1), shown(at_k, 1), shown(forms),
                         f"{spent.rows.value:.2f}", f"{spent.nominal:g}"])  # fmt: skip
        columns = ["case", "covered, %", f"pass@{setup['k']}, %", "different right", "rows a step", "nominal"]
        note = "Covered: a right one among all answers. Rows went through the model; nominal is what the paper counts."
        tables.append(Table(task, columns, rows, note))
    return Drawing(tables, _figure(setup, found), numbers, _claims(setup, found))


def _claims(setup: Setup, found: Mapping[str, Spent]) -> list[Claim]:
    claims = []
    width = 4 if 4 in setup["w"] else setup["w"][0]
    largest = max(setup["w"])
    for task in setup["tasks"]:
        plain, other = found[f"{task} D5P4+, w {width}"], found[f"{task} distinct, w {width}"]
        wide = found[f"{task} D5P4+, w {largest}"]
        share = plain.rows.value / plain.nominal
        claims.append(Claim(
            f"Ours ({task}): running each different row once saves most of the forward", "–",
            f"{plain.rows.value:.2f} rows a step of {plain.nominal:g} ({share:.0%})",
            "holds" if share < 0.5 else "does not hold",
        ))  # fmt: skip
        gain = paired_difference(100 * other.covered, 100 * plain.covered)
        forms = paired_difference(other.forms, plain.forms)
        claims.append(Claim(
            f"Ours ({task}): distinct children cover more", "–",
            f"points of pass@{setup['k']} {shown(gain, 1)}, different right answers {shown(forms)}, rows "
            f"{plain.rows.value:.2f} → {other.rows.value:.2f}", every([decided(gain), decided(forms)]),
        ))  # fmt: skip
        gain = paired_difference(100 * wide.covered, 100 * plain.covered)
        claims.append(Claim(
            f"Ours ({task}): more children (w {largest} for {width}) cover more", "–",
            f"points {shown(gain, 1)}, rows {plain.rows.value:.2f} → {wide.rows.value:.2f}", decided(gain),
        ))  # fmt: skip
        for name, ours in ((f"D5P4, w {width}", plain), (f"D5P4 with distinct children, w {width}", other)):
            rival, even = _same_rows(setup, found, task, ours)
            claims.append(Claim(
                f"Ours ({task}): the {setup['k']} answers of {name} cover more than all that independent sampling "
                "gives for the same rows", "–", f"points against {rival}: {shown(even, 1)}", decided(even),
            ))  # fmt: skip
        many = found[f"{task} distinct, w {largest}"]
        gain = paired_difference(100 * many.covered, 100 * other.covered)
        claims.append(Claim(
            f"Ours ({task}): more distinct children (w {largest} for {width}) cover more", "–",
            f"points {shown(gain, 1)}, rows {other.rows.value:.2f} → {many.rows.value:.2f}", decided(gain),
        ))  # fmt: skip
    return claims


def _same_rows(setup: Setup, found: Mapping[str, Spent], task: str, plain: Spent) -> tuple[str, Figure]:
    """Independent sampling with the number of answers whose rows are nearest to D5P4's, and D5P4's lead over it."""
    alone = {m: found[f"{task} independent, {m} answers"] for m in setup["more"]}
    m = min(alone, key=lambda m: abs(alone[m].rows.value - plain.rows.value))
    rival = alone[m]
    return (f"{m} independent answers ({rival.rows.value:.2f} rows against {plain.rows.value:.2f})",
            paired_difference(100 * plain.covered, 100 * rival.covered))  # fmt: skip


PLACES = {"independent": (6, -10), "D5P4+": (-22, 5), "distinct": (5, 5)}  # of the labels, in points


def _figure(setup: Setup, found: Mapping[str, Spent]) -> object:
    plt = pyplot()
    tasks = setup["tasks"]
    picture, grid = plt.subplots(1, len(tasks), figsize=(5.2 * len(tasks), 4.3), squeeze=False)
    for axis, task in zip(grid[0], tasks, strict=True):
        for group, label in LABELS.items():
            line = [case for case in setup.cases if case.task == task and case.group == group]
            each = [found[case.name] for case in line]
            figures = [figure(100 * spent.covered) for spent in each]
            rows, covered = [spent.rows.value for spent in each], [f.value for f in figures]
            axis.fill_between(rows, [f.low for f in figures], [f.high for f in figures], color=STYLES[group]["color"],
                              alpha=0.08, linewidth=0)  # fmt: skip
            axis.plot(rows, covered, **STYLES[group], label=label, linewidth=1.4)
            for case, x, y in zip(line, rows, covered, strict=True):
                text = f"{case.value:g}" if group == "independent" else f"w {case.value:g}"
                axis.annotate(text, (x, y), textcoords="offset points", xytext=PLACES[group], fontsize=7,
                              color=STYLES[group]["color"])  # fmt: skip
            if group == "D5P4+":
                axis.plot([spent.nominal for spent in each], covered, color=STYLES[group]["color"], linestyle=":",
                          marker=STYLES[group]["marker"], markerfacecolor="white", linewidth=1,
                          label="D5P4+ at the rows the paper counts")  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("rows through the model, a problem and step")
        axis.set_ylabel("problems with a right answer, %")
        axis.set_title(task.replace(":", ", ") + (" numbers" if "countdown" in task else ""))
    handles, labels = grid[0][0].get_legend_handles_labels()
    picture.legend(handles, labels, fontsize=8.5, loc="outside lower center", ncols=2)
    return picture


EXPERIMENT = Experiment(
    "budget", "Coverage against rows", "Ours", {"box": BOX, "paper": PAPER}, draw, cases,
    Digest("budget", reduce_graded),
)  # fmt: skip
