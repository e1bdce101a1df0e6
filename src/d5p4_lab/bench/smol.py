"""What smol can do beside its base, SmolLM2-135M-Instruct.

    python -m d5p4_lab bench smol --data FOLDER --stage kl --stage choices --stage answers --stage time --stage draw

kl        KL(base || smol decoded from the left) per token, on answers at temperature 1 that the base writes to
          questions of TruthfulQA. No model has seen these questions. --length cuts the rows
choices   accuracy on ARC-Challenge and CommonsenseQA: the choice that the question makes likelier by the largest
          factor, p(choice | question) / p(choice | a request to answer), by the exact chain of probabilities from the
          left. The rule was chosen for the base on one question in eight, and these questions are not reported
answers   four answers to each of some questions of TruthfulQA, by methods and temperatures: smol (from the left, one
          token per step unless named) and its base (plain samples and stochastic beam search)
time      seconds to load smol and to give four answers of 64 tokens, and which part of them the model takes
variants  KL of short training runs on the same data: blocks of 8, 16 and 32, attention inside clean blocks causal or
          not, rank 16 and 32. --steps counts steps per run. --rows is the file of rows; if it does not exist, the
          base writes it (--data: gsm8k and books, as in `train smol`). The same command continues after a stop
card      twenty questions with four answers each, written into smol's card
draw      the figures without texts, from --out, and the log of the shipped weights into the committed results, where
          they replace older lines of the same stages

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
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import torch
from torch import Tensor

import d5p4
from d5p4.eval.lexical import distinct, f1
from d5p4.models.checkpoint import read_json
from d5p4.models.load import choose_device, find
from d5p4.ops.vocab import logits_of
from d5p4.prompts import encode
from d5p4.types import Context, Store

from ..paper.tasks import choices_of, load_task, shuffled
from ..provenance import about
from ..statistics import figure, from_resamples, front, interval, ratio_figure, resampled_means
from ..tables import Row, Tables, half_width, markdown, shown
from ..timing import one_thread, timed
from ..train.loop import LOG, LOG_STEPS, Budget, train
from ..train.smol import Body, Smol
from ..train.smol import base as smol_base
from ..train.smol import recipe as smol_recipe
from ..train.smol_data import ANSWER, END, OPENING, TURN, Data, Prefix, Writer
from . import RESULTS, make_parser, read, write

K, TOKENS = 4, 64
STAGES = ("kl", "choices", "answers", "time", "variants", "card", "draw")
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
LEFT: dict[str, Any] = {"order": "left", "gen_length": TOKENS}
ONE = {"reveal": "threshold", "tau": 1.0}  # one token per step, and prompts of all lengths decode together
SURE = {"reveal": "threshold", "tau": 0.9}
D5P4 = {"method": "d5p4", "w": 4}
METHODS: dict[str, dict[str, Any]] = {
    **{f"independent, T {t:g}": {"method": "independent", "temperature": t} for t in (0.5, 0.7, 0.85, 1.0)},
    **{f"independent, T 1, top-p {p}": {"method": "independent", "temperature": 1.0, "top_p": p} for p in (0.8, 0.9)},
    **{f"d5p4, T 0.7, beta {b:g}": {**D5P4, "temperature": 0.7, "beta": b} for b in (20.0, 100.0)},
    "d5p4, T 1, top-p 0.8, beta 100": {**D5P4, "temperature": 1.0, "top_p": 0.8, "beta": 100.0},
    "tree, T 0.7": {"method": "tree", "temperature": 0.7},
    "independent, T 0.7, threshold 0.9": {"method": "independent", "temperature": 0.7, **SURE},
    "independent, T 0.5, threshold 0.9": {"method": "independent", "temperature": 0.5, **SURE},
}
CAUSAL: dict[str, dict[str, Any]] = {
    **{f"samples, T {t:g}": {"temperature": t} for t in (0.5, 0.7, 0.85, 1.0)},
    **{f"samples, T 1, top-p {p}": {"temperature": 1.0, "top_p": p} for p in (0.8, 0.9)},
    **{f"stochastic beam search, T {t:g}": {"temperature": t, "beam": True} for t in (0.7, 1.0)},
}


# ---- the teacher as a causal model

Pair = tuple[list[int], list[int]]  # the tokens of a prompt and of an answer


class Teacher:
    """The causal model, with keys and values kept."""

    def __init__(self, body: Body) -> None:
        self.body, self.device = body.requires_grad_(False), body.table.device

    def run(self, tokens: Tensor, kept: Any, first: int, real: Tensor) -> Tensor:
        """Run tokens [R, S] from a position on and return the log-probabilities [R, V] of the next token. `real` [R, T]
        is False at padding on the left, which changes nothing but the positions, and these matter by differences."""
        at = torch.arange(first, first + tokens.shape[1], device=self.device)
        place = torch.arange(int(at[-1]) + 1, device=self.device)
        mask = (place <= at[:, None]) & real[:, None, : len(place)] | (place == at[:, None])
        seen = [(key[:, :, : len(place)], value[:, :, : len(place)]) for key, value in kept]
        return self.body.logits(self.body(tokens, at, mask[:, None], seen)[:, -1]).log_softmax(-1)

    def answers(
        self, prompts: Sequence[list[int]], seed: int, batch: int = 32, **options: Any
    ) -> Iterator[list[list[int]]]:
        """Yield K answers to each prompt: samples, or with `beam` the beams of stochastic beam search."""
        for low in range(0, len(prompts), batch):
            yield from self._answers(prompts[low : low + batch], seed + low, **options)

    @torch.no_grad()
    def _answers(
        self, prompts: Sequence[list[int]], seed: int, temperature: float, top_p: float = 1.0, beam: bool = False
    ) -> list[list[list[int]]]:
        draw = torch.Generator(self.device).manual_seed(seed)
        longest, shape = max(map(len, prompts)), (len(prompts), K, -1)
        padded = [[END] * (longest - len(ids)) + ids for ids in prompts for _ in range(K)]
        missing = torch.tensor([longest - len(ids) for ids in prompts for _ in range(K)], device=self.device)
        real = torch.arange(longest + TOKENS, device=self.device) >= missing[:, None]
        kept = self.body.new_cache(len(padded), longest + TOKENS)
        scores = self.run(torch.tensor(padded, device=self.device), kept, 0, real)
        rows = torch.empty(len(padded), 0, dtype=torch.long, device=self.device)
        logp, noisy = torch.zeros(2, *shape[:2], device=self.device)
        first = torch.arange(len(prompts), device=self.device)[:, None] * K
        for step in range(TOKENS):
            scores = cut(scores / temperature, top_p)
            only_end = torch.full_like(scores[:1], -torch.inf)
            only_end[:, END] = 0.0
            scores = torch.where((rows == END).any(1, keepdim=True), only_end, scores).view(shape)
            uniform = torch.rand(scores.shape, generator=draw, device=self.device).clamp(1e-12, 1 - 1e-7)
            gumbel = -(-uniform.log()).log()
            if beam:
                logp, noisy, parent, token = search_step(logp, noisy, scores, gumbel, step == 0)
                chosen = (first + parent).flatten()
                rows, kept = rows[chosen], [(key[chosen], value[chosen]) for key, value in kept]
            else:
                token = (scores + gumbel).argmax(-1)
            rows = torch.cat([rows, token.view(-1, 1)], 1)
            if step + 1 < TOKENS:
                scores = self.run(token.view(-1, 1), kept, longest + step, real)
        ended = [row[: row.index(END) + 1] if END in row else row for row in rows.tolist()]
        return [ended[i : i + K] for i in range(0, len(ended), K)]

    def nats(self, pairs: Sequence[Pair], batch: int = 128) -> list[float]:
        """Return -log p of each answer behind its prompt. Padding on the right changes nothing in a causal model."""
        return in_batches(self._nats, pairs, batch)

    @torch.no_grad()
    def _nats(self, pairs: Sequence[Pair]) -> Tensor:
        tokens, row, place = laid_out(pairs, END, self.device)
        at = torch.arange(tokens.shape[1], device=self.device)
        states = self.body(tokens, at, (at[:, None] >= at)[None, None])[row, place - 1]
        return summed_nats(self.body.logits, states, tokens[row, place], row, len(pairs))


def in_batches(sums: Callable[[Sequence[Pair]], Tensor], pairs: Sequence[Pair], batch: int) -> list[float]:
    """Return a number per pair of prompt and answer. Pairs of similar length share a batch."""
    order = sorted(range(len(pairs)), key=lambda i: sum(map(len, pairs[i])))
    numbers = torch.zeros(len(pairs), dtype=torch.float64)
    for first in range(0, len(order), batch):
        part = order[first : first + batch]
        numbers[part] = sums([pairs[i] for i in part]).cpu()
    return numbers.tolist()


def laid_out(pairs: Sequence[Pair], padding: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of tokens, padded on the right, and the row and the position of every token of an answer."""
    ends = torch.tensor([sum(map(len, pair)) for pair in pairs])
    starts, place = torch.tensor([len(before) for before, _ in pairs]), torch.arange(int(ends.max()))
    tokens = torch.tensor(
        [[*before, *answer] + [padding] * (len(place) - len(before) - len(answer)) for before, answer in pairs]
    )
    row, at = ((place >= starts[:, None]) & (place < ends[:, None])).nonzero(as_tuple=True)
    return tokens.to(device), row.to(device), at.to(device)


