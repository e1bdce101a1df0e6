"""What smol can do beside its base, SmolLM2-135M-Instruct.

    python -m d5p4_lab bench smol --data FOLDER --stage answers --stage choices --stage time

answers   four answers to each of some questions of TruthfulQA, by methods and temperatures: smol (from the left, one
          token per step unless named) and its base (plain samples and stochastic beam search)
choices   accuracy on ARC-Challenge and CommonsenseQA: the choice with the largest mean log-probability per token, by
          the exact chain of probabilities from the left
judge     nats per token of the answers behind their questions, by a judge that neither model has seen (--judge)
time      seconds to load smol and to give four answers of 64 tokens
card      twenty questions with four answers each, written into smol's card
draw      the figures without texts, from --out into the committed results

Quality is the base's nats per token in float32, with the end token if the answer has ended. This flatters the base.
Difference is distinct-2, and the overlap of the words of two answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import d5p4
from d5p4.eval.lexical import distinct, f1
from d5p4.models.checkpoint import read_json
from d5p4.models.load import choose_device, find
from d5p4.prompts import encode

from ..paper.tasks import choices_of, load_task
from ..provenance import about
from ..scoring.perplexity import CausalJudge
from ..statistics import from_resamples, interval, resampled_means
from ..tables import Row, Tables, half_width, markdown, shown
from ..timing import wall
from ..train.smol import Body
from ..train.smol import base as smol_base
from ..train.smol_data import END
from . import RESULTS, make_parser, read, write

K, TOKENS, QUESTIONS = 4, 64, 96
STAGES = ("answers", "choices", "judge", "time", "card", "draw")
RESULT = RESULTS / "smol.jsonl.xz"
ASKED = """Name a good use for an old door.|Why do cats purr?|What should I cook with two eggs and some rice?
Write a two-line poem about the sea.|How can I fall asleep faster?|What is a black hole?
Give me a name for a small bakery.|Why is the sky blue?|Tell me a joke about a dentist.
What is the capital of Australia?|How do I say no to a friend politely?|Describe autumn in one sentence.
What is 17 plus 25?|Why did the Roman Empire fall?|Suggest a hobby for a rainy day.|What does a librarian do?
Write the first sentence of a detective story.|How are rainbows made?|What is a healthy breakfast?
Explain money to a child."""
LEFT: dict[str, Any] = {"order": "left", "gen_length": TOKENS}
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
    **{f"stochastic beam search, T {t:g}": {"temperature": t, "beam": 1} for t in (0.7, 1.0)},
}


# ---- the teacher as a causal model


class Teacher:
    """The causal model, with keys and values kept."""

    def __init__(self, tensors: dict[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
        self.body = Body(read_json(find("smol") / "config.json"), tensors, 0, dtype).to(device).requires_grad_(False)
        self.device = device

    def run(self, tokens: Tensor, kept: Any, first: int) -> Tensor:
        """Run tokens [R, S] from a position on and return the log-probabilities [R, V] of the next token."""
        at = torch.arange(first, first + tokens.shape[1], device=self.device)
        mask = (torch.arange(first + tokens.shape[1], device=self.device) <= at[:, None])[None, None]
        seen = [(key[:, :, : len(mask[0, 0, 0])], value[:, :, : len(mask[0, 0, 0])]) for key, value in kept]
        return self.body.logits(self.body(tokens, at, mask, seen)[:, -1]).log_softmax(-1)

    @torch.no_grad()
    def answers(
        self, prompt: list[int], seed: int, temperature: float, top_p: float = 1.0, beam: int = 0
    ) -> list[list[int]]:
        """Return K answers: samples, or the K beams of stochastic beam search, which are samples without repeats."""
        draw = torch.Generator(self.device).manual_seed(seed)
        kept = self.body.new_cache(K, len(prompt) + TOKENS)
        scores = self.run(torch.tensor([prompt] * K, device=self.device), kept, 0)
        rows = torch.empty(K, 0, dtype=torch.long, device=self.device)
        logp, noisy = torch.zeros(2, K, device=self.device)
        for step in range(TOKENS):
            scores = cut(scores / temperature, top_p)
            ended = (rows == END).any(1) if step else torch.zeros(K, dtype=torch.bool, device=self.device)
            only_end = torch.full_like(scores, -torch.inf)
            only_end[:, END] = 0.0
            scores = torch.where(ended[:, None], only_end, scores)
            uniform = torch.rand(scores.shape, generator=draw, device=self.device).clamp(1e-12, 1 - 1e-7)
            gumbel = -(-uniform.log()).log()
            if beam:
                total = logp[:, None] + scores  # log-probabilities of the children
                value = total + gumbel
                largest = value.amax(1, keepdim=True)  # conditioned on the maximum, which is the parent's own value
                if step == 0:
                    value[1:] = -torch.inf
                else:
                    inner = noisy[:, None] - value + torch.log1p(-(value - largest).clamp(max=-1e-7).exp())
                    value = noisy[:, None] - inner.clamp(min=0) - torch.log1p((-inner.abs()).exp())
                    value[total == -torch.inf] = -torch.inf
                noisy, flat = value.flatten().topk(K)
                parent, token = flat // scores.shape[1], flat % scores.shape[1]
                logp = total[parent, token]
                rows = rows[parent]
                kept = [(key[parent].contiguous(), value[parent].contiguous()) for key, value in kept]
            else:
                token = (scores + gumbel).argmax(1)
            rows = torch.cat([rows, token[:, None]], 1)
            if step + 1 < TOKENS:
                scores = self.run(token[:, None], kept, len(prompt) + step)
        return [row[: row.index(END) + 1] if END in row else row for row in rows.tolist()]

    @torch.no_grad()
    def nats(self, pairs: Sequence[tuple[list[int], list[int]]], batch: int = 128) -> list[float]:
        """Return -log p of each answer behind its prompt. Padding on the right changes nothing in a causal model."""
        nats = [0.0] * len(pairs)
        order = sorted(range(len(pairs)), key=lambda i: sum(map(len, pairs[i])))
        for first in range(0, len(order), batch):
            part = order[first : first + batch]
            rows = [pairs[i][0] + pairs[i][1] for i in part]
            at = torch.arange(max(map(len, rows)), device=self.device)
            tokens = torch.tensor([row + [END] * (len(at) - len(row)) for row in rows], device=self.device)
            states = self.body(tokens, at, (at[:, None] >= at)[None, None])
            for i, row, state in zip(part, tokens, states, strict=True):
                start, end = len(pairs[i][0]), sum(map(len, pairs[i]))
                scores = self.body.logits(state[start - 1 : end - 1]).log_softmax(-1).double()
                nats[i] = -float(scores.gather(1, row[start:end, None]).sum())
        return nats


def cut(scores: Tensor, top_p: float) -> Tensor:
    """Return log-probabilities of the likeliest tokens with a mass of at least `top_p`."""
    scores = scores.log_softmax(-1)
    if top_p < 1:
        ordered, order = scores.sort(-1, descending=True)
        outside = ordered.exp().cumsum(-1) - ordered.exp() >= top_p
        scores = scores.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), -torch.inf).log_softmax(-1)
    return scores


# ---- stages


def answers(model: Any, teacher: Teacher, data: Path, questions: int, seed: int) -> Iterator[Row]:
    task = load_task("truthfulqa", data / "truthfulqa", limit=questions)
    asked = [encode(model, example.prompt, None) for example in task.examples]
    for name, options in CAUSAL.items():
        texts = [teacher.answers(ids, seed * 10_000 + i, **options) for i, ids in enumerate(asked)]
        rows = [K * TOKENS if "beam" in options else sum(map(len, group)) for group in texts]
        yield record("base", name, task, model, teacher, asked, texts, rows, [1.0] * len(asked))
    for name, options in METHODS.items():
        result = d5p4.generate(
            model, [e.prompt for e in task.examples], k=K, seed=seed, max_tokens_per_forward=1 << 17, **LEFT | options
        )
        ends = [[[*a, END] if len(a) < TOKENS else list(a) for a in group] for group in result.answers]
        speed = [TOKENS / n for n in result.nfe.tolist()]
        yield record("smol", name, task, model, teacher, asked, ends, result.rows.tolist(), speed)


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
        "overlap": [overlap(group) for group in texts],
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
        "prompts": [e.prompt for e in task.examples],
    } | columns


def overlap(texts: Sequence[str]) -> float:
    """Return the mean share of common words of two texts (Jaccard)."""
    words = [set(text.lower().split()) for text in texts]
    pairs = [(a, b) for i, a in enumerate(words) for b in words[:i]]
    return sum(len(a & b) / max(1, len(a | b)) for a, b in pairs) / max(1, len(pairs))


@torch.no_grad()
def student_chain(model: Any, items: Sequence[tuple[list[int], list[int]]], batch: int = 512) -> list[float]:
    """Return the mean log-probability per token of each answer from the left: one masked suffix per token."""
    block, rows = model.block, []
    for number, (before, answer) in enumerate(items):
        for j, token in enumerate(answer):
            clean = before + answer[:j]
            rows.append(([*clean, *[model.mask_id] * (block - len(clean) % block)], len(clean), token, number))
    totals = np.zeros(len(items))
    for length in sorted({len(row[0]) for row in rows}):
        same = [row for row in rows if len(row[0]) == length]
        for first in range(0, len(same), batch):
            part = same[first : first + batch]
            states = model.body(torch.tensor([row[0] for row in part], device=model.device)).states
            chosen = states[torch.arange(len(part)), [row[1] for row in part]].float()
            head = model.head
            scores = (chosen @ head.weight.float().T).masked_fill(head.banned, -torch.inf).log_softmax(-1)
            values = scores.gather(1, torch.tensor([[row[2]] for row in part], device=model.device))[:, 0].cpu().numpy()
            np.add.at(totals, [row[3] for row in part], values)
    return [float(t) / len(a) for t, (_, a) in zip(totals, items, strict=True)]


def choices(model: Any, teacher: Teacher, data: Path) -> Iterator[Row]:
    for name, file in (
        ("arc-challenge", "arc/ARC-Challenge-Test.jsonl"),
        ("commonsenseqa", "commonsenseqa/dev_rand_split.jsonl"),
    ):
        records = [json.loads(line) for line in (data / file).read_text(encoding="utf-8").splitlines()]
        items: list[tuple[list[int], list[int]]] = []
        groups: list[range] = []
        gold: list[int] = []
        for question, options, key in map(choices_of, records):
            groups.append(range(len(items), len(items) + len(options)))
            gold.append([*options].index(key))
            before = encode(model, question, None)
            items += [(before, encode(model, text, False)) for text in options.values()]
        teachers = [-n / len(a) for n, (_, a) in zip(teacher.nats(items), items, strict=True)]
        for who, scores in (("base", teachers), ("smol", student_chain(model, items))):
            right = [float(max(g, key=lambda i: scores[i]) == g[t]) for g, t in zip(groups, gold, strict=True)]
            chance = [1 / len(g) for g in groups]
            yield {"stage": "choices", "task": name, "who": who, "right": right, "chance": chance}


def judged(judge: CausalJudge, line: Row) -> list[float]:
    """Return nats per token of the answers to each question, given the question."""
    starts = [f"Question: {prompt}\nAnswer:" for prompt in line["prompts"] for _ in range(K)]
    texts = [
        f"{start} {text}" for start, text in zip(starts, (t for group in line["texts"] for t in group), strict=True)
    ]
    whole, before = judge.score(texts), judge.score(starts)
    nats, counts = whole.nats - before.nats, np.maximum(whole.tokens - before.tokens, 1)
    return (nats.reshape(-1, K).sum(1) / counts.reshape(-1, K).sum(1)).tolist()


def times(device: str | None) -> Iterator[Row]:
    for dtype in ("float32", "bfloat16"):
        model, loading = wall(partial(d5p4.load, "smol", device, dtype), torch.device("cpu"))
        line: Row = {"stage": "time", "dtype": dtype, "load": round(loading, 2)}
        for name in ("independent, T 0.7", "tree, T 0.7", "d5p4, T 0.7, beta 100"):
            decode = partial(d5p4.generate, model, ASKED.split("|")[0], k=K, eos="free", **LEFT | METHODS[name])
            times = [wall(partial(decode, seed=seed), model.device)[1] for seed in range(3)]
            line[name.split(",")[0]] = round(min(times[1:]), 2)  # the first call warms up
        yield line


def card(model: Any) -> str:
    """Return Markdown with twenty questions and the first answers of the model's own defaults, unpicked."""
    parts = [
        "Seed 0, the model's own options, at most 64 tokens. The questions were written before the answers were seen."
    ]
    for question in ASKED.replace("\n", "|").split("|"):
        result = d5p4.generate(model, question, k=K, gen_length=TOKENS, seed=0)
        answers = "\n".join(f"{i}. {' '.join(text.split())}" for i, text in enumerate(result.texts[0], 1))
        parts.append(f"**{question}**\n\n{answers}")
    return "\n\n".join(parts)


