"""How benchmarks compare methods on problems whose answers can be checked (countdown, programs).

A *unit* is one call of `generate`: a method with one setting and one seed on all problems of a set. Every benchmark has
a class of units with the fields `method`, `temperature`, `order`, `knob`, `change` and `seed`. A method is tuned on
other problems: first its temperature in each of its orders at the first value of its parameter (its "knob"), then the
knob at the best temperature. The best value has the largest pass@4; of equal values, the one with more different right
answers. Every method reveals per pass what the tree reveals: all positions above the threshold 0.99, and one more.
"""

import json
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

import d5p4
from d5p4.eval.graders import grader
from d5p4.eval.stats import pass_at
from d5p4.models.load import find
from d5p4.options import Checked, Option
from d5p4.search.reveal import OpenPositions, Reveal

from ..provenance import about, weights_hash
from ..statistics import interval
from ..tables import Row, half_width
from ..timing import wall
from . import generate
from .units import Lines

K = 4
TOKENS = 1 << 18  # a forward on a GPU has at most this many tokens, and a call of `generate` eight times as many
SURE = "threshold 0.99"
AS_TREE = "sure-and-one 0.99"  # other methods reveal with it what a tree reveals under the threshold
RULE_PARAMETER = {"threshold": "tau", "factor": "factor", "entropy-bound": "entropy_bound", "sure-and-one": "sure"}

Knob = float | None
Values = dict[str, np.ndarray]  # measures by name, [P] each: one number per problem


@dataclass(frozen=True)
class Method:
    """A method's options for `d5p4.generate`, and the settings to choose from."""

    options: Mapping[str, Any]
    heats: Mapping[str, tuple[float, ...]]  # the temperatures of each order
    knob: str = ""
    values: tuple[Knob, ...] = (None,)
    like: str = ""  # the method whose choice this method takes
    rule: str = AS_TREE


