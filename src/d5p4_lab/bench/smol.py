"""What smol can do beside its base, SmolLM2-135M-Instruct.

    python -m d5p4_lab bench smol --data FOLDER --stage kl --stage choices --stage answers --stage time --stage draw

kl        KL(base || smol decoded from the left) per token, on answers at temperature 1 that the base writes to
          questions of TruthfulQA. No model has seen these questions. --length cuts the rows
choices   accuracy on ARC-Challenge and CommonsenseQA: the choice that the question makes likelier by the largest
          factor, p(choice | question) / p(choice | a request to answer), by the exact chain of probabilities from the
          left. The rule was chosen for the base on one question in eight, and these questions are not reported
answers   four answers to each of some questions of TruthfulQA, by settings of `bench language`
forms     four JSON objects for each of 100 questions (--questions), with and without the JSON schema, in bfloat16: how
          many are valid and different, the base's nats per token, and the share of the time that masks take. Ten
          questions make a line, and the same command continues after a stop
time      seconds to load smol and to give four answers of 64 tokens, and which part of them the model takes
variants  KL of short training runs on the same data: blocks of 8, 16 and 32, attention inside clean blocks causal or
          not, rank 16 and 32. --steps counts steps per run. --rows is the file of rows; if it does not exist, the
          base writes it (--data: gsm8k and books, as in `train smol`). The same command continues after a stop
card      twenty questions with four answers each, written into smol's card
draw      the figures without texts, from --out, into the committed results, where they replace older lines

The stages kl, choices and answers take the first --questions of a fixed shuffle. Quality is the base's nats per token
in float32, with the end token if the answer has ended. This flatters the base; `bench language` has an outside judge.
Difference is distinct-2.
"""

from __future__ import annotations

import cProfile
import hashlib
import json
import pstats
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import torch
from torch import Tensor

import d5p4
from d5p4.constraint import canonical
from d5p4.eval.lexical import distinct, f1
from d5p4.models.checkpoint import read_json
from d5p4.models.load import choose_device, find
from d5p4.ops.vocab import logits_of
from d5p4.prompts import encode
from d5p4.types import Context, Store

from ..paper.tasks import choices_of, load_task, shuffled
from ..provenance import about
from ..scoring.causal import Pair, Teacher, causal_base, in_batches, laid_out, summed_nats
from ..statistics import figure, from_resamples, front, interval, ratio_figure, resampled_means
from ..tables import Row, Tables, half_width, markdown, shown
from ..timing import one_thread, timed
from ..train.loop import Budget, train
from ..train.smol import Body, Smol
from ..train.smol import base as smol_base
from ..train.smol import recipe as smol_recipe
from ..train.smol_data import ANSWER, END, OPENING, TURN, Data, Prefix, Writer
from . import RESULTS, generate, make_parser, read, write
from .language import ONE, TOKENS, K, Unit, decode

STAGES = ("kl", "choices", "answers", "forms", "time", "variants", "card", "draw")
VARIANTS = [{"block": b, "rank": 16, "causal": c} for b, c in ((8, 0), (16, 0), (32, 0), (8, 1), (16, 1))]
VARIANTS += [{"block": 8, "rank": 32, "causal": 1}]
RESULT = RESULTS / "smol.jsonl.xz"
# The rule of the stage choices. Of some rules, it served the base best on the questions that are not reported.
QUESTION, NEUTRAL = "Question: {}\nAnswer:", "Answer."
ASKED = """Name a good use for an old door.|Why do cats purr?|What should I cook with two eggs and some rice?
Write a two-line poem about the sea.|How can I fall asleep faster?|What is a black hole?
Give me a name for a small bakery.|Why is the sky blue?|Tell me a joke about a dentist.
What is the capital of Australia?|How do I say no to a friend politely?|Describe autumn in one sentence.
What is 17 plus 25?|Why did the Roman Empire fall?|Suggest a hobby for a rainy day.|What does a librarian do?
Write the first sentence of a detective story.|How are rainbows made?|What is a healthy breakfast?
Explain money to a child."""
ANSWERS = [  # settings of `bench language`
    *(f"{who}, T {t:g}" for who in ("base samples", "independent") for t in (0.5, 0.7, 0.85, 1.0)),
    *(f"{who}, T 1, top-p {p}" for who in ("base samples", "independent") for p in (0.8, 0.9)),
    *("base beams, stochastic, T 0.7", "base beams, stochastic, T 1", "d5p4, T 0.7, β 20", "d5p4, T 0.7, β 100"),
    *("d5p4, T 1, top-p 0.8, β 100", "tree, T 0.7", "threshold 0.9, T 0.7", "threshold 0.9, T 0.5"),
]


