"""How many of four answers differ, and what spare beams give and cost: held-out puzzles, `countdown`.

    python benchmarks/spare.py [--device cuda] [--puzzles 500] [--out FILE]    # prints the table of docs/serving.md
    python benchmarks/spare.py --table                                         # prints it again

k = w = 4, temperature 1, one seed. "Four different": puzzles whose four texts all differ; "different right": right
answers that differ by more than the order of operands, a puzzle; rows: distinct ones that went through the model.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import d5p4  # noqa: E402
from d5p4.eval.countdown import canonical, is_right, problems  # noqa: E402
from d5p4.eval.stats import interval  # noqa: E402
from d5p4.jobs.budget import default_budget  # noqa: E402
from d5p4.provenance import provenance  # noqa: E402

RESULTS = ROOT / "src" / "d5p4_lab" / "results" / "bench" / "spare.json"
K = 4
CASES: tuple[dict[str, Any], ...] = (
    {"method": "independent", "distinct": False, "spare": 0},
    {"method": "independent", "distinct": True, "spare": 0},
    {"method": "independent", "distinct": True, "spare": 4},
    {"method": "d5p4", "distinct": False, "spare": 0},
    {"method": "d5p4", "distinct": False, "spare": 2},
    {"method": "d5p4", "distinct": True, "spare": 0},
    {"method": "d5p4", "distinct": True, "spare": 1},
    {"method": "d5p4", "distinct": True, "spare": 2},
    {"method": "d5p4", "distinct": True, "spare": 4},
)


def measure(model: Any, numbers: int, count: int, case: dict[str, Any]) -> dict[str, Any]:
    """[mean, low, high] of each figure over puzzles."""
    asked = problems(count, numbers=numbers, seed=9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", d5p4.DuplicateAnswers)
        result = d5p4.generate(
            model, [problem.prompt for problem in asked], k=K, seed=1,
            max_tokens_per_forward=default_budget(model), **case,
        )  # fmt: skip
    right = [
        [text for text in texts if is_right(problem, text)] for problem, texts in zip(asked, result.texts, strict=True)
    ]
    figures = {
        "different": [100.0 * (len(set(texts)) == K) for texts in result.texts],
        "right": [float(len(set(map(canonical, texts)))) for texts in right],
        "solved": [100.0 * bool(texts) for texts in right],
        "first": [100.0 * is_right(problem, texts[0]) for problem, texts in zip(asked, result.texts, strict=True)],
        "rows": result.rows.double().tolist(),
    }
    return {"numbers": numbers, **case} | {name: list(interval(values)) for name, values in figures.items()}


def table(results: dict[str, Any]) -> str:
    lines = ["| numbers | | four different | different right | solved | first right | rows |"]
    lines.append("|---" * 7 + "|")
    for row in results["rows"]:
        extra = (", `distinct`" if row["distinct"] else "") + (f", spare {row['spare']}" if row["spare"] else "")
        shown = [_with_doubt(row[name], digits) for name, digits in (("different", 1), ("right", 2), ("solved", 1),
                                                                     ("first", 1), ("rows", 0))]  # fmt: skip
        shown = [f"{text} %" if i in (0, 2, 3) else text for i, text in enumerate(shown)]
        lines.append(f"| {row['numbers']} | {row['method']}{extra} | {' | '.join(shown)} |")
    about = results["about"]
    lines += ["", f"{results['puzzles']} held-out puzzles each, ± 95 % ({about['machine']}, torch {about['torch']}, "
              f"{results['dtype']}; `{about['command']}`)"]  # fmt: skip
    return "\n".join(lines)


def _with_doubt(figure: list[float], digits: int) -> str:
    mean, low, high = figure
    return f"{mean:.{digits}f} ± {(high - low) / 2:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=None)
    parser.add_argument("--puzzles", type=int, default=500)
    parser.add_argument("--numbers", default="4,5,3")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the table of the last run")
    options = parser.parse_args()
    if not options.table:
        model = d5p4.load("countdown", options.device, "float32")
        rows = []
        for numbers in map(int, options.numbers.split(",")):
            for case in CASES:
                rows.append(measure(model, numbers, options.puzzles, case))
                print(rows[-1], flush=True)
        about = provenance(model.device, ["python", "benchmarks/spare.py", "--puzzles", str(options.puzzles)])
        options.out.parent.mkdir(parents=True, exist_ok=True)
        found = {"about": about, "puzzles": options.puzzles, "dtype": "float32", "rows": rows}
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(json.loads(options.out.read_text())))


if __name__ == "__main__":
    main()
