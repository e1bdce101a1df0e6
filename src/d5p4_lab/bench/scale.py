"""Measure what long runs on many ranks need: bytes exchanged, rows per second by batch size, token budgets, host work.

    python -m d5p4_lab bench scale [--sections bytes,rows,...] [--out FILE]
    python -m d5p4_lab bench scale --device cpu --small           tiny sizes, written to out/scale-small.json
    python -m d5p4_lab bench scale_plan --page docs/scale.md      draw tables and figure from the JSON

Several runs of this program can add sections to the same JSON file. Each section names its machine. A time is the best
of a few repeats after a warm-up. Memory is the allocator's peak, including the weights, in GB of 10^9 bytes.
"""

from __future__ import annotations

import gc
import json
import random
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import d5p4
from d5p4.eval.countdown import WINDOW, problems
from d5p4.jobs import run as job_run
from d5p4.jobs.output import summarise
from d5p4.jobs.reader import PromptFile
from d5p4.jobs.rows import RowStore
from d5p4.jobs.run import Work, plan_work
from d5p4.models import Tokenizer
from d5p4.models.load import choose_device
from d5p4.prompts import Prepared
from d5p4.provenance import provenance
from d5p4.store import append, json_line

from ..timing import fastest
from . import CHECKOUT, RESULTS, Row, chosen, generate, make_parser, measure_section, read, scale_bytes, show, write
from .large_checkpoint import CONFIG, TINY, random_model