# ---- stages


def answers(model: Any, teacher: Teacher, data: Path, questions: int | None, seed: int, methods: str) -> Iterator[Row]:
    """Yield one line of figures per question, for each of the settings."""
    examples = load_task("truthfulqa", data / "truthfulqa", limit=questions).examples
    asked = [encode(model, example.prompt, None) for example in examples]
    for name in (name for name in ANSWERS if re.search(methods, name)):
        line = decode(Unit(name, "", "", seed, TOKENS), [e.prompt for e in examples], model, teacher, 1 << 17)
        texts, ids = line["texts"], line["ids"]
        flat = iter(teacher.nats([(p, a) for p, group in zip(asked, ids, strict=True) for a in group]))
        nats = [sum(next(flat) for _ in group) for group in ids]
        close = [[f1(t, e.references) for t in group] for group, e in zip(texts, examples, strict=True)]
        yield {
            "stage": "answers",
            "method": name,
            "texts": texts,
            "nats": [n / sum(map(len, group)) for n, group in zip(nats, ids, strict=True)],
            "distinct-2": [distinct(group, 2) for group in texts],
            "f1": [*map(max, close)],
            "mean f1": [sum(group) / K for group in close],
            "length": [sum(map(len, group)) / K for group in ids],
            "rows": line["rows"],
            "tokens per forward": [TOKENS / n for n in line["passes"]],
        }


TEXT: Row = {"type": "string", "minLength": 3, "maxLength": 40}
KINDS: dict[str, Row] = {  # how a question begins, and the fields of its object
    "Invent a book about": {"title": TEXT, "author": TEXT, "pages": {"type": "integer", "minimum": 1}},
    "Suggest a gift for a person who likes": {"gift": TEXT, "price": {"type": "integer", "minimum": 1}},
    "Write an easy quiz question about": {"question": TEXT, "answer": TEXT},
    "Invent a shop for lovers of": {"name": TEXT, "city": TEXT, "online": {"type": "boolean"}},
    "Invent a film about": {"title": TEXT, "genre": {"enum": ["comedy", "drama", "thriller", "fantasy"]}},
}
THINGS = (
    "bread,cats,the sea,winter,trains,music,chess,gardens,horses,coffee",
    "mountains,birds,old maps,football,the moon,bicycles,cheese,rivers,clocks,painting",
)
FORMED: dict[str, Row] = {"independent": ONE, "tree": {}, "d5p4": {"w": 2, "beta": 100.0, **ONE}}