# ---- tables


def columns_of(results: Sequence[Row]) -> list[tuple[str, str, int]]:
    outside = [("nats, outside judge", "outside", 3)] if any("outside" in row for row in results) else []
    return [
        ("nats per token, base", "nats", 3), *outside, ("distinct-2", "distinct-2", 3), ("overlap", "overlap", 3),
        ("best F1 of 4", "f1", 3), ("rows", "rows", 0), ("tokens per forward", "tokens per forward", 2),
    ]  # fmt: skip


def fronts(results: Sequence[Row]) -> str:
    rows = [row for row in results if row["stage"] == "answers"]
    columns = columns_of(rows)
    cells = [
        [row["who"], row["method"], *(half_width(interval(row[c]), d) if c in row else None for _, c, d in columns)]
        for row in rows
    ]
    return markdown(["model", "method", *(heading for heading, _, _ in columns)], cells)


def gaps(results: Sequence[Row]) -> str:
    """Return smol's nats minus the base's at equal distinct-2, on the line through the base's samples."""
    rows = [row for row in results if row["stage"] == "answers"]
    line = [row for row in rows if row["who"] == "base" and re.fullmatch(r"samples, T [\d.]+", row["method"])]
    cells = []
    for row in (row for row in rows if row["who"] == "smol"):
        cells.append([row["method"], gap(row, line, "nats"), gap(row, line, "outside")])
    return markdown(["smol's method", "minus the base, nats of the base", "nats of the outside judge"], cells)