def samples(count: int, **options: Any) -> Method:
    """Return the method that keeps the four best of `count` independent answers, different ones first."""
    if count == K:
        return Method({"method": "independent"}, **options)
    return Method({"method": "best-of-n", "repeats": False, "w": count // K}, **options)


PAPER: dict[str, Any] = {"method": "d5p4", "w": 4}
DISTINCT = {**PAPER, "distinct": True, "spare": 4}
TREES = {width: f"tree, K = {width}" for width in (4, 8, 16, 32)}
DEFAULT: dict[str, Any] = {"temperature": 0.0, "knob": 1.0, "order": "top"}  # the tree's


@dataclass(frozen=True)
class SureAndOne(Checked):
    """The tree's reveal rule for samples."""

    sure: Annotated[float, Option("Reveal all positions with a probability above this, and one more.")] = 0.99

    def __call__(self, seen: OpenPositions) -> Tensor:
        accepted = seen.probability > self.sure
        waiting = seen.open & ~accepted
        return accepted | (waiting & (waiting.cumsum(-1) == 1))


def register_rule() -> None:
    if "sure-and-one" not in Reveal.registry:
        d5p4.register(Reveal("sure-and-one", SureAndOne))


def rule_options(rule: str) -> dict[str, Any]:
    """Return the options of a reveal rule such as "threshold 0.9". "schedule" is the default and needs no option."""
    name, _, value = rule.partition(" ")
    return {"reveal": name, RULE_PARAMETER[name]: float(value)} if value else {}


def options_of(unit: Any, method: Method) -> dict[str, Any]:
    """Return the keyword arguments of `generate` that follow from a unit's setting. `change` holds "name=value"."""
    options: dict[str, Any] = {"k": K, **method.options}
    options |= {"temperature": unit.temperature, "order": unit.order}
    options |= {method.knob: unit.knob} if method.knob else {}
    return options | {name: json.loads(value) for name, value in (text.split("=") for text in unit.change.split())}


def setting_of(unit: Mapping[str, Any], method: Method) -> str:
    """Return the order, the temperature, the knob and the change of a unit. `unit` has the fields of a unit."""
    knob = f"{method.knob} {unit['knob']:g}" if method.knob else ""
    return ", ".join(filter(None, (unit["order"], f"T {unit['temperature']:g}", knob, unit["change"])))


def choose(lines: Mapping[Any, Row], units: Sequence[Any]) -> Any:
    """Return the unit with the best pass@4; of equals, with the most different right answers. None: not all ended."""
    if any(unit not in lines for unit in units):
        return None
    return max(units, key=lambda unit: (lines[unit]["pass@4"], lines[unit]["different"]))


def sweep(lines: Mapping[Any, Row], first: Any, methods: Mapping[str, Method]) -> Generator[Any, None, Any]:
    """Yield the units that tune the method of `first`. Return the best one, or None as long as units are missing."""
    method = methods[first.method]
    if method.like:
        best = yield from sweep(lines, replace(first, method=method.like), methods)
        return replace(best, method=first.method) if best else None
    settings = [(order, heat) for order, heats in method.heats.items() for heat in heats]
    heated = [replace(first, order=order, temperature=heat, knob=method.values[0]) for order, heat in settings]
    yield from heated
    best = choose(lines, heated)
    if best is None:
        return None
    tuned = [replace(best, knob=value) for value in method.values]  # the first value is that of `best` itself
    yield from tuned[1:]
    return choose(lines, tuned)


# ---- one unit


_started: tuple[Mapping[str, str], str | None, bool, tuple[str, ...]] = {}, None, False, ()


def start(models: Mapping[str, str], device: str | None, tf32: bool, command: tuple[str, ...]) -> None:
    """Say what this process runs: for each task a shipped name or a folder, and the command for the facts."""
    global _started
    _started = models, device, tf32, command


@cache
def loaded(name: str, device: str | None, tf32: bool, command: tuple[str, ...]) -> tuple[Any, Row]:
    """Load a model into this process, and return it with the facts about it."""
    register_rule()
    if tf32:
        torch.set_float32_matmul_precision("high")
    model = d5p4.load(name, device, "float32")
    exact = "float32" + " (tf32)" * tf32
    return model, about(model.device, command) | {"dtype": exact, "weights": weights_hash(find(name))}


def refuse_other_weights(lines: Lines[Any], name: str) -> None:
    """Raise an error if lines were made by other weights than those of the named model."""
    if any(line["about"]["weights"] != weights_hash(find(name)) for line in lines.values() if "about" in line):
        raise d5p4.D5P4Error(f"there are lines of other weights than those of {name}; give another --out")


def judge(
    task: str, prompts: Sequence[str], texts: Sequence[Sequence[str]], references: Sequence[Any] | None = None
) -> Row:
    """Judge the answers, the texts [P][4 or fewer], with the grader of a task.

    right      [P][4]: 1 for a right answer, else 0
    different  [P]: the number of right answers with different canonical forms
    texts      [P]: the number of different texts
    """
    marker, right, different = grader(task), [], []
    for prompt, answers, reference in zip(prompts, texts, references or [None] * len(prompts), strict=True):
        marks = marker.grade(prompt, answers, reference)
        assert marks is not None
        right.append([*map(int, marks), *[0] * (K - len(marks))])
        different.append(marker.count_right(answers, marks))
    return {"right": right, "different": different, "texts": [len(set(answers)) for answers in texts]}


def answer(
    task: str, prompts: Sequence[str], seed: int, options: dict[str, Any], references: Sequence[Any] | None = None
) -> Row:
    """Decode and judge the problems of a unit. Return its line: facts, results per problem, and the mean of each
    measure."""
    models, *how = _started
    model, facts = loaded(models[task], *how)
    tokens = TOKENS if model.device.type == "cuda" else 1 << 14
    decode = partial(generate, model, prompts, seed=seed, max_tokens_per_forward=tokens, **options)
    result, seconds = wall(decode, model.device)
    defaults, settings = d5p4.Settings().to_dict(), d5p4.Settings.make(model, **options).to_dict()
    line: Row = {"about": facts, "seconds": round(seconds, 2)}
    line["settings"] = {name: value for name, value in settings.items() if value != defaults.get(name)}
    line["problems"] = judge(task, prompts, [row[:K] for row in result.texts], references)
    line["problems"] |= {"rows": result.rows.tolist(), "nfe": result.nfe.tolist()}
    line["problems"]["positions"] = result.tokens_run.tolist()
    line |= {name: round(float(values.mean()), 5) for name, values in measures(line["problems"]).items()}
    solved = f"pass@4 {100 * line['pass@4']:.1f}, first {100 * line['first']:.1f}, {line['different']:.2f} different"
    line["shown"] = f"{solved}, {line['rows']:.1f} rows in {line['nfe']:.1f} passes, {seconds:.1f} s"
    return line


def measures(problems: Row) -> Values:
    """Return the measures: pass@1, pass@4, first and four (different texts) as shares, the others as counts."""
    right = np.array(problems["right"], dtype=bool)  # [P, 4]
    values = {"pass@1": pass_at(right, 1), "pass@4": pass_at(right, K), "first": right[:, 0].astype(float)}
    values |= {"four": np.array(problems["texts"]) == K} if "texts" in problems else {}
    return values | {
        name: np.array(problems[name]) for name in ("different", "rows", "nfe", "positions") if name in problems
    }


# ---- figures


def mean_values(seeds: Sequence[Values]) -> Values:
    """Return the mean of each measure over seeds, per problem."""
    return {name: np.stack([values[name] for values in seeds]).mean(0) for name in seeds[0]}


def figures_of(values: Values) -> dict[str, list[float]]:
    """Return [mean, low, high] of each measure, with 95 % intervals over problems."""
    return {name: [round(x, 5) for x in interval(column)] for name, column in values.items()}


def at_equal_rows(values: Values, rivals: Sequence[Values]) -> Values:
    """Return the measures per problem that the rivals have with as many rows on average as `values` have.

    They are interpolated between the two rivals with fewer and with more rows, linearly in the logarithm of rows.
    """
    rivals = sorted(rivals, key=lambda rival: float(rival["rows"].mean()))
    budgets = [math.log(rival["rows"].mean()) for rival in rivals]
    place = float(np.interp(math.log(values["rows"].mean()), budgets, range(len(rivals))))
    low = min(int(place), len(rivals) - 1)
    high = min(low + 1, len(rivals) - 1)
    return {name: (1 - place + low) * rivals[low][name] + (place - low) * rivals[high][name] for name in values}


Columns = Sequence[tuple[str, str, int, float]]  # (heading, name of a measure, digits, scale)


def cells_of(row: Row | None, columns: Columns) -> list[str | None]:
    return [half_width(row[name], digits, scale) if row and name in row else None for _, name, digits, scale in columns]


def headings(columns: Columns, before: str = "") -> list[str]:
    return [f"{before}{heading}" for heading, *_ in columns]
