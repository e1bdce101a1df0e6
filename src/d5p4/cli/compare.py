"""`d5p4 compare` decodes one prompt by several methods with the same seed, and shows the answers side by side."""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from rich.console import Console

from ..resolve import alike
from ..result import Answers, number, rounded
from ..view import grade
from .common import load_model, print_json, read_prompt, run
from .options import DEFAULT_MODEL, Device, Dtype, Given, Json, MethodNames, ModelName, PromptText, Quiet, Seed, share
from .show import narrow_tables, print_prompt, side_by_side


class Row(NamedTuple):
    """The result of one method."""

    method: str
    answers: Answers
    right: Sequence[bool] | None
    seconds: float


def compare(
    *,
    prompt: Annotated[str, PromptText],
    model: ModelName = DEFAULT_MODEL,
    methods: MethodNames = "independent,d5p4,tree",
    seed: Seed = None,
    json: Json = False,
    quiet: Quiet = False,
    device: Device = None,
    dtype: Dtype = None,
    options: Given,
) -> None:
    """Answer one prompt by several methods with the same seed, order, reveal rule and early stop.

    These are the tree's unless you give others. A parameter of a method goes only to the methods that have it.

    Example: d5p4 compare "86,28,13,31:96" --methods independent,d5p4,tree --beta 10
    """
    own = share(methods, options)
    prompt, shown = read_prompt(prompt), not (quiet or json)
    loaded = load_model(model, device, dtype, shown)
    rows: list[Row] = []
    for method, chosen in alike(loaded, own).items():
        result, seconds = run(loaded, [prompt], method, shown, seed=seed, **chosen)
        seed = result.seed
        rows.append(Row(method, result[0], grade(loaded, prompt, result[0].texts), seconds))
    if not json:
        _print(prompt, rows)
        return
    for row in rows:
        marks = {} if row.right is None else {"right": row.right}
        print_json({"prompt": prompt, "seconds": rounded(row.seconds)} | row.answers.to_dict() | marks)


def _print(prompt: str, rows: list[Row]) -> None:
    console = Console()
    print_prompt(console, prompt)
    console.print(side_by_side([(row.method, row.answers.texts, row.right) for row in rows], console.width), "")
    graded = rows[0].right is not None
    columns = ["method", "differ", "near", *(["right"] if graded else []), "apart", "rows", "passes", "s"]
    lines = []
    for row in rows:
        answers = row.answers
        marks = [str(sum(row.right))] if row.right is not None else []
        differ = f"{answers.distinct} of {answers.result.settings.k}"
        pairs = [distance for i, line in enumerate(answers.distances) for distance in line[:i]]
        apart = number(sum(pairs) / len(pairs) if pairs else None, 2)
        cost = [f"{answers.rows:,}", str(answers.nfe), number(row.seconds, 1)]
        lines.append([row.method, differ, str(answers.near_copies), *marks, apart, *cost])
    for table in narrow_tables(columns, lines, console):
        console.print(table)
    seed, settings = rows[0].answers.result.seed, [row.answers.result.settings.options() for row in rows]
    names = sorted(set().union(*settings) - {"method"})
    values = {name: [str(one.get(name, "–")) for one in settings] for name in names}
    differ = "; ".join(f"{name} {', '.join(own)}" for name, own in values.items() if len(set(own)) > 1) or "none"
    legend = f"  near: near copies; apart: distance of two answers, mean over pairs; seed {seed}"
    console.print(f"{legend}\n  settings that differ: {differ}", style="dim", highlight=False)