def gap(row: Row, line: Sequence[Row], name: str) -> str | None:
    """Return a gap in nats at equal distinct-2, with an interval over questions."""
    if any(name not in other for other in [row, *line]):
        return None
    table = np.array([[other["distinct-2"], other[name]] for other in [row, *line]])  # [methods, 2, questions]
    values = []
    for points in resampled_means(table.transpose(2, 0, 1).reshape(table.shape[2], -1)).reshape(-1, *table.shape[:2]):
        order = points[1:, 0].argsort()
        values.append(points[0, 1] - np.interp(points[0, 0], points[1:, 0][order], points[1:, 1][order]))
    return shown(from_resamples(values, table.shape[2]), 3)


def accuracy(results: Sequence[Row]) -> str:
    rows = {(row["task"], row["who"]): row for row in results if row["stage"] == "choices"}
    cells = []
    for task in dict.fromkeys(task for task, _ in rows):
        base, smol = (np.array(rows[task, who]["right"]) for who in ("base", "smol"))
        chance = np.array(rows[task, "base"]["chance"])
        means = resampled_means(np.stack([base, smol, chance], 1))
        kept = from_resamples((means[:, 1] - means[:, 2]) / (means[:, 0] - means[:, 2]), len(base))
        shares = [half_width(interval(x), 1, 100.0) for x in (base, smol)]
        cells.append([task, len(base), f"{100 * chance.mean():.1f}", *shares, shown(kept, 0, 100.0)])
    return markdown(["task", "questions", "chance, %", "base, %", "smol, %", "kept above chance, %"], cells)