def summed_nats(
    logits: Callable[[Tensor], Tensor], states: Tensor, tokens: Tensor, owner: Tensor, count: int
) -> Tensor:
    """Return the sums [count] of -log p of tokens [M] by their owner. The states [M, D] predict the tokens."""
    sums = torch.zeros(count, dtype=torch.float64, device=states.device)
    for state, token, own in zip(states.split(4096), tokens.split(4096), owner.split(4096), strict=True):
        sums.index_add_(0, own, -logits(state).log_softmax(-1).gather(1, token[:, None])[:, 0].double())
    return sums


def search_step(
    logp: Tensor, noisy: Tensor, scores: Tensor, gumbel: Tensor, first: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take a step of stochastic beam search (Kool et al., 2019) over scores [Q, K, V]: the K children [Q, K] with the
    largest values. Their values are Gumbel draws around their log-probability, given that the largest value of the
    children is the parent's. Return log-probabilities, values, parents and tokens."""
    total = logp[..., None] + scores
    value = total + gumbel
    if first:
        value[:, 1:] = -torch.inf  # all beams are the same at the start
    else:
        largest = value.amax(-1, keepdim=True)
        below = (value - largest).exp().clamp(max=1.0)
        inner = noisy[..., None] - value + torch.log1p(-below)  # minus infinity at the largest value
        value = noisy[..., None] - inner.clamp(min=0) - torch.log1p((-inner.abs()).exp())
        value[total == -torch.inf] = -torch.inf
    noisy, flat = value.flatten(1).topk(value.shape[1])
    parent, token = flat // value.shape[2], flat % value.shape[2]
    return total.flatten(1).gather(1, flat), noisy, parent, token


def cut(scores: Tensor, top_p: float) -> Tensor:
    """Return log-probabilities of the likeliest tokens with a mass of at least `top_p`."""
    scores = scores.log_softmax(-1)
    if top_p < 1:
        ordered, order = scores.sort(-1, descending=True)
        outside = ordered.exp().cumsum(-1) - ordered.exp() >= top_p
        scores = scores.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), -torch.inf).log_softmax(-1)
    return scores


