"""`d5p4 generate` writes k answers to a prompt, or k texts without a prompt."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from ..eval.graders import grader_of
from ..generate import few_answers
from ..resolve import typed
from ..result import Answers, counted
from ..view import grade
from .common import load_model, print_json, read_prompt, run
from .options import DEFAULT_MODEL, Device, Dtype, Given, Json, ModelName, PromptText, Quiet, Seed, flag
from .show import answers_table, facts_line, note, print_prompt


def generate(
    *,
    prompt: Annotated[str | None, PromptText] = None,
    model: ModelName = DEFAULT_MODEL,
    seed: Seed = None,
    sets: Annotated[int | None, typer.Option(help="Number of sets of k answers, without a prompt.")] = None,
    json: Json = False,
    quiet: Quiet = False,
    device: Device = None,
    dtype: Dtype = None,
    options: Given,
) -> None:
    """Write k good answers that differ from each other. `d5p4 run` answers the prompts of a file.

    Example: d5p4 generate "86,28,13,31:96" -k 4
    """
    options = typed(options, "command")
    prompt = None if prompt is None else read_prompt(prompt)
    shown = not (quiet or json)
    loaded = load_model(model, device, dtype, shown)
    prompts = None if prompt is None else [prompt]
    result, seconds = run(loaded, prompts, "decoding", shown, sets=sets, seed=seed, **options)
    for answers in result:
        right = grade(loaded, prompt, answers.texts)
        if json:
            print_json({"prompt": prompt} | answers.to_dict() | ({} if right is None else {"right": right}))
        else:
            _print(prompt, answers, right, seconds)
    if not quiet and (text := few_answers(result, flag)):
        note(text)
    grader = grader_of(loaded)
    if right is None and shown and grader is not None and grader.examples:
        note(f"the prompt is not graded, because grading needs {grader.needs}")


def _print(prompt: str | None, answers: Answers, right: Sequence[bool] | None, seconds: float) -> None:
    """Print the answers of one set. `seconds` is the time of all sets."""
    console = Console()
    print_prompt(console, prompt)
    console.print(answers_table(answers, console.width, right))
    facts = [f"{answers.distinct} of {answers.result.settings.k} distinct", counted(answers.near_copies)]
    if (unfinished := answers.result.unfinished) is not None:
        facts.append(f"{sum(unfinished[answers.place])} unfinished")
    if right is not None:
        facts.append(f"{sum(right)} right")
    facts += [f"{answers.rows:,} of {answers.rows_nominal:,} rows", f"{answers.nfe} forward steps"]
    facts += [f"seed {answers.result.seed}", f"{seconds:.1f} s"]
    console.print(facts_line(*facts))
    console.print()