def objects(device: torch.device, count: int, done: Sequence[Row]) -> Iterator[Row]:
    model, judge = d5p4.load("smol", device, "bfloat16"), causal_base(device, torch.float32)[0]
    parts = [*enumerate(product(KINDS.items(), THINGS))][: -(-count // 10)]
    for (part, ((begin, fields), things)), method, form in product(parts, FORMED, (True, False)):
        line: Row = {"stage": "forms", "method": f"{method}, schema" if form else method, "part": part}
        if any(line.items() <= other.items() for other in done):
            continue
        tail = f"Answer with one JSON object with the fields {', '.join(fields)}."
        asked = [f"{begin} {thing}. {tail}" for thing in things.split(",")]
        schema = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
        given = FORMED[method] | ({"json_schema": json.dumps(schema)} if form else {})
        profile, began = cProfile.Profile(), time.perf_counter()
        result = profile.runcall(generate, model, asked, method=method, k=K, gen_length=48, seed=0, **given)
        stats: Any = pstats.Stats(profile)
        masks = sum(
            x[3]
            for (file, _, name), x in stats.stats.items()
            if (Path(file).name, name) == ("constrained.py", "constrain")
        )
        line |= {"seconds": time.perf_counter() - began, "masks": masks / stats.total_tt, "texts": result.texts}
        line |= {"rows": result.rows.tolist(), "passes": result.nfe.tolist()}
        pairs = [
            [(encode(model, prompt, None), encode(model, text.strip(), False)) for text in texts if text.strip()]
            for prompt, texts in zip(asked, result.texts, strict=True)
        ]
        yield line | {
            "valid": [[valid(text, schema) for text in texts] for texts in result.texts],
            "nats": [sum(judge.nats(own)) for own in pairs],
            "tokens": [sum(len(answer) for _, answer in own) for own in pairs],
        }


def valid(text: str, schema: Row) -> str | None:
    """Return a JSON value of the schema in one way of writing, or None."""
    from jsonschema import Draft202012Validator

    with suppress(ValueError):
        if Draft202012Validator(schema).is_valid(json.loads(text)):
            return canonical(text)
    return None


@torch.no_grad()
def student_nats(model: Any, pairs: Sequence[Pair]) -> Tensor:
    """Return -log p of each answer behind its prompt, decoded from the left.

    One forward of the clean rows keeps their keys and values. In another one, each token is predicted by its own copy
    of its block, in which this token and all tokens behind it are masked.
    """
    clean, row, at = laid_out(pairs, model.mask_id, model.device)
    whole = model.body(clean, None, Context(keep=True))
    first = at // model.block * model.block
    place = first[:, None] + torch.arange(model.block, device=model.device)
    before = clean[row[:, None], place.clamp(max=clean.shape[1] - 1)]
    parts = torch.where(place < at[:, None], before, model.mask_id)
    kv = torch.stack([torch.stack(pair) for pair in whole.kept])
    context = Context(first, (Store(kv, row, first),), whole.states[row, first])
    states = model.body(parts, None, context).states[torch.arange(len(at), device=model.device), at - first]
    head = partial(logits_of, weight=model.head.weight, bias=model.head.bias, banned=model.head.banned)
    return summed_nats(head, states, clean[row, at], row, len(pairs))


def choices(model: Any, teacher: Teacher, data: Path, questions: int | None, seed: int) -> Iterator[Row]:
    student = partial(in_batches, partial(student_nats, model), batch=128)
    models: dict[str, Callable[[Sequence[Pair]], list[float]]] = {"base": teacher.nats, "smol": student}
    for name, file in (
        ("arc-challenge", "arc/ARC-Challenge-Test.jsonl"),
        ("commonsenseqa", "commonsenseqa/dev_rand_split.jsonl"),
    ):
        lines = (data / file).read_text(encoding="utf-8").splitlines()
        asked = [choices_of(json.loads(lines[number])) for number in shuffled(len(lines), seed, name)]
        asked = [record for record in asked if not serves_to_tune(record[0])][:questions]
        pairs, neutral = [], encode(model, NEUTRAL, None)
        for question, options, _ in asked:
            answers = [encode(model, text, False) for text in options.values()]
            before = encode(model, QUESTION.format(question), None)
            pairs += [(start, answer) for start in (before, neutral) for answer in answers]
        for who, nats in models.items():
            values, right = iter(nats(pairs)), []
            for _, options, key in asked:
                given, alone = ([next(values) for _ in options] for _ in range(2))
                gains = [b - a for a, b in zip(given, alone, strict=True)]
                right.append(float(gains.index(max(gains)) == [*options].index(key)))
            chance = [1 / len(options) for _, options, _ in asked]
            yield {"stage": "choices", "task": name, "who": who, "right": right, "chance": chance}


def serves_to_tune(question: str) -> bool:
    """Return whether a question served to choose the rule of the stage choices. One in eight did."""
    return int(hashlib.sha256(question.encode()).hexdigest(), 16) % 8 == 0


def divergence(folder: Path, device: torch.device, data: Path, questions: int, length: int, seed: int) -> Iterator[Row]:
    """Compare smol with its base on answers that the base writes to questions of TruthfulQA."""
    tensors, tokenizer = smol_base()
    config = read_json(folder / "config.json")
    asked = [example.prompt for example in load_task("truthfulqa", data / "truthfulqa", limit=questions).examples]
    given = [Prefix(tokenizer.encode(OPENING + text + "<|im_end|>" + TURN), 1.0, ANSWER) for text in asked]
    teacher = Body(config, tensors, 0, torch.float32).to(device).requires_grad_(False)
    torch.manual_seed(seed)
    rows = Writer(teacher, tokenizer.encode(TURN), length, len(given)).write(given)
    start = np.array([len(prefix.ids) for prefix in given])
    ends = (rows == END) & (np.arange(length) >= start[:, None])
    end = np.where(ends.any(1), ends.argmax(1), length)
    written = Data(rows, start, end, np.ones(len(rows), bool))
    options = {"block": config["bd_size"], "rank": read_json(folder / "adapter_config.json")["r"]}
    options["causal"] = int(config.get("causal_context", False))
    recipe = Smol(device, seed, False, tensors, written, **options)
    sums = recipe.divergences(*recipe.written(folder))
    yield {"stage": "kl", "length": length} | {name: np.round(value, 4).tolist() for name, value in sums.items()}


def times(device: torch.device) -> Iterator[Row]:
    """Measure wall time on a GPU, and on a CPU the time of one thread, so that other users do not count."""
    for dtype in ("float32", "bfloat16"):
        with one_thread(device):
            model, loading = timed(partial(d5p4.load, "smol", device, dtype), device)
            line: Row = {"stage": "time", "dtype": dtype, "load": loading / 1e3}
            plain = partial(d5p4.generate, model, ASKED.split("|")[0], k=K, eos="free", order="left", gen_length=TOKENS)
            for name in ("independent", "tree", "d5p4"):
                ask = partial(plain, method=name, temperature=0.7, **{"beta": 100.0} if name == "d5p4" else {})
                ask(seed=0, gen_length=8 if device.type == "cpu" else TOKENS)  # compiles kernels
                line[name] = min(timed(partial(ask, seed=seed), model.device)[1] for seed in (1, 2)) / 1e3
            if device.type == "cpu":
                line |= parts_of(partial(plain, seed=1))
        yield {key: round(value, 3) if isinstance(value, float) else value for key, value in line.items()}


def parts_of(call: Any) -> dict[str, float]:
    """Return the shares of a call's time: the body of the model, and products with the vocabulary (the head)."""
    profile = cProfile.Profile(time.thread_time)
    profile.runcall(call)
    stats: Any = pstats.Stats(profile)
    spent = {"body": 0.0, "head": 0.0}
    for (file, _, function), (_, _, _, inclusive, _) in stats.stats.items():
        name = {("base.py", "body"): "body", ("vocab.py", "wide_product"): "head"}.get((Path(file).name, function))
        if name is not None:
            spent[name] += inclusive
    return {name: seconds / stats.total_tt for name, seconds in spent.items()}


def variants(options: Any, device: torch.device) -> Iterator[Row]:
    """Train variants on the same rows and yield their figures, except those that the results have already. The first
    run writes the rows, unless the file exists. A variant has its folder beside the results."""
    done = [line for line in read(options.out) if line["stage"] == "variants"]
    for variant in VARIANTS:
        wanted = {"stage": "variants", "steps": options.steps} | variant
        if any(wanted.items() <= line.items() for line in done):
            continue
        say = partial(print, file=sys.stderr, flush=True)
        recipe = smol_recipe(device, options.seed, options.toy, options.data, options.rows, say, **variant)
        folder = options.out.with_suffix("") / "-".join(f"{name}{value}" for name, value in variant.items())
        figures = train(recipe, folder, Budget(steps=options.steps), compiled=device.type == "cuda", say=say)
        sizes = {"rows": len(recipe.learning.rows), "held out": len(recipe.held_out.rows)}
        yield wanted | sizes | figures


def drawn(lines: Sequence[Row]) -> list[Row]:
    """Return the committed results with these lines, without texts, in the place of lines of the same `source`."""
    new = [{name: value for name, value in line.items() if name != "texts"} for line in lines]
    replaced = set(map(source, new))
    return [line for line in read(RESULT) if source(line) not in replaced] + new


def source(line: Row) -> tuple[str, str | None]:
    """Return the stage and, as the lines of a stage may be measured apart, the machine of times or the method."""
    return line["stage"], line["about"]["machine"] if line["stage"] == "time" else line.get("method")


def card(model: Any) -> str:
    """Return Markdown with twenty questions and the first answers of the model's own defaults, unpicked."""
    parts = [
        "Seed 0, the model's own options, at most 64 tokens. The questions were written before the answers were seen."
    ]
    for question in ASKED.replace("\n", "|").split("|"):
        result = d5p4.generate(model, question, k=K, gen_length=TOKENS, seed=0)
        items = (f"{number}. {' '.join(text.split())}" for number, text in enumerate(result.texts[0], 1))
        answers = "\n".join(fill(item, 120, subsequent_indent="   ", break_on_hyphens=False) for item in items)
        parts.append(f"**{question}**\n\n{answers}")
    return "\n\n".join(parts)


# ---- tables


COLUMNS = (
    ("nats per token, base", "nats", 3), ("distinct-2", "distinct-2", 3), ("best F1 of 4", "f1", 3),
    ("mean F1", "mean f1", 3), ("rows", "rows", 0), ("tokens per forward", "tokens per forward", 2),
)  # fmt: skip


def fronts(results: Sequence[Row]) -> str:
    """Return the means of all methods and, of smol's, the quality less that of the base's samples at equal distinct-2:
    that of the best mixture of their settings."""
    rows = [row for row in results if row["stage"] == "answers"]
    line = [row for row in rows if row["method"].startswith("base samples")]
    cells = []
    for row in rows:
        means = [half_width(interval(row[name]), digits) for _, name, digits in COLUMNS]
        cells.append([row["method"], *means, None if not line or row["method"].startswith("base") else gap(row, line)])
    return markdown(["method", *(heading for heading, _, _ in COLUMNS), "nats, less the base"], cells)


def gap(row: Row, line: Sequence[Row]) -> str | None:
    table = np.array([[other["distinct-2"], other["nats"]] for other in [row, *line]])  # [methods, 2, questions]
    points = resampled_means(table.reshape(-1, table.shape[2]).T).reshape(-1, *table.shape[:2])
    values = points[:, 0, 1] - front(points[:, 1:, 0], points[:, 1:, 1], points[:, 0, 0])
    return None if np.isnan(values[0]) else shown(from_resamples(values, table.shape[2]), 3)


def accuracy(results: Sequence[Row]) -> str:
    rows = {(row["task"], row["who"]): row for row in results if row["stage"] == "choices"}
    cells = []
    for task in dict.fromkeys(task for task, _ in rows):
        base, smol = (np.array(rows[task, who]["right"]) for who in ("base", "smol"))
        chance = np.array(rows[task, "base"]["chance"])
        means, kept = resampled_means(np.stack([base, smol, chance], 1)), None
        if figure(base - chance).low > 0:  # otherwise the base knows too little for a share of it
            kept = shown(from_resamples((means[:, 1] - means[:, 2]) / (means[:, 0] - means[:, 2]), len(base)), 0, 100.0)
        shares = [half_width(interval(x), 1, 100.0) for x in (base, smol, smol - base)]
        cells.append([task, len(base), f"{100 * chance.mean():.1f}", *shares, kept])
    heads = ["task", "questions", "chance, %", "base, %", "smol, %", "smol - base, points", "kept above chance, %"]
    return markdown(heads, cells)


def forms(results: Sequence[Row]) -> str:
    cells = []
    for method in dict.fromkeys(row["method"] for row in results if row["stage"] == "forms"):
        lines = [row for row in results if (row["stage"], row.get("method")) == ("forms", method)]
        column = {
            name: [x for line in lines for x in line[name]] for name in ("valid", "nats", "tokens", "rows", "passes")
        }
        answers = [[value for value in values if value is not None] for values in column["valid"]]
        nats = shown(ratio_figure(column["nats"], column["tokens"]), 2)
        share, different = interval([len(x) / K for x in answers]), interval([len({*x}) for x in answers])
        shares = half_width(share, 1, 100), half_width(different, 2)
        masks = [line["masks"] for line in lines if line.get("masks")]
        cost = f"{np.mean(column['rows']):.0f}", f"{np.mean(column['passes']):.0f}"
        cells.append([method, len(answers), *shares, nats, *cost, f"{100 * np.mean(masks):.1f}" if masks else None])
    heads = ["method", "questions", "valid, %", "different valid of 4", "nats per token, base", "rows", "passes"]
    return markdown([*heads, "masks, % of time"], cells)


def offsets(results: Sequence[Row]) -> str:
    """Return KL by offset in the block, of the last measurement."""
    last = [row for row in results if row["stage"] == "kl"][-1]
    kl, tokens, entropy = (np.array(last[name]) for name in ("kl", "tokens", "entropy"))
    count = tokens.sum(1)
    cells = [
        [i, f"{int(tokens[:, i].sum()):,}", shown(ratio_figure(kl[:, i], tokens[:, i]), 3)] for i in range(kl.shape[1])
    ]
    cells += [["all", f"{int(count.sum()):,}", shown(ratio_figure(kl.sum(1), count), 3)]]
    cells += [["entropy of the base", f"{int(count.sum()):,}", shown(ratio_figure(entropy.sum(1), count), 3)]]
    return markdown(["offset in the block", "tokens", "KL, nats per token"], cells)


def compared(results: Sequence[Row]) -> str:
    names = ["block", "causal", "rank", "steps", "KL per token", "KL at offset 0", "KL at offset 1", "KL at offset 7"]
    cells = [[row[name] for name in names] for row in results if row["stage"] == "variants"]
    return markdown(names, cells)


def seconds(results: Sequence[Row]) -> str:
    rows = [row for row in results if row["stage"] == "time"]
    names = ["load", "independent", "tree", "d5p4"]
    cells = [
        [row["about"]["machine"], row["dtype"], *map(row.get, names), *(percent(row.get(p)) for p in ("body", "head"))]
        for row in rows
    ]
    return markdown(["device", "dtype", *(f"{name}, s" for name in names), "body, %", "head, %"], cells)


def percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.0f}"


def tables(results: Sequence[Row]) -> Tables:
    return {draw.__name__: partial(draw, results) for draw in (fronts, accuracy, forms, offsets, compared, seconds)}


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("smol", __doc__, Path("out/smol.jsonl"))
    parser.add_argument("--data", type=Path, help="the folder with truthfulqa, arc and commonsenseqa")
    parser.add_argument("--stage", action="append", choices=STAGES, required=True, help="may be repeated")
    parser.add_argument("--questions", type=int, help="default: all; 96 are enough for kl and answers")
    parser.add_argument("--methods", default="", help="answers: only methods whose names match this expression")
    parser.add_argument("--length", type=int, default=320, help="kl: tokens per row, a multiple of the block")
    parser.add_argument("--rows", type=Path, help="variants: the file of rows")
    parser.add_argument("--steps", type=int, default=150, help="variants: steps per run")
    parser.add_argument("--toy", action="store_true", help="variants: tiny models, to test that everything runs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    origin = about(choose_device(options.device), ["bench", "smol", *arguments])
    for stage in options.stage:
        lines = read(options.out)
        if stage == "draw":
            write(RESULT, drawn(lines))
        elif stage == "card":
            page = find("smol") / "README.md"
            text = page.read_text(encoding="utf-8").split("## Twenty questions")[0]
            page.write_text(
                f"{text}## Twenty questions\n\n{card(d5p4.load('smol', options.device))}\n", encoding="utf-8"
            )
        else:
            for line in run(stage, options):
                lines.append(line | {"about": origin})
                write(options.out, lines)
                print(json.dumps({name: summary(value) for name, value in line.items()}), flush=True)


def summary(value: Any) -> Any:
    """Return a value or, for a list, the mean of its numbers or the number of its entries."""
    if not isinstance(value, list):
        return value
    return round(float(np.mean(value)), 4) if value and not isinstance(np.ravel(value)[0], str) else len(value)


def run(stage: str, options: Any) -> Iterator[Row]:
    device = choose_device(options.device)
    needed = {"time": None, "forms": None, "variants": "rows"}.get(stage, "data")
    if needed and getattr(options, needed) is None:
        raise d5p4.D5P4Error(f"the stage {stage} needs --{needed}")
    if stage == "time":
        return times(device)
    if stage == "forms":
        return objects(device, options.questions or 100, read(options.out))
    if stage == "variants":
        return variants(options, device)
    if stage == "kl":
        return divergence(find("smol"), device, options.data, options.questions, options.length, options.seed)
    model = d5p4.load("smol", device, "float32")
    base = causal_base(device, torch.float32)[0]
    if stage == "answers":
        return answers(model, base, options.data, options.questions, options.seed, options.methods)
    return choices(model, base, options.data, options.questions, options.seed)