# ---- stages


def answers(model: Any, teacher: Teacher, data: Path, questions: int | None, seed: int, methods: str) -> Iterator[Row]:
    task = load_task("truthfulqa", data / "truthfulqa", limit=questions)
    asked = [encode(model, example.prompt, None) for example in task.examples]
    for name, options in chosen_methods(CAUSAL, methods):
        texts = [*teacher.answers(asked, seed, 512 if model.device.type == "cuda" else 32, **options)]
        rows = [K * TOKENS if "beam" in options else sum(map(len, group)) for group in texts]
        yield record("base", name, task, model, teacher, asked, texts, rows, [1.0] * len(asked))
    for name, options in chosen_methods(METHODS, methods):
        together = {} if name.startswith("tree") else ONE
        asking = partial(d5p4.generate, model, [e.prompt for e in task.examples], max_tokens_per_forward=1 << 17)
        result = asking(k=K, seed=seed, **LEFT | together | options)
        ends = [[[*a, END] if len(a) < TOKENS else list(a) for a in group] for group in result.answers]
        speed = [TOKENS / n for n in result.nfe.tolist()]
        yield record("smol", name, task, model, teacher, asked, ends, result.rows.tolist(), speed)


def chosen_methods(known: dict[str, dict[str, Any]], wanted: str) -> list[tuple[str, dict[str, Any]]]:
    return [(name, options) for name, options in known.items() if re.search(wanted, name)]


