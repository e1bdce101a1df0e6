"""`d5p4 compare`: the answers of several methods side by side, same prompt and same seed."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from ..errors import D5P4Error
from .call import read_prompt, run
from .options import Decoding, Device, Dtype, Json, ModelName, Parameters, Quiet, given, with_options
from .progress import load_model
from .record import Answers, print_json
from .show import number, plain_table, print_prompt, side_by_side


@with_options
def compare(
    *,
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    model: ModelName,
    methods: Annotated[str, typer.Option(help="Names with commas between; see d5p4 methods.")] = (
        "independent,greedy-beam,d5p4"
    ),
    json: Json = False,
    quiet: Quiet = False,
    decoding: Decoding,
    parameters: Parameters,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Answer one prompt by several methods, with the same seed.

    A method's own parameter goes to the methods that have it.
    """
    settings = given(decoding)
    own = share(methods, given(parameters))
    prompt, shown = read_prompt(prompt), not (quiet or json)
    loaded = load_model(model, device, dtype, shown)
    rows: list[tuple[str, Answers, float]] = []
    for method, values in own.items():
        result, seconds = run(loaded, [prompt], method, shown, method=method, **settings, **values)
        settings["seed"] = result.seed
        rows.append((method, Answers(result, 0), seconds))
    if not json:
        _print(prompt, rows)
        return
    for _, answers, seconds in rows:
        means = {"mean_cosine": answers.mean_cosine, "mean_score": answers.mean_score, "seconds": seconds}
        print_json({"prompt": prompt} | answers.to_dict() | means)


def share(methods: str, parameters: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The parameters of each method named, in order; one that none of them has is an error."""
    from ..methods import method_named

    specs = [method_named(name.strip()) for name in methods.split(",") if name.strip()]
    if not specs:
        raise D5P4Error(f"methods={methods!r} names no method; give names with commas between, such as random,d5p4")
    takes = {spec.name: {*spec.parameters, *(["solver"] if spec.solver else [])} for spec in specs}
    if len(takes) < len(specs):
        raise D5P4Error(f"methods={methods!r} names a method twice")
    foreign = sorted(set(parameters) - set().union(*takes.values()))
    if foreign:
        raise D5P4Error(f"none of the methods {', '.join(takes)} has a parameter {', '.join(foreign)}")
    return {name: {key: parameters[key] for key in parameters if key in own} for name, own in takes.items()}


def _print(prompt: str, rows: list[tuple[str, Answers, float]]) -> None:
    console = Console()
    print_prompt(console, prompt)
    for part in side_by_side([(method, answers.texts) for method, answers, _ in rows], console):
        console.print(part, "")
    table = plain_table("method", "distinct", "cosine", "score", "rows", "nominal", "seconds", wide="method")
    table.columns[0].no_wrap = True
    for method, answers, seconds in rows:
        table.add_row(
            method, f"{answers.distinct} of {len(answers.texts)}", number(answers.mean_cosine),
            number(answers.mean_score), f"{answers.rows:,}", f"{answers.rows_nominal:,}", number(seconds, 1),
        )  # fmt: skip
    console.print(table)
    legend = f"  means over the answers (cosine: over their pairs) · seed {rows[0][1].result.seed}"
    console.print(legend, style="dim", highlight=False)
