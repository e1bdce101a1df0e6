"""Answers for people: tables on standard output, notes on standard error."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from .record import Answers

# Control characters but tab and line feed, line and paragraph separators, direction overrides, half surrogate pairs.
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
NARROWEST = 24  # columns of text that can still be read


def visible(text: str) -> str:
    """Text that cannot disturb the terminal: what is not seen is written as an escape."""
    text = text.replace("\r\n", "\n").expandtabs(4)
    return UNSEEN.sub(lambda found: found.group().encode("unicode_escape", "surrogatepass").decode(), text)


def answer_text(text: str) -> Text:
    """An answer in a cell: its own line breaks, without blank lines around it."""
    lines = [line.rstrip() for line in visible(text).split("\n")]
    shown = "\n".join(lines).strip("\n")
    return Text(shown) if shown.strip() else Text("white space only" if text else "empty", style="dim italic")


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def facts_line(*facts: str) -> Text:
    return Text("  " + " · ".join(facts), style="dim")


def plain_table(*columns: str, wide: str = "") -> Table:
    """A light table; numbers to the right, the `wide` columns' text to the left."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for name in columns:
        text = name in wide.split(",")
        table.add_column(name, justify="left" if text else "right", overflow="fold", no_wrap=not text)
    return table


def _takes_lines(texts: list[str], width: int) -> bool:
    """Whether a text fills more than one line of this width."""
    return any("\n" in text.strip() or len(text) > width for text in texts)


def answers_table(answers: Answers, width: int) -> Table:
    """The answers by rank; a blank line between them when one takes several."""
    table = plain_table("#", "score", "distance", "answer", wide="answer")
    table.show_lines = _takes_lines(answers.texts, width - NARROWEST)
    for rank, text in enumerate(answers.texts):
        table.add_row(
            str(rank + 1), number(answers.score[rank]), number(answers.distance[rank]), answer_text(text)
        )
    return table


def print_prompt(console: Console, prompt: str | list[dict[str, Any]] | None, name: str | int | None = None) -> None:
    """The prompt, cut to one line, as the heading of its answers."""
    text = "unconditional" if prompt is None else prompt if isinstance(prompt, str) else prompt[-1]["content"]
    words = " ".join(visible(text).split()) or "empty prompt"
    heading = words if name is None else f"{visible(str(name))}  {words}"
    console.print(Text(heading, style="bold"), no_wrap=True, overflow="ellipsis")


def side_by_side(columns: list[tuple[str, list[str]]], console: Console) -> list[Table]:
    """Texts in named columns, in as many tables as the width asks for."""
    count = max(1, console.width // (NARROWEST + 2))
    tables = []
    for start in range(0, len(columns), count):
        part = columns[start : start + count]
        table = plain_table("#")
        table.show_lines = _takes_lines([text for _, texts in part for text in texts], console.width // len(part) - 4)
        for name, _ in part:
            table.add_column(name, overflow="fold", ratio=1)
        for rank in range(max(len(texts) for _, texts in part)):
            table.add_row(str(rank + 1), *(answer_text(texts[rank]) for _, texts in part))
        tables.append(table)
    return tables


def note(text: str) -> None:
    """One line on standard error."""
    Console(stderr=True).print(Text.assemble(("note: ", "yellow"), text), soft_wrap=True)
