"""The commands that answer one prompt: `generate`, `compare` (by several methods) and `trace` (with every step)."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import view
from ..errors import D5P4Error, DuplicateAnswers
from ..eval.graders import grader_of
from ..generate import few_answers
from ..progress import bar
from ..resolve import alike, typed
from ..result import Answers, counted, number, rounded
from ..view import grade
from .common import facts_line, load_model, narrow_tables, note, plain_table, print_json, read_prompt, run, visible
from .options import (
    DEFAULT_MODEL,
    Device,
    Dtype,
    Given,
    Json,
    MethodNames,
    ModelName,
    PromptText,
    Quiet,
    Seed,
    flag,
    share,
)

SUFFIXES = (".html", ".htm", ".json")
NARROWEST = 24  # a column of text has at least this width, in characters


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
            _print_answers(prompt, answers, right, seconds)
    if not quiet and (text := few_answers(result, flag)):
        note(text)
    grader = grader_of(loaded)
    if right is None and shown and grader is not None and grader.examples:
        note(f"the prompt is not graded, because grading needs {grader.needs}")


def _print_answers(prompt: str | None, answers: Answers, right: Sequence[bool] | None, seconds: float) -> None:
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
        _print_methods(prompt, rows)
        return
    for row in rows:
        marks = {} if row.right is None else {"right": row.right}
        print_json({"prompt": prompt, "seconds": rounded(row.seconds)} | row.answers.to_dict() | marks)


def _print_methods(prompt: str, rows: list[Row]) -> None:
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


def trace(
    *,
    prompt: Annotated[str | None, PromptText] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write: .html (a page for a browser) or .json.")
    ] = Path("trace.html"),
    model: ModelName = DEFAULT_MODEL,
    methods: MethodNames = "tree,independent",
    seed: Seed = None,
    quiet: Quiet = False,
    device: Device = None,
    dtype: Dtype = None,
    options: Given,
) -> None:
    """Write a page that shows how the answers were made: where the beams part, on which token, how probable it was.

    All methods use the same seed, order, reveal rule and early stop, as in `d5p4 compare`.

    Example: d5p4 trace "86,28,13,31:96" -o trace.html
    """
    own = share(methods, options)
    prompt = None if prompt is None else read_prompt(prompt)
    _check_place(output)
    loaded = load_model(model, device, dtype, not quiet)
    traces: list[dict[str, Any]] = []
    for method, chosen in alike(loaded, own).items():
        with warnings.catch_warnings(), bar(method, 1, not quiet) as callback:
            warnings.simplefilter("ignore", DuplicateAnswers)  # needs no warning, because the page shows duplicates
            traces.append(view.trace(loaded, prompt, callback=callback, seed=seed, **chosen))
        seed = traces[-1]["seed"]
    try:
        (view.write_json if output.suffix.lower() == ".json" else view.write_html)(output, traces)
    except OSError as reason:
        raise D5P4Error(f"{output} cannot be written: {reason.strerror or reason}") from reason
    if not quiet:
        size = f"{max(1, round(output.stat().st_size / 1000)):,} kB"
        facts = facts_line(str(output), size, f"seed {seed}", *map(_outcome, traces))
        Console().print(facts, soft_wrap=True)


def _check_place(path: Path) -> None:
    """Raise an error if the file cannot be written. The command checks this before it loads the model."""
    if path.suffix.lower() not in SUFFIXES:
        raise D5P4Error(f"the name of the output file {path} must end in .html (a page) or .json")
    if path.is_dir():
        raise D5P4Error(f"{path} is a folder; give the name of a file in that folder")
    if not path.parent.is_dir():
        raise D5P4Error(f"{path} cannot be written: there is no folder {path.parent}")


def _outcome(trace: dict[str, Any]) -> str:
    right = "" if trace["right"] is None else f", {trace['right']} different right"
    count = f"{trace['distinct']} of {len(trace['answers'])} distinct, {counted(trace['near_copies'])}"
    return f"{trace['method']}: {count}{right}"


def answer_text(text: str) -> Text:
    """Return an answer as the text of a table cell. Blank lines at the start and the end of the answer are removed."""
    lines = [line.rstrip() for line in visible(text).split("\n")]
    shown = "\n".join(lines).strip("\n")
    return Text(shown) if shown.strip() else Text("white space only" if text else "empty", style="dim italic")


def _takes_lines(texts: list[str], width: int) -> bool:
    """Return whether any of the texts needs more than one line if a line has this width in characters."""
    return any("\n" in text.strip() or len(text) > width for text in texts)


def answers_table(answers: Answers, width: int, right: Sequence[bool] | None = None) -> Table:
    """Return a table of the answers, best first. If `right` is given, a column says which answers are right. There are
    lines between long answers."""
    table = plain_table("#", "score", "distance", *(["right"] if right is not None else []), "answer", wide="answer")
    table.show_lines = _takes_lines(answers.texts, width - NARROWEST)
    for rank, text in enumerate(answers.texts):
        marks = [] if right is None else [Text("yes", "green") if right[rank] else Text("no", "red")]
        numbers = [number(answers.score[rank]), number(answers.distance[rank])]
        table.add_row(str(rank + 1), *numbers, *marks, answer_text(text))
    return table


def print_prompt(console: Console, prompt: str | None) -> None:
    words = "unconditional" if prompt is None else " ".join(visible(prompt).split()) or "empty prompt"
    console.print(Text(words, style="bold"), no_wrap=True, overflow="ellipsis")


def side_by_side(columns: list[tuple[str, list[str], Sequence[bool] | None]], width: int) -> Table:
    """Return a table with one column of texts per entry, for a terminal of this width. Wrong texts are marked."""
    table = plain_table("#")
    table.show_lines = _takes_lines([text for _, texts, _ in columns for text in texts], width // len(columns) - 4)
    for name, _, _ in columns:
        table.add_column(name, overflow="fold", ratio=1)
    for rank in range(max(len(texts) for _, texts, _ in columns)):
        table.add_row(str(rank + 1), *(_marked(texts, right, rank) for _, texts, right in columns))
    return table


def _marked(texts: list[str], right: Sequence[bool] | None, rank: int) -> Text:
    """Return an answer as the text of a table cell, with "(wrong)" after it if the answer is wrong. The cell is empty
    if there are fewer answers."""
    if rank >= len(texts):
        return Text()
    cell = answer_text(texts[rank])
    return cell if right is None or right[rank] else Text.assemble(cell, (" (wrong)", "red"))
