"""`make demo`: solve three countdown puzzles by three methods, continue an opening and answer a question four times.

The puzzles are held out from training. Today's date is their seed, so nothing is picked by hand.
"""

from __future__ import annotations

import json
import lzma
import os
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # on a busy machine spinning threads would take minutes

import d5p4  # noqa: E402
from d5p4.cli.answer import answer_text  # noqa: E402
from d5p4.cli.common import facts_line, load_model, plain_table, run  # noqa: E402
from d5p4.eval.countdown import WINDOW, Problem, fault  # noqa: E402
from d5p4_lab.puzzles import problems  # noqa: E402

FIGURES = Path(__file__).resolve().parent.parent / "src" / "d5p4_lab" / "results" / "bench" / "countdown.jsonl.xz"
PUZZLES, NUMBERS, K = 3, 4, 4
METHODS = {"independent": "independent", "d5p4": "d5p4", "tree": "tree, K = 8"}  # method: its name in the results file
OPENING = (
    '"I have not seen your brother since Tuesday," said the old man. He put down his cup, looked out of the window at '
    "the rain, and"
)
TOKENS, TEMPERATURE = 40, 0.8
QUESTION = "Name a good use for an old door."
COMMANDS = (
    'generate "86,28,13,31:96"',
    'compare "86,28,13,31:96"',
    f'generate "The captain looked at the sea, and then" --model books --gen-length {TOKENS} '
    f"--temperature {TEMPERATURE}",
    'generate "Why do cats purr?" --model smol',
)
MARKS = {"new": ("✓ ", "green"), "repeated": ("✓ ", "dim"), "wrong": ("✗ ", "red")}


def marked(problem: Problem, answers: list[str]) -> tuple[Text, str]:
    """Return the answers to one puzzle with a mark and the reason for it, and how many different ones are right."""
    lines, kinds = [], []
    for rank, answer in enumerate(answers):
        reason = fault(problem, answer)
        kind = "wrong" if reason else "repeated" if answer in answers[:rank] else "new"
        mark, style = MARKS[kind]
        line = Text(mark + (answer or "(empty)"), style)
        if reason or kind == "repeated":
            line.append(f"  {reason or 'repeated'}", "dim red" if reason else "dim")
        lines.append(line)
        kinds.append(kind)
    return Text("\n").join(lines), f"{kinds.count('new')} of {K}"


def puzzle_table(puzzle: Problem, number: int, results: dict[str, d5p4.Result]) -> Table:
    table = plain_table("method", "answers", "different right", "rows", wide="method,answers")
    table.show_lines = True
    *others, last = map(str, puzzle.numbers)
    table.title = f"{', '.join(others)} and {last} to make {puzzle.target}"
    table.title_justify, table.title_style = "left", "bold"
    for name, result in results.items():
        answers, count = marked(puzzle, result.texts[number])
        table.add_row(name, answers, count, str(int(result.rows[number])))
    return table


def committed_figures(path: Path) -> Table | Text:
    """Return the figures of the committed benchmark for puzzles of NUMBERS numbers."""
    try:
        head, *lines = map(json.loads, lzma.decompress(path.read_bytes()).splitlines())
        table = plain_table("method", "solved, %", "first right, %", "different right", "rows", wide="method")
        title = f"{head['puzzles']:,} held-out puzzles, each method at its best, {head['about'][0]['machine']}"
        table.title, table.title_justify, table.title_style = title, "left", "none"
        rows = [row for row in lines if row["stage"] == "coverage" and row["cases"] == "committed"]
        rows = [row for row in rows if row["numbers"] == NUMBERS]
        for shown, name in METHODS.items():
            row = max((row for row in rows if row["method"] == name), key=lambda row: row["pass@4"][0])
            shares = [f"{100 * row[figure][0]:.1f}" for figure in ("pass@4", "first")]
            table.add_row(shown, *shares, f"{row['different'][0]:.2f}", f"{row['rows'][0]:.0f}")
        return table
    except (OSError, lzma.LZMAError, ValueError, KeyError, IndexError):
        return Text(f"No figures: {path.name} is missing or incomplete; `make tables` needs it too.", "yellow")


def show_texts(console: Console, name: str, title: str, prompt: str, **options: Any) -> None:
    result, _ = run(load_model(name, None, None, True), [prompt], name, True, **options)
    table = plain_table("#", "answer", wide="answer")
    table.show_header, table.show_lines = False, True
    for rank, text in enumerate(result.texts[0]):
        table.add_row(str(rank + 1), answer_text(f"{text} …"))
    heat = f"temperature {result.settings.temperature}"
    facts = facts_line("tree", f"{TOKENS} tokens, one per step", heat, f"{int(result.rows.sum())} rows")
    console.print(Rule(f"[bold]{name}[/]: {title}", align="left"), Text(prompt, "bold"), table, facts, "", sep="\n")


def main() -> None:
    console = Console()
    began, seed = time.perf_counter(), int(time.strftime("%Y%m%d"))
    puzzles = problems(PUZZLES, NUMBERS, seed)
    model = load_model("countdown", None, None, True)
    prompts = [puzzle.prompt for puzzle in puzzles]
    settings = dict(k=K, gen_length=WINDOW[NUMBERS], seed=seed)
    results = {name: run(model, prompts, name, True, method=name, **settings)[0] for name in METHODS}

    console.print(Rule("[bold]countdown[/]: use every number once to reach the target", align="left"))
    for number, puzzle in enumerate(puzzles):
        console.print(puzzle_table(puzzle, number, results), "", sep="\n")
    facts = facts_line("tree is the default", f"seed {seed}: today's date, nothing picked", "all answers checked")
    console.print(facts, "", sep="\n")
    console.print(committed_figures(FIGURES), "", sep="\n")

    common = dict(k=K, seed=seed, gen_length=TOKENS)
    show_texts(console, "books", "one opening, four continuations", OPENING, temperature=TEMPERATURE, **common)
    show_texts(console, "smol", "one question, four answers in English", QUESTION, **common)

    seconds = time.perf_counter() - began
    console.print(Text(f"All of this took {seconds:.0f} s. Try it yourself:", "bold"))
    for command in COMMANDS:
        console.print(f"  .venv/bin/d5p4 {command}", highlight=False, soft_wrap=True, markup=False)


if __name__ == "__main__":
    try:
        main()
    except d5p4.D5P4Error as error:
        sys.exit(f"error: {error}")
