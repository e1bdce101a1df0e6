"""`d5p4 generate`: k answers to a prompt, to each prompt of a file, or to none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..errors import D5P4Error
from ..jobs import PromptLine, read_prompts
from .call import read_prompt, run
from .options import Decoding, Device, Dtype, Json, ModelName, Parameters, Quiet, given, with_options
from .progress import load_model
from .record import Answers, print_json
from .show import answers_table, facts_line, note, print_prompt


@with_options
def generate(
    *,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - reads standard input. None: unconditional answers.")
    ] = None,
    model: ModelName,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="JSON lines with prompt or messages (and id), or .txt, a prompt a line."),
    ] = None,
    method: Annotated[str | None, typer.Option(help="See d5p4 methods (d5p4).", show_default=False)] = None,
    sets: Annotated[
        int | None, typer.Option(help="Without a prompt: so many sets of k answers (1).", show_default=False)
    ] = None,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Add the tokens' log-probabilities to --json.")] = False,
    json: Json = False,
    quiet: Quiet = False,
    decoding: Decoding,
    parameters: Parameters,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Write k good and different answers to a prompt."""
    from ..methods import method_named

    if prompt is not None and file is not None:
        raise D5P4Error("there is a prompt and a --file; give one of them")
    settings: dict[str, Any] = given(decoding) | given(parameters)
    if method is not None:
        settings["method"] = method_named(method).name  # wrong names are told before a model is loaded
    lines = _lines(prompt, file)
    shown = not (quiet or json)
    loaded = load_model(model, device, dtype, shown)
    if lines:  # an id also names the random stream
        settings["keys"] = [line.id for line in lines]
    prompts = [line.prompt for line in lines] or None
    with _naming_lines(file, lines):
        result, seconds = run(loaded, prompts, "decoding", shown, sets=sets, logprobs=logprobs or None, **settings)
    count = len(result.texts)
    for place in range(count):
        line = lines[place] if lines else None
        answers = Answers(result, place)
        if json:
            named = {"id": line.id} if line and line.id is not None else {}
            print_json(named | {"prompt": line.prompt if line else None} | answers.to_dict())
        else:
            _print(line, answers, count, seconds)
    if not json and count > 1:
        what = "prompts" if lines else "sets"
        Console().print(facts_line(f"{count} {what}", f"seed {result.seed}", f"{seconds:.1f} s"))
    if not quiet:
        _note_duplicates(result)


@contextmanager
def _naming_lines(file: Path | None, lines: list[PromptLine]) -> Iterator[None]:
    """Errors of the library count prompts from 0; with a file the line is what helps."""
    try:
        yield
    except D5P4Error as error:
        found = re.match(r"prompt (\d+)(.*)", str(error), re.DOTALL)
        if file is None or found is None:
            raise
        raise D5P4Error(f"{file} line {lines[int(found[1])].line}{found[2]}") from error


def _lines(prompt: str | None, file: Path | None) -> list[PromptLine]:
    """The prompts; none at all asks for unconditional answers."""
    if file is not None:
        return read_prompts(file)
    return [] if prompt is None else [PromptLine(1, None, read_prompt(prompt))]


def _print(line: PromptLine | None, answers: Answers, prompts: int, seconds: float) -> None:
    console = Console()
    print_prompt(console, line.prompt if line else None, line.id if line else None)
    console.print(answers_table(answers, console.width))
    facts = [
        f"{answers.distinct} of {len(answers.texts)} distinct",
        f"{answers.rows:,} of {answers.rows_nominal:,} rows",
        f"{answers.nfe} forward steps",
    ]
    if prompts == 1:
        facts += [f"seed {answers.result.seed}", f"{seconds:.1f} s"]
    console.print(facts_line(*facts))
    console.print()


def _note_duplicates(result: Any) -> None:
    k = result.settings.k
    short = int((result.distinct < k).sum())
    if short:
        who = "the prompt has" if len(result.texts) == 1 else f"{short} of {len(result.texts)} prompts have"
        note(f"{who} fewer than {k} different answers; raise --temperature or -w, or use --distinct or --spare")
