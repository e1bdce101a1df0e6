"""`d5p4 score` prints a report on a file of answers. Any program may have written the file."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..eval import graders
from ..eval.report import read_groups, report, sentence_encoder
from ..models.load import choose_device, find
from .common import facts_line, narrow_tables, note, print_json, visible
from .options import Device, Json, Quiet

SIMILARITY = "Add cosines by this sentence-transformers model: a folder, or a hub id of the form org/name."
GRADER = "Mark answers right or wrong: gsm8k, exact, countdown, programs, or a grader of a plugin."
FILE = "JSON lines from d5p4 run, d5p4 generate --json, lm-eval, OpenAI's API, or with similar fields."


def score(
    file: Annotated[Path, typer.Argument(help=FILE)],
    *,
    similarity: Annotated[str | None, typer.Option(help=SIMILARITY, metavar="MODEL")] = None,
    grader: Annotated[str | None, typer.Option(help=GRADER, metavar="NAME")] = None,
    k: Annotated[
        int | None, typer.Option("-k", "--k", help="The k of metrics such as pass@k. [size of the smallest group]")
    ] = None,
    answers: Annotated[str | None, typer.Option(help="The field that holds the answers.", metavar="FIELD")] = None,
    references: Annotated[
        str | None, typer.Option(help="The field that holds the references.", metavar="FIELD")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    device: Device = None,
) -> None:
    """Measure answers: quality, diversity, right or wrong.

    Distance, distinct (D1 to D3), EAD and entropy count lower-cased words and punctuation marks.

    Example: d5p4 score answers.jsonl --grader countdown
    """
    chosen = graders.grader(grader) if grader is not None else None  # raises an error early if the name is wrong
    groups = read_groups(file, answers, references)
    embed = None
    if similarity is not None:
        embed = sentence_encoder(find(similarity), choose_device(device))
    result = report(groups, embed=embed, grader=chosen, k=k)
    if json:
        print_json({"file": str(file), "similarity": similarity, "grader": grader} | result.to_dict())
    else:
        _print(result, file)
    if similarity is None and not (quiet or json):
        note("cosines of sentence embeddings can be added with --similarity MODEL")


def _print(result: Any, file: Path) -> None:
    console = Console()
    for table in narrow_tables(result.COLUMNS, result.table(), console, wide="metric,what"):
        console.print(table)
    facts = [visible(str(file)), f"{result.groups:,} groups"]
    console.print(facts_line(*facts, "± is the standard error over groups"))
    for line in result.notes:
        console.print(facts_line(line))
