"""`make demo`: many right answers to one question, by independent sampling and by D5P4, side by side.

The model is made in seconds by scripts/make_sums_model.py: it writes a number as a sum (`17=` -> `5+12`).
"""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

import d5p4

HERE = Path(__file__).resolve().parent.parent
MODEL = HERE / "out" / "sums"
TOTALS = range(10, 21)
K, W = 8, 4


def is_right(total: int, answer: str) -> bool:
    """Exactly a+b with the right sum; text is never evaluated."""
    parts = answer.split("+")
    return len(parts) == 2 and all(p.isdigit() for p in parts) and int(parts[0]) + int(parts[1]) == total


def main() -> None:
    console = Console()
    if not (MODEL / "model.safetensors").exists():
        subprocess.run([sys.executable, str(HERE / "scripts" / "make_sums_model.py"), str(MODEL)], check=True)
    model = d5p4.load(MODEL)
    prompts = [f"{total}=" for total in TOTALS]
    seed = int(time.strftime("%Y%m%d"))
    results = {}
    with Progress(console=console, transient=True) as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore", d5p4.DuplicateAnswers)
        for method in ("independent", "d5p4"):
            task = bar.add_task(method, total=None)

            def advance(shot: d5p4.Snapshot, task=task) -> None:
                bar.update(task, total=shot.steps, completed=shot.step + 1)

            results[method] = d5p4.generate(model, prompts, k=K, w=W, method=method, seed=seed, callback=advance)

    table = Table(title=f"{K} ways to write a number as a sum (seed {seed})", show_lines=True)
    table.add_column("question", no_wrap=True)
    for method in results:
        table.add_column(f"{method}: answers, best first", ratio=1)
    for row in (0, 5, 10):
        cells = [Text(prompts[row])]
        for result in results.values():
            seen, cell = set(), Text()
            for answer in result.texts[row]:
                if not is_right(TOTALS[row], answer):
                    cell.append(f"✗{answer}  ", "red")
                elif answer in seen:
                    cell.append(f"({answer})  ", "dim")
                else:
                    cell.append(f"{answer}  ", "bold green")
                seen.add(answer)
            cells.append(cell)
        table.add_row(*cells)
    console.print(table)
    console.print("[bold green]right and new[/]  [dim](right, said before)[/]  [red]✗wrong[/]\n")

    summary = Table(title=f"all {len(prompts)} questions, {K} answers each")
    for name in ("method", "right", "different right answers a question", "rows run", "rows the paper counts"):
        summary.add_column(name, justify="left" if name == "method" else "right")
    for method, result in results.items():
        right = [
            [a for a in answers if is_right(total, a)] for total, answers in zip(TOTALS, result.texts, strict=True)
        ]
        summary.add_row(
            method,
            f"{sum(map(len, right)) / (K * len(prompts)):.0%}",
            f"{sum(len(set(answers)) for answers in right) / len(prompts):.2f} of {K}",
            str(int(result.rows.sum())),
            str(int(result.rows_nominal.sum())),
        )
    console.print(summary)
    command = ".venv/bin/d5p4"
    console.print("\nTry it yourself:", style="bold")
    for line in (
        f'{command} generate "17=" --model out/sums -k 6',
        f'{command} compare "17=" --model out/sums --methods independent,greedy-beam,d5p4',
        f"{command} methods",
    ):
        console.print(f"  {line}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