def seconds(results: Sequence[Row]) -> str:
    rows = [row for row in results if row["stage"] == "time"]
    names = ["load", "independent", "tree", "d5p4"]
    return markdown(
        ["device", "dtype", *names], [[row["about"]["machine"], row["dtype"], *map(row.get, names)] for row in rows]
    )


def tables(results: Sequence[Row]) -> Tables:
    return {draw.__name__: partial(draw, results) for draw in (fronts, gaps, accuracy, seconds)}


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("smol", __doc__, Path("out/smol.jsonl"))
    parser.add_argument("--data", type=Path, help="the folder with truthfulqa, arc and commonsenseqa")
    parser.add_argument("--judge", help="the outside judge: a folder, a hub id or a GGUF file")
    parser.add_argument("--stage", action="append", choices=STAGES, required=True, help="may be repeated")
    parser.add_argument("--questions", type=int, default=QUESTIONS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    origin = about(choose_device(options.device), ["bench", "smol", *arguments])
    for stage in options.stage:
        lines = read(options.out)
        if stage == "draw":
            write(RESULT, [{k: v for k, v in line.items() if k not in ("texts", "prompts")} for line in lines])
        elif stage == "judge":
            judge = CausalJudge(options.judge, device=options.device)
            write(options.out, [line | {"outside": judged(judge, line)} if "texts" in line else line for line in lines])
        elif stage == "card":
            page = find("smol") / "README.md"
            text = page.read_text(encoding="utf-8").split("## Twenty questions")[0]
            page.write_text(
                f"{text}## Twenty questions\n\n{card(d5p4.load('smol', options.device))}\n", encoding="utf-8"
            )
        else:
            if stage != "time" and options.data is None:
                raise d5p4.D5P4Error(f"the stage {stage} needs --data")
            for line in run(stage, options):
                lines.append(line | {"about": origin})
                write(options.out, lines)
                means = {
                    k: round(float(np.mean(v)), 3)
                    for k, v in line.items()
                    if k not in ("texts", "prompts") and np.ndim(v)
                }
                print(
                    *line.values() if stage == "time" else (line["who"], line.get("method", line.get("task")), means),
                    flush=True,
                )


def run(stage: str, options: Any) -> Iterator[Row]:
    if stage == "time":
        yield from times(options.device)
        return
    model = d5p4.load("smol", options.device, "float32")
    base = Teacher(smol_base()[0], model.device, torch.float32)
    if stage == "answers":
        yield from answers(model, base, options.data, options.questions, options.seed)
    else:
        yield from choices(model, base, options.data)
