"""`d5p4 generate` writes k answers to one prompt or to each prompt of a file, or k texts without a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..errors import D5P4Error
from ..eval.graders import grader_of
from ..generate import few_answers
from ..jobs import PromptLine, read_prompts
from ..resolve import typed
from ..result import counted
from ..view import grade
from .common import load_model, print_json, read_prompt, run
from .options import DEFAULT_MODEL, PROMPT_FILE, Device, Dtype, Given, Json, ModelName, PromptText, Quiet, Seed, flag
from .show import answers_table, facts_line, note, print_prompt


def generate(
    *,
    prompt: Annotated[str | None, PromptText] = None,
    model: ModelName = DEFAULT_MODEL,
    file: Annotated[Path | None, typer.Option("--file", "-f", help=PROMPT_FILE)] = None,
    seed: Seed = None,
    sets: Annotated[int | None, typer.Option(help="Number of sets of k answers, without a prompt.")] = None,
    json: Json = False,
    quiet: Quiet = False,
    device: Device = None,
    dtype: Dtype = None,
    options: Given,
) -> None:
    """Write k good answers that differ from each other.

    Example: d5p4 generate "86,28,13,31:96" -k 4
    """
    if prompt is not None and file is not None:
        raise D5P4Error("a prompt and a --file are both given; give only one of them")
    options = typed(options, "command")
    lines = [] if prompt is None else [PromptLine(1, None, read_prompt(prompt))]
    if file is not None:
        lines = read_prompts(file)
    shown = not (quiet or json)
    loaded = load_model(model, device, dtype, shown)
    prompts = [line.prompt for line in lines] or None
    keys = [line.id for line in lines] or None  # the id of a prompt selects its random numbers
    try:
        result, seconds = run(loaded, prompts, "decoding", shown, sets=sets, seed=seed, keys=keys, **options)
    except D5P4Error as error:
        if file is None or error.prompt is None:
            raise
        raise D5P4Error(error.phrase(flag, f"{file} line {lines[error.prompt].line}")) from error
    ungraded = 0
    for place, answers in enumerate(result):
        line = lines[place] if lines else None
        right = grade(loaded, line.prompt if line else None, answers.texts)
        ungraded += right is None
        if json:
            named = {"id": line.id} if line and line.id is not None else {}
            marks = {} if right is None else {"right": right}
            print_json(named | {"prompt": line.prompt if line else None} | answers.to_dict() | marks)
        else:
            _print(line, answers, right, len(result), seconds)
    if not json and len(result) > 1:
        what = "prompts" if lines else "sets"
        Console().print(facts_line(f"{len(result)} {what}", f"seed {result.seed}", f"{seconds:.1f} s"))
    if not quiet and (text := few_answers(result, flag)):
        note(text)
    grader = grader_of(loaded)
    if ungraded and not (quiet or json) and grader is not None and grader.examples:
        note(f"{ungraded} of {len(result)} prompts are not graded, because grading needs {grader.needs}")


def _print(line: PromptLine | None, answers: Any, right: Sequence[bool] | None, prompts: int, seconds: float) -> None:
    console = Console()
    print_prompt(console, line.prompt if line else None, line.id if line else None)
    console.print(answers_table(answers, console.width, right))
    facts = [f"{answers.distinct} of {answers.result.settings.k} distinct", counted(answers.near_copies)]
    if right is not None:
        facts.append(f"{sum(right)} right")
    facts += [f"{answers.rows:,} of {answers.rows_nominal:,} rows", f"{answers.nfe} forward steps"]
    if prompts == 1:
        facts += [f"seed {answers.result.seed}", f"{seconds:.1f} s"]
    console.print(facts_line(*facts))
    console.print()
