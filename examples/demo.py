"""`make demo`: three countdown puzzles by independent sampling and by D5P4 side by side, and a prompt continued.

The puzzles are held out from training and drawn by today's date; nothing is picked.
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
from d5p4.eval.countdown import WINDOW, Problem, fault, is_right, problems  # noqa: E402

RESULTS = Path(__file__).resolve().parent.parent / "src" / "d5p4_lab" / "results" / "bench" / "countdown.json"
METHODS = ("independent", "d5p4")
BENCHED = (*METHODS, "d5p4, distinct")
PUZZLES, NUMBERS, K = 3, 4, 4
OPENING = "The old house stood at the end of the lane, and when the door was opened"
COMMANDS = (
    f'generate "86,28,13,31:96" --model countdown -k {K}',
    'compare "86,28,13,31:96" --model countdown --methods independent,greedy-beam,d5p4',
    f'generate "It was a cold morning and" --model books --gen-length 64 --steps 32 -k {K}',
)
MARKS = {"new": ("✓ ", "green"), "again": ("✓ ", "dim"), "wrong": ("✗ ", "red")}


def kind_of(problem: Problem, answers: list[str], rank: int) -> str:
    """Whether an answer is right and "new", right "again", or "wrong"."""
    if not is_right(problem, answers[rank]):
        return "wrong"
    return "again" if answers[rank] in answers[:rank] else "new"


def column(problem: Problem, result: d5p4.Result, number: int, width: int) -> Text:
    """The answers to one puzzle, a line each, and what they come to. Faults are named where there is room."""
    lines, answers = [], result.texts[number]
    kinds = [kind_of(problem, answers, rank) for rank in range(len(answers))]
    for answer, kind in zip(answers, kinds, strict=True):
        mark, style = MARKS[kind]
        line = Text(mark + (answer or "(empty)"), style)
        why = "said before" if kind == "again" else fault(problem, answer) or ""
        for words in (why, why.partition(": ")[2]):  # the second leaves out which step it was
            if words and line.cell_len + 2 + len(words) <= width:
                line.append(f"  {words}", "dim" if kind == "again" else "dim red")
                break
        lines.append(line)
    right, new = len(answers) - kinds.count("wrong"), kinds.count("new")
    rows, nominal = int(result.rows[number]), int(result.rows_nominal[number])
    lines.append(Text(f"{right} right, {new} different · {rows} of {nominal} rows", "bold" if new else "none"))
    return Text("\n").join(lines)


def side_by_side(console: Console, cells: dict[str, Text]) -> Table:
    table = plain_table()
    for method in cells:
        table.add_column(method, width=(console.width - 3) // len(cells), overflow="fold")
    table.add_row(*cells.values())
    return table


def committed(path: Path) -> Table | Text:
    """The benchmark's figures for four numbers, as committed."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        rows = {r["method"]: r for r in held["summary"] if r["numbers"] == NUMBERS and r["guidance"] == 1}
        chosen = [rows[method] for method in BENCHED]
        session = held["sessions"][chosen[-1]["session"]]
    except FileNotFoundError:
        return Text(f"There is no {path.name} in src/d5p4_lab/results/bench: the benchmark was not run yet.", "yellow")
    except (ValueError, KeyError) as reason:
        return Text(f"src/d5p4_lab/results/bench/{path.name} holds no figures for all methods ({reason!r}).", "yellow")
    first = chosen[0]
    where = f"{first['problems']:,} puzzles, {first['seeds']} seeds, on {session['machine']}"
    table = plain_table("method", "first right, %", f"pass@{K}, %", "different right", "rows a step", wide="method")
    table.title, table.title_justify, table.title_style = f"{where} (± 95 % interval)", "left", "none"
    for row in chosen:
        shown = [(row["first"], 100, 1), (row[f"pass@{K}"], 100, 1), (row["distinct_right"], 1, 2)]
        figures = [f"{s * mean:.{d}f} ± {s * (high - low) / 2:.{d}f}" for (mean, low, high), s, d in shown]
        table.add_row(row["method"], *figures, f"{row['rows']:.1f} of {row['rows_nominal']:g}")
    return table


def main() -> None:
    console = Console()
    began, seed = time.perf_counter(), int(time.strftime("%Y%m%d"))
    puzzles = problems(PUZZLES, NUMBERS, seed)
    model = load_model("countdown", None, None, True)
    prompts = [puzzle.prompt for puzzle in puzzles]
    settings = dict(k=K, gen_length=WINDOW[NUMBERS], seed=seed)
    results = {m: run(model, prompts, m, True, method=m, **settings)[0] for m in METHODS}

    console.print(Rule("[bold]countdown[/]: use every number once to reach the target", align="left"))
    for number, puzzle in enumerate(puzzles):
        *others, last = map(str, puzzle.numbers)
        title = Text.assemble((f"{', '.join(others)} and {last} to make {puzzle.target}", "bold"))
        width = (console.width - 3) // len(METHODS)
        cells = {method: column(puzzle, result, number, width) for method, result in results.items()}
        console.print(title, side_by_side(console, cells), "", sep="\n")
    facts = facts_line(f"k = {K}", f"seed {seed}: today's date, nothing picked", "all answers checked")
    console.print(facts, "", sep="\n")
    console.print(committed(RESULTS), "", sep="\n")

    books = load_model("books", None, None, True)
    continued, _ = run(books, [OPENING], "books", True, method="d5p4", gen_length=64, steps=32, k=K, seed=seed)
    console.print(Rule("[bold]books[/]: one opening, four continuations", align="left"))
    table = plain_table("#", "answer", wide="answer")
    table.show_header, table.show_lines = False, True
    for rank, text in enumerate(continued.texts[0]):
        table.add_row(str(rank + 1), answer_text(text))
    spent = f"{int(continued.rows.sum())} of {int(continued.rows_nominal.sum())} rows"
    facts = facts_line("64 tokens in 32 steps", "d5p4, ancestral order", spent)
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