CPU = torch.device("cpu")
NUMBERS = 4  # per puzzle
OPENINGS = ["It was a dark night", "The old man", "When they came to the river", "She looked at him and"]
WHOLE = 1 << 24  # a budget of this many tokens per forward never divides a batch
COLD = 0.03  # at this low temperature the model with random weights draws many equal rows
ENOUGH = 0.97  # a budget is enough if it reaches this share of the best prompts per second
K, ANSWER_TOKENS, PROMPT_TOKENS = 16, 256, 128  # answers per line, tokens per answer and per prompt in `host`
LETTERS_PER_TOKEN = 4.3  # a typical number of letters per token for English text and common tokenizers
CHAT = (
    "{% for message in messages %}{% set line = message['role'] + ': ' + message['content'] | trim + '\n' %}"
    "{% if loop.first %}{% set line = '# ' + line %}{% endif %}{{ line }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
WORDS = (
    "the of and to in is that for it was on as with at from or an which not have had they were would about when who "
    "some could time journey question answer train morning kilometre station twelve passenger ticket altogether"
)


@dataclass(frozen=True)
class HostSizes:
    """The amount of work in the section `host`."""

    lines: int = 8_192  # lines of the input file
    kept: int = 4_096  # finished lines in all part files together
    parts: int = 512
    requests: int = 4_000  # requests to the store
    finished: int = 1_000_000  # lines of a file of which half are finished; every rank must know which half
    appends: int = 40  # batches appended to a part file


@dataclass(frozen=True)
class Plan:
    """The sizes that are measured."""

    exchange: scale_bytes.Sizes = scale_bytes.Sizes()
    host: HostSizes = HostSizes()
    shape: Mapping[str, Any] = field(default_factory=lambda: CONFIG)  # the shape of the large model
    prompt: int = 128  # each prompt of the large model has this many tokens
    answer: int = 128
    steps: int = 8  # each decode of the large model takes this many steps
    puzzles: tuple[int, ...] = tuple(2**i for i in range(11))  # numbers of puzzles per batch
    large: tuple[int, ...] = (1, 2, 4, 8)
    puzzle_budgets: tuple[int, ...] = tuple(2**i for i in range(12, 20))
    large_budgets: tuple[int, ...] = tuple(2**i for i in range(11, 17))
    file: int = 1024  # puzzles per file
    alone: int = 64  # the number of puzzles that are also decoded one at a time
    shares: int = 64  # the number of puzzles on which the share of distinct rows is measured
    texts: int = 8  # the number of texts on which the share of distinct rows is measured
    repeats: int = 2


def small_plan() -> Plan:
    exchange = scale_bytes.Sizes(groups=2, w=3, length=16, width=32, steps=3, votes=10)
    host = HostSizes(lines=60, kept=60, parts=8, requests=50, finished=1000, appends=3)
    batches: dict[str, Any] = dict(puzzles=(1, 2), large=(1, 2), puzzle_budgets=(2048, 4096), large_budgets=(64, 128))
    counts: dict[str, Any] = dict(prompt=4, answer=8, steps=4, file=6, alone=2, shares=2, texts=1, repeats=1)
    return Plan(exchange, host, TINY, **batches, **counts)


class Bench:
    """Loads the models on first use, and decodes prompts with them."""

    def __init__(self, plan: Plan, device: torch.device, small: bool = False) -> None:
        self.plan, self.device, self.small = plan, device, small
        self.cuda = device.type == "cuda"

    @cached_property
    def countdown(self) -> Any:
        return d5p4.load("countdown", self.device)

    @cached_property
    def large(self) -> Any:
        """A model of LLaDA-8B's shape with random weights."""
        return random_model(self.plan.shape, self.device, torch.bfloat16 if self.cuda else torch.float32)

    def forget(self) -> None:
        """Free the large model's memory."""
        self.__dict__.pop("large", None)
        self.free()

    def free(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def decode(self, what: str, model: Any, prompts: Sequence[Any], repeats: int | None = None, **options: Any) -> Row:
        """Decode prompts with `generate`. Return the rates, the share of distinct rows and the peak memory."""
        call = partial(generate, model, list(prompts), seed=0, **options)
        self.free()  # only once, not before every repeat, because a long run does not free its memory either
        result, seconds = fastest(call, self.device, repeats or self.plan.repeats)
        rows, nominal = int(result.rows.sum()), int(result.rows_nominal.sum())
        row: Row = {"what": what, "prompts": len(prompts), "seconds": seconds}
        row |= {"prompts_per_s": len(prompts) / seconds, "rows_per_s": rows / seconds}
        row |= {"nominal_rows_per_s": nominal / seconds, "distinct_share": rows / nominal}
        row |= {"steps": int(result.nfe[0]), "tokens_a_row": int(result.sequences.shape[-1])}
        if self.cuda:
            row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        return row

    def puzzles(self, count: int) -> list[str]:
        return [problem.prompt for problem in problems(count, NUMBERS)]

    def ids(self, count: int) -> list[list[int]]:
        """Return `count` different prompts of token ids for the large model."""
        most = self.plan.shape["vocab_size"] // 2
        return [[(7 * i + 13 * number) % most for i in range(self.plan.prompt)] for number in range(count)]

    @property
    def puzzle(self) -> dict[str, Any]:
        """The options of `generate` for a puzzle. One token is revealed per step."""
        window = 6 if self.small else WINDOW[NUMBERS]
        return dict(k=4, w=4, gen_length=window, steps=window)

    @property
    def answer(self) -> dict[str, Any]:
        return dict(k=4, w=4, gen_length=self.plan.answer, steps=self.plan.steps)


def exchanged(bench: Bench) -> list[Row]:
    """Measure how many bytes of each kind a rank sends per step when two processes (gloo) share a pool."""
    return [show(row) for row in scale_bytes.measure(bench.plan.exchange)]


def rows(bench: Bench) -> list[Row]:
    """Measure rows and prompts per second for different numbers of prompts decoded together. A step is one forward."""
    plan, measured = bench.plan, []
    cases: list[tuple[str, str, Callable[[int], list[Any]], tuple[int, ...], dict[str, Any]]] = [
        ("countdown", "countdown", bench.puzzles, plan.puzzles, bench.puzzle),
        ("8B, rows differ", "large", bench.ids, plan.large, bench.answer),
        (f"8B, temperature {COLD:g}", "large", bench.ids, plan.large, bench.answer | {"temperature": COLD}),
    ]
    for what, name, prompts, counts, options in cases:
        model = getattr(bench, name)  # loads the model before the measurement, so that its memory is counted
        bench.decode(what, model, prompts(1), 1, **options)  # warm up
        alone = None
        for count in counts:
            row = bench.decode(what, model, prompts(count), max_tokens_per_forward=WHOLE, **options)
            alone = alone or row["rows_per_s"]  # gains compare rows, because prompts need different numbers of rows
            measured.append(show(row | {"gain": row["rows_per_s"] / alone}))
    return measured


def budget(bench: Bench) -> list[Row]:
    """Measure prompts per second for different limits of tokens per forward. Find the smallest limit that is enough.

    The pools of one call together may have eight times as many tokens as one forward.
    """
    plan, all_rows = bench.plan, []
    for what, name, prompts, budgets, repeats, options in (
        ("countdown", "countdown", bench.puzzles(plan.puzzles[-1]), plan.puzzle_budgets, 2, bench.puzzle),
        ("8B, rows differ", "large", bench.ids(plan.large[-1]), plan.large_budgets, 1, bench.answer),
    ):
        model = getattr(bench, name)
        bench.decode(what, model, prompts[:1], 1, **options)  # warm up
        measured = []
        for tokens in budgets:
            row = bench.decode(what, model, prompts, repeats, max_tokens_per_forward=tokens, **options)
            measured.append(show(row | {"budget": tokens}))
        best = max(row["prompts_per_s"] for row in measured)
        enough = next(row["budget"] for row in measured if row["prompts_per_s"] >= ENOUGH * best)
        all_rows += [row | {"enough": row["budget"] == enough} for row in measured]
    return all_rows


def batching(bench: Bench) -> list[Row]:
    """Measure `run_file` on files of puzzles: one prompt at a time, and in batches limited by a token budget."""
    plan, model = bench.plan, bench.countdown
    measured: list[Row] = []
    puzzles, budget = bench.puzzles(plan.file), {"max_tokens_per_forward": 64} if bench.small else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def run(what: str, count: int, window: int, **options: Any) -> list[str]:
            source, output = folder / f"{count}.jsonl", folder / f"{what.replace(' ', '-')}.jsonl"
            source.write_text("".join(json.dumps({"id": i, "prompt": p}) + "\n" for i, p in enumerate(puzzles[:count])))
            before, job_run.WINDOW = job_run.WINDOW, window
            try:
                report = d5p4.run_file(model, source, output, seed=0, **bench.puzzle | options)
            finally:
                job_run.WINDOW = before
            rates = {"prompts_per_s": count / report.seconds, "rows_per_s": report.rows / report.seconds}
            measured.append({"what": what, "prompts": count, "seconds": report.seconds, **rates})
            return output.read_text().splitlines()

        run("warm-up", min(8, plan.file), job_run.WINDOW)
        measured.clear()
        alone = run("one prompt at a time", plan.alone, 1)
        for what, options in (
            ("batched, default budget", {}),
            ("batched, 16384 tokens per forward", {"max_tokens_per_forward": 1 << 14}),
            ("batched, deterministic", {"deterministic": True} | budget),
        ):
            lines = run(what, plan.file, job_run.WINDOW, **options)
            same = sum(json.loads(a)["answers"] == json.loads(b)["answers"] for a, b in zip(alone, lines, strict=False))
            measured[-1]["gain"] = measured[-1]["prompts_per_s"] / measured[0]["prompts_per_s"]
            if "deterministic" not in options:  # answers with and without it may differ; see deterministic.py
                measured[-1]["same_share"] = same / plan.alone
            show(measured[-1])
    return measured


def distinct(bench: Bench) -> list[Row]:
    """Measure the share of distinct rows in pools of k = 16, w = 4 that the shipped models decode."""
    plan, window = bench.plan, bench.puzzle["gen_length"]
    common = dict(k=2, w=2) if bench.small else dict(k=16, w=4)
    measured = []
    for tokens in (1, 4):
        options = common | dict(gen_length=window, steps=window // tokens)
        row = bench.decode("countdown", bench.countdown, bench.puzzles(plan.shares), 1, **options)
        measured.append(show(row | {"tokens_a_step": tokens}))
    books = d5p4.load("books", bench.device)
    length = 8 if bench.small else 192  # a row of prompt and answer may have at most 256 tokens
    for tokens in (1, 4):
        options = common | dict(gen_length=length, steps=length // tokens)
        row = bench.decode("books", books, (2 * OPENINGS)[: plan.texts], 1, **options)
        measured.append(show(row | {"tokens_a_step": tokens}))
    return measured


def host(bench: Bench) -> list[Row]:
    """Time the work of the host (the CPU) per prompt and per line, and a request to torchrun's key-value store."""
    sizes = bench.plan.host
    with tempfile.TemporaryDirectory() as name:
        return [*_input(sizes, Path(name)), *_parts(sizes, Path(name)), *_store(sizes)]


def _row(what: str, seconds: float, count: int, **more: Any) -> Row:
    return show({"what": what, "count": count, "us": seconds / count * 1e6} | more)


def _input(sizes: HostSizes, folder: Path) -> list[Row]:
    """Time the work of each rank on the input file: counting, hashing, tokenising, sorting and batching the prompts."""
    chance, path = random.Random(0), folder / "prompts.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(sizes.lines):
            words = chance.choices(WORDS.split(), k=int(PROMPT_TOKENS * 0.8))
            file.write(json.dumps({"id": f"p{number}", "prompt": " ".join(words)}) + "\n")
    books: Any = d5p4.load("books", "cpu")  # loaded for its tokenizer; the model itself allows only short rows
    model: Any = SimpleNamespace(tokenizer=books.tokenizer, head=books.head, mask_id=books.mask_id, max_length=4096)
    model.carry_over, model.default_order, model.generation_defaults = False, "confidence", {}
    model.body = books.body
    options = {"method": "d5p4", "k": K, "w": 4, "gen_length": ANSWER_TOKENS}
    lines, scan = fastest(lambda: PromptFile(path), CPU)

    def planned() -> tuple[list[Work], float]:
        return fastest(lambda: list(plan_work(lines, Prepared(model, options), bad_first=False)), CPU)

    work, plain = planned()
    tokens = sum(len(item.request.ids) for batch in work for item in batch.items) / sizes.lines
    model.tokenizer = Tokenizer(books.tokenizer.backend, chat_template=CHAT, mask_id=books.mask_id)
    _, chat = planned()
    return [
        _row("count and hash the input", scan, sizes.lines, bytes=path.stat().st_size / sizes.lines),
        _row("plan a prompt (tokenise, hash, sort, batch)", plain, sizes.lines, tokens=tokens),
        _row("plan a prompt with a chat template", chat, sizes.lines),
    ]


def _parts(sizes: HostSizes, folder: Path) -> list[Row]:
    """Time three tasks with the part files of many ranks: appending lines, finding the lines, and merging the lines."""
    text = ("the answer is " * 100)[: round(ANSWER_TOKENS * LETTERS_PER_TOKEN)]
    fields = {"id": "p", "prompt": "a" * round(PROMPT_TOKENS * LETTERS_PER_TOKEN), "answers": [text] * K}
    scores = {"score": [-0.123456] * K, "distance": 0.1, "distinct": K, "logdet": -1.0, "rows": 9000, "seed": 0}
    store = RowStore(folder / "answers.jsonl", summarise)
    store.folder.mkdir()

    def line(number: int) -> bytes:
        return json_line(fields | {"line": number + 1} | scores)

    size = len(line(0))

    def append_batches() -> None:
        for _ in range(sizes.appends):
            append(store.folder / "trial", [line(i) for i in range(5)])

    _, appended = fastest(append_batches, CPU)
    for number, start in enumerate(range(0, sizes.kept, 5)):
        with store.part(1, number % sizes.parts).open("ab") as file:
            file.writelines(map(line, range(start, min(start + 5, sizes.kept))))
    existing, read_seconds = fastest(store.read, CPU)
    _, merge = fastest(lambda: store.write(store.raw_rows(existing.places)), CPU)
    tracemalloc.start()
    existing = store.read()
    memory = tracemalloc.get_traced_memory()[0] / len(existing.places)
    tracemalloc.stop()
    return [
        _row("append a batch of 5 lines and wait for the disk", appended, sizes.appends, bytes=5 * size),
        _row(f"find a line in {sizes.parts} parts", read_seconds, sizes.kept, bytes=size, memory=memory),
        _row(f"merge a line of {sizes.parts} parts", merge, sizes.kept, bytes=size),
    ]


def _store(sizes: HostSizes) -> list[Row]:
    """Time the requests of one client to a store like torchrun's, and the message that lists the finished lines."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    client = dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=30))
    _, asked = fastest(lambda: [client.add("count", 1) for _ in range(sizes.requests)], CPU)
    scattered = random.Random(0).sample(
        range(1, sizes.finished + 1), sizes.finished // 2
    )  # the message is largest if the finished lines are scattered over the file
    finished = np.zeros(sizes.finished + 1, dtype=bool)
    finished[scattered] = True
    message = zlib.compress(np.packbits(finished).tobytes())  # as in `d5p4.jobs.output.Start`

    def send() -> None:
        client.set("finished", message)  # type: ignore[arg-type]  # the store also accepts bytes
        np.unpackbits(np.frombuffer(zlib.decompress(client.get("finished")), dtype=np.uint8))

    _, seconds = fastest(send, CPU)
    return [
        _row("ask the store", asked, sizes.requests),
        _row("tell a rank which lines are finished", seconds, sizes.finished, bytes=len(message)),
    ]


SECTIONS: dict[str, Callable[[Bench], list[Row]]] = {
    "bytes": exchanged,
    "rows": rows,
    "budget": budget,
    "batching": batching,
    "distinct": distinct,
    "host": host,
}


def run(plan: Plan, device: torch.device, names: Sequence[str], out: Path, small: bool = False) -> dict[str, Any]:
    """Measure the named sections, and write the JSON after each section."""
    bench, results = Bench(plan, device, small), {"sections": {}} | read(out)
    for name, measure in SECTIONS.items():
        if name not in names:
            continue
        about = {"about": " ".join((measure.__doc__ or "").split()), "small": small}
        about |= provenance("cpu" if name in ("bytes", "host") else device)
        sections = results["sections"] | {name: measure_section(name, partial(measure, bench), **about)}
        results["sections"] = {key: sections[key] for key in SECTIONS if key in sections}
        write(out, results)
        bench.forget()
    return results


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("scale", __doc__)
    parser.add_argument("--device", help="default: cuda if there is a GPU")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to test that everything runs")
    parser.add_argument("--sections", "--section", default=",".join(SECTIONS), help="some of " + ",".join(SECTIONS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    names = chosen(options.sections, SECTIONS, "section")
    out = options.out or (CHECKOUT / "out/scale-small.json" if options.small else RESULTS / "scale.json.xz")
    plan = small_plan() if options.small else Plan()
    results = run(plan, choose_device(options.device), names, out, options.small)
    failed = [name for name in names if "error" in results["sections"][name]]
    if failed:
        raise d5p4.D5P4Error(f"these sections failed: {', '.join(failed)}; their errors are in {out}")
