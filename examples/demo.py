"""`make demo`: solve three countdown puzzles by independent sampling and by D5P4, and continue an opening four times.

The puzzles are held out from training. Today's date is their seed, so nothing is picked by hand.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # on a busy machine spinning threads would take minutes

import d5p4  # noqa: E402
from d5p4.cli.common import load_model, run  # noqa: E402
from d5p4.cli.show import answer_text, facts_line, plain_table  # noqa: E402
from d5p4.eval.countdown import WINDOW, Problem, fault, problems  # noqa: E402

FIGURES = Path(__file__).resolve().parent.parent / "src" / "d5p4_lab" / "results" / "bench" / "spare.json"
PUZZLES, NUMBERS, K, SPARE = 3, 4, 4, 4
METHODS = {
    "independent": {"method": "independent"},
    f"d5p4, distinct, spare {SPARE}": {"method": "d5p4", "distinct": True, "spare": SPARE},
}
OPENING = (
    '"I have not seen your brother since Tuesday," said the old man. He put down his cup, looked out of the window at '
    "the rain, and"
)
TOKENS = 32
BOOKS = {"gen_length": TOKENS, "steps": TOKENS, "order": "random", "top_p": 0.9, "beta": 1.0}  # one token per step
COMMANDS = (
    f'generate "86,28,13,31:96" --model countdown -k {K} --distinct --spare {SPARE}',
    'compare "86,28,13,31:96" --model countdown --methods independent,greedy-beam,d5p4',
    'generate "The captain looked at the sea for a long time, and then" --model books -k 4 '
    + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in BOOKS.items()),
)
MARKS = {"new": ("✓ ", "green"), "repeated": ("✓ ", "dim"), "wrong": ("✗ ", "red")}


def column(problem: Problem, result: d5p4.Result, number: int, width: int) -> Text:
    """The marked answers to one puzzle and their counts. The reason for a mark is shown where it fits."""
    answers = result.texts[number]
    lines, kinds = [], []
    for rank, answer in enumerate(answers):
        reason = fault(problem, answer)
        kind = "wrong" if reason else "repeated" if answer in answers[:rank] else "new"
        reason = reason or ("repeated" if kind == "repeated" else "")
        mark, style = MARKS[kind]
        line = Text(mark + (answer or "(empty)"), style)
        for words in (reason, reason.partition(": ")[2]):  # the second leaves out the number of the step
            if words and line.cell_len + 2 + len(words) <= width:
                line.append(f"  {words}", "dim red" if kind == "wrong" else "dim")
                break
        lines.append(line)
        kinds.append(kind)
    right, new = len(answers) - kinds.count("wrong"), kinds.count("new")
    summary = f"{right} right, {new} different · {int(result.rows[number])} rows"
    return Text("\n").join([*lines, Text(summary, "bold" if new else "none")])


def side_by_side(console: Console, cells: dict[str, Text]) -> Table:
    table = plain_table()
    for method in cells:
        table.add_column(method, width=(console.width - 3) // len(cells), overflow="fold")
    table.add_row(*cells.values())
    return table


def committed_figures(path: Path) -> Table | Text:
    """The figures of the committed benchmark for puzzles of as many numbers."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        table = plain_table(
            "method", "first right, %", "solved, %", f"{K} different, %", "different right", wide="method"
        )
        title = f"{results['puzzles']} puzzles on {results['about']['machine']} (± 95 % interval)"
        table.title, table.title_justify, table.title_style = title, "left", "none"
        for name, options in METHODS.items():
            wanted = {"numbers": NUMBERS, "distinct": False, "spare": 0} | options
            row = next(row for row in results["rows"] if wanted.items() <= row.items())
            figures = [(row["first"], 1), (row["solved"], 1), (row["different"], 1), (row["right"], 2)]
            table.add_row(name, *(f"{mean:.{d}f} ± {(high - low) / 2:.{d}f}" for (mean, low, high), d in figures))
        return table
    except (OSError, ValueError, KeyError, StopIteration):
        return Text(f"No figures: {path.name} is missing or incomplete; `make tables` needs it too.", "yellow")


def main() -> None:
    console = Console()
    began, seed = time.perf_counter(), int(time.strftime("%Y%m%d"))
    puzzles = problems(PUZZLES, NUMBERS, seed)
    model = load_model("countdown", None, None, True)
    prompts = [puzzle.prompt for puzzle in puzzles]
    settings = dict(k=K, gen_length=WINDOW[NUMBERS], seed=seed)
    results = {name: run(model, prompts, name, True, **settings, **options)[0] for name, options in METHODS.items()}

    console.print(Rule("[bold]countdown[/]: use every number once to reach the target", align="left"))
    width = (console.width - 3) // len(METHODS)
    for number, puzzle in enumerate(puzzles):
        *others, last = map(str, puzzle.numbers)
        title = Text(f"{', '.join(others)} and {last} to make {puzzle.target}", "bold")
        cells = {name: column(puzzle, result, number, width) for name, result in results.items()}
        console.print(title, side_by_side(console, cells), "", sep="\n")
    facts = facts_line(f"k = {K}", f"seed {seed}: today's date, nothing picked", "all answers checked")
    console.print(facts, "", sep="\n")
    console.print(committed_figures(FIGURES), "", sep="\n")

    books = load_model("books", None, None, True)
    continued, _ = run(books, [OPENING], "books", True, method="d5p4", k=K, seed=seed, **BOOKS)
    console.print(Rule("[bold]books[/]: one opening, four continuations", align="left"))
    table = plain_table("#", "answer", wide="answer")
    table.show_header, table.show_lines = False, True
    for rank, text in enumerate(continued.texts[0]):
        table.add_row(str(rank + 1), answer_text(f"{text} …"))
    facts = facts_line(
        "d5p4", f"{TOKENS} tokens, one per step, top_p {BOOKS['top_p']}", f"{int(continued.rows.sum())} rows"
    )
    console.print(Text(f"{OPENING} …", "bold"), table, facts, "", sep="\n")

    seconds = time.perf_counter() - began
    console.print(Text(f"All of this took {seconds:.0f} s. Try it yourself:", "bold"))
    for command in COMMANDS:
        console.print(f"  .venv/bin/d5p4 {command}", highlight=False, soft_wrap=True, markup=False)


if __name__ == "__main__":
    try:
        main()
    except d5p4.D5P4Error as error:
        sys.exit(f"error: {error}")
