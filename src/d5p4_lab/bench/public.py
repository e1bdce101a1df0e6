"""pass@1 and pass@4 of public models on GSM8K and HumanEval, for four ways to spend about the same rows.

    python -m d5p4_lab bench public                                  # a GPU with 24 GB and the hub
    python -m d5p4_lab bench public --models FOLDER --data FOLDER --questions 20

independent   16 samples; pass@n is the mean over all choices of n of them
best-of-n     the 4 of these samples that the model's own score prefers
d5p4          k = 4, w = 4: 16 rows per step
tree          k = 4 with 12 spare beams: 16 rows per step

Every step reveals the sure positions (probability above 0.9), and at least one, at temperature 1. The questions are the
first of a fixed shuffle, from the hub or from --data FOLDER with gsm8k and humaneval. HumanEval's programs run in a
process with limits (`scoring.sandbox`). The same command continues after a stop.
"""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import d5p4
from d5p4.eval.graders import grader
from d5p4.eval.stats import pass_at
from d5p4.models.load import choose_device

from ..paper.tasks import Example, load_task
from ..provenance import about
from ..scoring.sandbox import passes
from ..statistics import figure
from ..tables import Row, markdown, shown
from . import chosen, make_parser
from .units import read_lines, run_units

K, W = 4, 4
MODELS = "GSAI-ML/LLaDA-8B-Instruct,JetLM/SDAR-1.7B-Chat"
TASKS = ("gsm8k", "humaneval")
SURE = {"temperature": 1.0, "reveal": "threshold", "tau": 0.9}
METHODS: dict[str, dict[str, Any]] = {
    "independent": {"method": "independent", "k": K * W, "order": "confidence", **SURE},
    "d5p4": {"method": "d5p4", "k": K, "w": W, "beta": 25.0, "order": "confidence", **SURE},
    "tree": {"method": "tree", "k": K, "spare": K * W - K, **SURE},
}
ASK = "Complete this Python function. Answer with the whole function in one block of code.\n```python\n{}```"


@dataclass(frozen=True)
class Unit:
    model: str
    task: str
    method: str
    first: int  # the first question of the batch
    count: int


shared: dict[str, Any] = {}  # the model that is loaded, and the options


def start(options: Any) -> None:
    shared.update(options=options)


def examples(task: str, options: Any) -> list[Example]:
    path = options.data / task if options.data is not None else None
    return load_task(task, path, limit=options.questions).examples


def work(unit: Unit) -> Row:
    options = shared["options"]
    if shared.get("name") != unit.model:
        shared.pop("model", None)  # frees its memory
        shared.update(name=unit.model, model=d5p4.load(unit.model, options.device, options.dtype))
    asked = examples(unit.task, options)[unit.first : unit.first + unit.count]
    prompts = [ASK.format(example.prompt) if unit.task == "humaneval" else example.prompt for example in asked]
    own = METHODS[unit.method] | {"gen_length": options.gen_length, "seed": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", d5p4.DuplicateAnswers)
        result = d5p4.generate(shared["model"], prompts, keys=[f"{unit.task} {one.id}" for one in asked], **own)
    right = [graded(unit.task, one, texts) for one, texts in zip(asked, result.texts, strict=True)]
    line: Row = {"right": right, "rows": result.rows.tolist(), "texts": result.texts, "about": about(options.device)}
    return line | {"shown": f"{sum(map(sum, right))} right answers, {np.mean(line['rows']):.0f} rows"}


def graded(task: str, example: Example, texts: Sequence[str]) -> list[bool]:
    if task == "gsm8k":
        return grader("gsm8k").grade(example.prompt, texts, example.gold) or []
    assert isinstance(example.gold, tuple)
    prompt, test, entry = example.gold
    return [passes(f"{program(prompt, entry, text)}\n{test}\ncheck({entry})") for text in texts]


def program(prompt: str, entry: str, text: str) -> str:
    """Return the program of an answer: its first block of code, behind the prompt unless it defines the function."""
    block = re.search(r"```(?:python)?\n(.*?)(?:```|$)", text, re.DOTALL)
    code = text if block is None else block[1]
    opening = prompt[: prompt.index(f"def {entry}")]  # imports and helpers
    return opening + code if f"def {entry}" in code else prompt + code


def plan(options: Any) -> Iterator[Unit]:
    for model in options.models:
        for task in options.tasks:
            for first in range(0, options.questions, options.batch):
                count = min(options.batch, options.questions - first)
                yield from (Unit(model, task, method, first, count) for method in METHODS)


def table(lines: Mapping[Unit, Row]) -> str:
    cells = []
    for model, task in dict.fromkeys((unit.model, unit.task) for unit in lines):
        marks, rows = dict[str, list[list[bool]]](), dict[str, list[float]]()
        for unit, line in sorted(lines.items(), key=lambda pair: pair[0].first):
            if (unit.model, unit.task) == (model, task):
                marks.setdefault(unit.method, []).extend(line["right"])
                rows.setdefault(unit.method, []).extend(line["rows"])
        if "independent" in marks:  # answers are sorted by the model's own score
            marks["best-of-n"] = [own[:K] for own in marks["independent"]]
            rows["best-of-n"] = rows["independent"]
        for method in (name for name in ("independent", "best-of-n", "d5p4", "tree") if name in marks):
            right = [own + [False] * (K - len(own)) for own in marks[method]]  # a tree may have fewer answers
            both = [shown(figure(100 * pass_at(np.array(right), n)), 1) for n in (1, K)]
            cells.append(
                [model.rstrip("/").split("/")[-1], task, method, len(right), *both, f"{np.mean(rows[method]):.0f}"]
            )
    return markdown(["model", "task", "method", "questions", "pass@1, %", f"pass@{K}, %", "rows per question"], cells)


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("public", __doc__, Path("out/public"))
    parser.add_argument("--models", default=MODELS, help="folders or hub ids, with commas")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--data", type=Path, help="a folder with gsm8k and humaneval; default: the hub")
    parser.add_argument("--questions", type=int, default=100, help="of each task")
    parser.add_argument("--batch", type=int, default=8, help="questions that are decoded together")
    parser.add_argument("--gen-length", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args(arguments)
    options.device = choose_device(options.device)
    options.models, options.tasks = options.models.split(","), chosen(options.tasks, TASKS, "task")
    file = options.out / "answers.jsonl"
    lines = read_lines(Unit, [file])
    for task in options.tasks:
        examples(task, options)  # missing data is an error before the first decode
    run_units(file, lines, lambda _: plan(options), work, start, (options,))
    wanted = set(plan(options))
    print(table({unit: line for unit, line in lines.items() if unit in wanted}))