def record(
    who: str, name: str, task: Any, model: Any, teacher: Teacher, asked: Any, ids: Any, rows: Any, speed: Any
) -> dict[str, Any]:
    """Return one line of figures per question, for one method."""
    texts = [[model.tokenizer.decode([t for t in a if t != END]).strip() for a in group] for group in ids]
    flat = iter(teacher.nats([(p, a) for p, group in zip(asked, ids, strict=True) for a in group]))
    nats = [[next(flat) for _ in group] for group in ids]
    columns = {
        "nats": [sum(n) / sum(map(len, group)) for n, group in zip(nats, ids, strict=True)],
        "distinct-2": [distinct(group, 2) for group in texts],
        "f1": [max(f1(t, e.references) for t in group) for group, e in zip(texts, task.examples, strict=True)],
        "mean f1": [sum(f1(t, e.references) for t in group) / K for group, e in zip(texts, task.examples, strict=True)],
        "length": [sum(map(len, group)) / K for group in ids],
        "rows": rows,
        "tokens per forward": speed,
    }
    return {
        "stage": "answers",
        "who": who,
        "method": name,
        "texts": texts,
    } | columns


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
            for name in ("independent, T 0.7", "tree, T 0.7", "d5p4, T 0.7, beta 100"):
                ask = partial(d5p4.generate, model, ASKED.split("|")[0], k=K, eos="free", **LEFT | METHODS[name])
                ask(seed=0, gen_length=8 if device.type == "cpu" else TOKENS)  # compiles kernels
                line[name.split(",")[0]] = min(timed(partial(ask, seed=seed), model.device)[1] for seed in (1, 2)) / 1e3
            if device.type == "cpu":
                line |= parts_of(partial(d5p4.generate, model, ASKED.split("|")[0], k=K, eos="free", seed=1, **LEFT))
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
        yield wanted | sizes | figures | {"losses": losses(folder)}


def losses(folder: Path) -> list[float]:
    """Return the mean loss of every LOG_STEPS steps of a training run."""
    return [line["loss"] for line in read(folder / LOG) if "loss" in line]


def drawn(lines: Sequence[Row]) -> list[Row]:
    """Return the committed results with these lines, without texts, in the place of lines of the same stage (and
    machine, if they are times), and with the log of the shipped weights."""
    shipped = read(find("smol") / LOG)
    if shipped:
        lines = [*lines, {"stage": "training", "losses": losses(find("smol")), **shipped[-1]}]
    new = [{name: value for name, value in line.items() if name != "texts"} for line in lines]
    replaced = set(map(source, new))
    return [line for line in read(RESULT) if source(line) not in replaced] + new


def source(line: Row) -> tuple[str, str | None]:
    return line["stage"], line["about"]["machine"] if line["stage"] == "time" else None


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
    line = [row for row in rows if row["who"] == "base" and "samples" in row["method"]]
    cells = []
    for row in rows:
        means = [half_width(interval(row[name]), digits) for _, name, digits in COLUMNS]
        cells.append([row["who"], row["method"], *means, gap(row, line) if row["who"] == "smol" and line else None])
    return markdown(["model", "method", *(heading for heading, _, _ in COLUMNS), "nats, less the base"], cells)


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


def training(results: Sequence[Row]) -> str:
    """Return the losses of the shipped weights' training at about eight steps."""
    values: list[float] = next((row["losses"] for row in results if row["stage"] == "training"), [])
    shown = range(len(values) - 1, -1, -max(1, len(values) // 8))
    cells = [[f"{LOG_STEPS * i + 1:,} to {LOG_STEPS * (i + 1):,}", values[i]] for i in reversed(shown)]
    return markdown(["steps", "mean loss"], cells)


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
    return {draw.__name__: partial(draw, results) for draw in (fronts, accuracy, offsets, compared, training, seconds)}


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
    needed = {"time": None, "variants": "rows"}.get(stage, "data")
    if needed and getattr(options, needed) is None:
        raise d5p4.D5P4Error(f"the stage {stage} needs --{needed}")
    if stage == "time":
        return times(device)
    if stage == "variants":
        return variants(options, device)
    if stage == "kl":
        return divergence(find("smol"), device, options.data, options.questions, options.length, options.seed)
    model = d5p4.load("smol", device, "float32")
    base = Teacher(Body(read_json(find("smol") / "config.json"), smol_base()[0], 0, torch.float32).to(device))
    if stage == "answers":
        return answers(model, base, options.data, options.questions, options.seed, options.methods)
    return choices(model, base, options.data, options.questions, options.seed)
