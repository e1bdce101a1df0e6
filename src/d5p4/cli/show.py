"""Shows answers as tables on standard output, and notes on standard error."""

import re
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..result import Answers, number

# Matches control characters (except tab and line feed), separators, direction overrides and half surrogate pairs.
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
NARROWEST = 24  # a column of text has at least this width, in characters


def visible(text: str) -> str:
    """Replace invisible characters of a text by escapes, so that the text cannot disturb the terminal."""
    text = text.replace("\r\n", "\n").expandtabs(4)
    return UNSEEN.sub(lambda match: match.group().encode("unicode_escape", "surrogatepass").decode(), text)


def answer_text(text: str) -> Text:
    """Return an answer as the text of a table cell. Blank lines at the start and the end of the answer are removed."""
    lines = [line.rstrip() for line in visible(text).split("\n")]
    shown = "\n".join(lines).strip("\n")
    return Text(shown) if shown.strip() else Text("white space only" if text else "empty", style="dim italic")


def facts_line(*facts: str) -> Text:
    return Text("  " + " · ".join(facts), style="dim")


def plain_table(*columns: str, wide: str = "") -> Table:
    """Return a table without edges. The columns that `wide` names are aligned left, and all other columns right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for name in columns:
        text = name in wide.split(",")
        table.add_column(name, justify="left" if text else "right", overflow="fold", no_wrap=not text)
    return table


def narrow_tables(
    columns: Sequence[str], rows: Sequence[Sequence[str]], console: Console, wide: str = "method"
) -> Iterator[Table]:
    """Yield a table of the rows or, if the terminal is too narrow, several tables that all begin with the first column.
    No cell is cut or folded. The columns that `wide` names are aligned left."""
    widths = [max(len(row[i]) for row in (columns, *rows)) + 2 for i in range(len(columns))]
    rest = list(range(1, len(columns)))
    while rest:
        count = len(rest)
        while count > 1 and widths[0] + sum(widths[i] for i in rest[:count]) > console.width:
            count -= 1
        table = plain_table(*(columns[i] for i in (0, *rest[:count])), wide=wide)
        for row in rows:
            table.add_row(*(row[i] for i in (0, *rest[:count])))
        yield table
        rest = rest[count:]


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
    """Print a prompt, shortened to one line, as the heading of its answers."""
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


def note(text: str) -> None:
    """Print a note in one line on standard error."""
    Console(stderr=True).print(Text.assemble(("note: ", "yellow"), text), soft_wrap=True)
