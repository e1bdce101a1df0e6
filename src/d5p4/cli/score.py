"""`d5p4 score` prints a report on a file of answers. Any program may have written the file."""

from __future__ import annotations

import json as codec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..errors import D5P4Error
from ..result import finite
from .common import print_json
from .options import Device, Json, Quiet
from .show import facts_line, note, plain_table, visible

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
    out: Annotated[Path | None, typer.Option(help="Also write the report to this file as JSON.")] = None,
    quiet: Quiet = False,
    device: Device = None,
    judge: Annotated[str | None, typer.Option(hidden=True)] = None,
    encoder: Annotated[str | None, typer.Option(hidden=True)] = None,
    remote_code: Annotated[bool, typer.Option("--remote-code", hidden=True)] = False,
) -> None:
    """Measure answers: quality, diversity, right or wrong.

    Distinct (D1 to D3), EAD and entropy count lower-cased words and punctuation marks.

    Example: d5p4 score answers.jsonl --grader countdown
    """
    if judge is not None:
        raise D5P4Error("--judge has moved: in a checkout, use d5p4_lab.scoring.perplexity.CausalJudge in Python")
    if encoder is not None or remote_code:
        raise D5P4Error("--encoder has gone: give --similarity MODEL, a model of sentence-transformers")
    from ..eval import graders
    from ..eval.report import read_groups, report

    chosen = graders.grader(grader) if grader is not None else None  # raises an error early if the name is wrong
    if out is not None and not out.parent.is_dir():
        raise D5P4Error(f"the report cannot be written: there is no folder {out.parent}")
    groups = read_groups(file, answers, references)
    embed = None
    if similarity is not None:
        from ..eval.similarity import sentence_encoder
        from ..models.load import choose_device, find

        embed = sentence_encoder(find(similarity), choose_device(device))
    result = report(groups, embed=embed, grader=chosen, k=k)
    record = {"file": str(file), "similarity": similarity, "grader": grader} | result.to_dict()
    if out is not None:
        try:
            out.write_text(codec.dumps(finite(record), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as reason:
            raise D5P4Error(f"{out} cannot be written: {reason.strerror or reason}") from None
    if json:
        print_json(record)
    else:
        _print(result, file)
    if similarity is None and not (quiet or json):
        note("cosines of sentence embeddings can be added with --similarity MODEL")


def _print(result: Any, file: Path) -> None:
    """Print the report as a table that fits the terminal.

    In a terminal of fewer than 100 characters, the table has no standard errors. It then has the column `groups` only
    if some figure leaves groups out. Below 80 characters, the table has no explanations either.
    """
    console = Console()
    dropped = set() if console.width >= 100 else {"±"} if console.width >= 80 else {"±", "what"}
    if dropped and all(figure.n == result.groups for figure in result.figures.values()):
        dropped.add("groups")
    shown = [place for place, name in enumerate(result.COLUMNS) if name not in dropped]
    table = plain_table(*(result.COLUMNS[place] for place in shown), wide="metric,what")
    table.columns[0].no_wrap = True
    for row in result.table():
        cells = [*map(Text, row[:-1]), Text(row[-1], style="dim")]
        table.add_row(*(cells[place] for place in shown))
    console.print(table)
    facts = [visible(str(file)), f"{result.groups:,} groups"]
    console.print(facts_line(*facts, *([] if "±" in dropped else ["± is the standard error over groups"])))
    for line in result.notes:
        console.print(facts_line(line))
