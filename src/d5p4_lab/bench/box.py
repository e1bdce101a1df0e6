"""The wide start beside today's methods on the three small models of the box, at about equal rows.

    python -m d5p4_lab bench box

`countdown` (four numbers) and `programs` (four operations): the share of problems that one of four answers solves. Each
method has the order, the temperature and the parameter that `bench rivals` found for it, and reveals per pass what the
tree reveals. `books`: nats per byte under SmolLM2, and 1 - the mean cosine of MiniLM, of sets of four texts of 48
tokens without a prompt. The problems are the first ones of `bench rivals`.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import d5p4
from d5p4.eval.countdown import WINDOW
from d5p4.eval.stats import average_cosine

from ..provenance import about
from ..scoring.encoder import Encoder
from ..scoring.perplexity import SMOLLM2, CausalJudge
from ..statistics import interval, ratio_figure
from ..tables import Row, Tables, half_width, markdown, shown
from . import RESULTS, generate, make_parser, read, solving, write
from .rivals import TEST, problems_of
from .solving import AS_TREE, SURE, K, rule_options

TOKENS = 48
RESULT = RESULTS / "box.jsonl.xz"
ALIKE, TREE = rule_options(AS_TREE), rule_options(SURE)
TODAY = {"method": "tree", "order": "top", "temperature": 0.0, "diversity": 1.0} | TREE


def wide(spare: int, cut: int, **options: Any) -> Row:
    return {"method": "wide-start", "spare": spare, "cut": cut, "order": "top"} | TREE | options


def drawn(method: str, temperature: float, **options: Any) -> Row:
    return {"method": method, "order": "confidence", "temperature": temperature, **options} | ALIKE


PUZZLES: dict[str, dict[str, Row]] = {
    "countdown": {
        "independent, best of 8": drawn("best-of-n", 2.0, w=2, repeats=False),
        "tree, K = 8 (today's)": TODAY | {"spare": 4},
        "d5p4": drawn("d5p4", 2.0, beta=300.0, w=4),
        **{f"wide start, cut {c}, T {t:g}": wide(12, c, temperature=t) for c, t in ((3, 0.7), (3, 0.0), (5, 0.0))},
    },
    "programs": {
        "independent": drawn("independent", 1.0),
        "tree, K = 4 (today's)": TODAY | {"spare": 0},
        "d5p4": drawn("d5p4", 1.0, beta=20.0, w=2),
        **{f"wide start, cut 2, T {t:g}": wide(4, 2, temperature=t) for t in (0.0, 0.7)},
    },
}
ONE = {"reveal": "threshold", "tau": 1.0, "order": "random"}
BOOKS: dict[str, Row] = {
    **{f"independent, T {t:g}": {"method": "independent", "temperature": t} for t in (0.7, 0.85, 1.0)},
    "independent, T 1, top-p 0.9": {"method": "independent", "temperature": 1.0, "top_p": 0.9},
    "tree, order top, T 1 (today's)": {"method": "tree", "order": "top", "temperature": 1.0},
    "d5p4, T 1, β 100": {"method": "d5p4", "temperature": 1.0, "beta": 100.0, "w": 2},
    "wide start, cut 16, T 1": {"method": "wide-start", "spare": 8, "cut": 16, "temperature": 1.0},
    "wide start, cut 16, T 0.85": {"method": "wide-start", "spare": 8, "cut": 16, "temperature": 0.85},
}


def puzzles(task: str, count: int, device: str | None, command: tuple[str, ...]) -> Iterator[Row]:
    solving.start({task: task}, device, False, command)
    prompts, references = problems_of(f"{task}-4", TEST, count)
    for name, options in PUZZLES[task].items():
        options = {"k": K, **options} | ({"gen_length": WINDOW[4]} if task == "countdown" else {})
        line = solving.answer(task, prompts, 0, options, references)
        print(f"{task}, {name}: {line['shown']}", flush=True)
        measured = {column: line["problems"][column] for column in ("right", "different", "rows")}
        yield {"task": task, "method": name, "about": line["about"]} | measured


def books(sets: int, device: str | None, command: tuple[str, ...]) -> Iterator[Row]:
    model, judge, encoder = d5p4.load("books", device), CausalJudge(SMOLLM2, device=device), Encoder(device=device)
    origin = about(model.device, command)
    for name, options in BOOKS.items():
        result = generate(model, k=K, sets=sets, gen_length=TOKENS, seed=0, **ONE | options)
        scored = judge.score([text for texts in result.texts for text in texts])
        nats, size = (sums.reshape(-1, K).sum(1).tolist() for sums in (scored.nats, scored.bytes))
        difference = [1 - average_cosine(encoder.encode(texts)) for texts in result.texts]
        measured = {"nats": nats, "bytes": size, "difference": difference, "rows": result.rows.tolist()}
        print(f"books, {name}: {sum(nats) / sum(size):.3f} nats per byte, {np.mean(difference):.3f}", flush=True)
        yield {"task": "books", "method": name, "about": origin} | measured


# ---- tables


def puzzle_table(results: Sequence[Row]) -> str:
    """Return the shares solved, and the differences to today's tree, problem by problem."""
    cells = []
    for task in PUZZLES:
        rows = [row for row in results if row["task"] == task]
        solved = {row["method"]: np.array(row["right"], bool).any(1).astype(float) for row in rows}
        for row in rows:
            own = solved[row["method"]]
            today = next(other for name, other in solved.items() if name.startswith("tree"))
            figures = half_width(interval(own), 1, 100), half_width(interval(own - today), 1, 100)
            rest = f"{np.mean(row['different']):.2f}", f"{np.mean(row['rows']):.0f}"
            cells.append([task, len(own), row["method"], *figures, *rest])
    return markdown(["model", "problems", "method", "solved %", "less the tree's", "different right", "rows"], cells)


def book_table(results: Sequence[Row]) -> str:
    cells = []
    for row in (row for row in results if row["task"] == "books"):
        nats = shown(ratio_figure(row["nats"], row["bytes"]), 3)
        difference = half_width(interval(row["difference"]), 3)
        cells.append([row["method"], len(row["nats"]), nats, difference, f"{np.mean(row['rows']):.0f}"])
    return markdown(["method", "sets", "nats per byte", "difference", "rows"], cells)


def tables(results: Sequence[Row]) -> Tables:
    return {"puzzles": partial(puzzle_table, results), "books": partial(book_table, results)}


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("box", __doc__, RESULT)
    parser.add_argument("--task", choices=(*PUZZLES, "books"), action="append", help="may be repeated [all]")
    parser.add_argument("--count", type=int, default=100, help="problems; a quarter as many sets of books [100]")
    options = parser.parse_args(arguments)
    results = read(options.out)
    for task in options.task or (*PUZZLES, "books"):
        given = options.device, ("bench", "box", *arguments)
        made = books(options.count // 4, *given) if task == "books" else puzzles(task, options.count, *given)
        results = [row for row in results if row["task"] != task] + list(made)
        write(options.out, results)
    print("\n\n".join(draw() for draw in tables(results).values()))
