"""Files and ranks: bytes that ranks exchange, rows a second by batch, token budgets, whole files, the host's work.

    python benchmarks/scale.py [--sections bytes,rows,...] [--out FILE]
    python benchmarks/scale.py --device cpu --small           everything at tiny sizes, into out/scale-small.json
    python benchmarks/scale_plan.py --page docs/scale.md      tables and figure from the JSON

The sections of several calls meet in one JSON, each with its machine. Times are the best of a few repeats after a
warm-up. Memory is the allocator's peak with the weights, in GB of 10^9 bytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import d5p4  # noqa: E402
from d5p4.eval.countdown import WINDOW, problems  # noqa: E402
from d5p4.jobs import plan as job_plan  # noqa: E402
from d5p4.models.load import choose_device  # noqa: E402
from d5p4.provenance import provenance  # noqa: E402
from d5p4_lab.bench import scale_bytes, scale_host  # noqa: E402
from d5p4_lab.bench.gpu_measure import make_small_plan, one_line, random_model  # noqa: E402
from d5p4_lab.bench.large_checkpoint import CONFIG  # noqa: E402

Row = dict[str, Any]
NUMBERS = 4  # of a puzzle
OPENINGS = ["It was a dark night", "The old man", "When they came to the river", "She looked at him and"]
WHOLE = 1 << 24  # a token budget that never divides a batch
COLD = 0.03  # a temperature of the random model's draws at which rows are equal
ENOUGH = 0.97  # of the best rate: the budget that is taken is the smallest that reaches it


@dataclass(frozen=True)
class Plan:
    """Which sizes are measured."""

    exchange: scale_bytes.Sizes = scale_bytes.Sizes()
    host: scale_host.Sizes = scale_host.Sizes()
    shape: Mapping[str, Any] = field(default_factory=lambda: CONFIG)  # of the large model
    prompt: int = 128  # its prompts and answers
    answer: int = 128
    steps: int = 8  # of its decodes
    puzzles: tuple[int, ...] = tuple(2**i for i in range(11))  # batched together
    large: tuple[int, ...] = (1, 2, 4, 8)
    puzzle_budgets: tuple[int, ...] = tuple(2**i for i in range(12, 20))
    large_budgets: tuple[int, ...] = tuple(2**i for i in range(11, 17))
    file: int = 1024  # puzzles of a file
    alone: int = 64  # of them decoded one at a time
    shares: int = 64  # puzzles of which the share of distinct rows is taken
    texts: int = 8
    repeats: int = 2


def small_plan() -> Plan:
    shape = make_small_plan().config
    return Plan(
        exchange=scale_bytes.Sizes(groups=2, w=3, length=16, width=32),
        host=scale_host.Sizes(lines=60, kept=60, parts=8, requests=50, finished=1000, appends=3),
        shape=shape, prompt=4, answer=8, steps=4, puzzles=(1, 2), large=(1, 2), puzzle_budgets=(2048, 4096),
        large_budgets=(64, 128), file=6, alone=2, shares=2, texts=1, repeats=1,
    )  # fmt: skip


class Bench:
    """The models, loaded when first asked for, and a stopwatch."""

    def __init__(self, plan: Plan, device: torch.device, small: bool = False) -> None:
        self.plan, self.device, self.small = plan, device, small
        self.cuda = device.type == "cuda"
        self._large: Any = None
        self._countdown: Any = None

    @property
    def countdown(self) -> Any:
        if self._countdown is None:
            self._countdown = d5p4.load("countdown", self.device)
        return self._countdown

    @property
    def large(self) -> Any:
        """The 8B shape with random weights."""
        if self._large is None:
            dtype = torch.bfloat16 if self.cuda else torch.float32
            self._large = random_model(self.plan.shape, self.device, dtype)
        return self._large

    def forget(self) -> None:
        """The large model's memory is given back."""
        self._large = None
        self.free()

    def free(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def timed(self, fn: Callable[[], Any], repeats: int | None = None) -> tuple[float, Any]:
        """Seconds of the fastest of some calls, and the last one's result."""
        best = float("inf")
        self.free()  # once: asking the driver for memory anew is no part of a long run
        for _ in range(repeats or self.plan.repeats):
            began = time.perf_counter()
            found = fn()
            if self.cuda:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
        return best, found

    def decode(self, what: str, model: Any, prompts: Sequence[Any], repeats: int | None = None, **options: Any) -> Row:
        """Whole decodes of prompts through `generate`: rates and memory."""

        def call() -> d5p4.Result:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", d5p4.DuplicateAnswers)
                return d5p4.generate(model, list(prompts), seed=0, **options)

        seconds, result = self.timed(call, repeats)
        rows, nominal = int(result.rows.sum()), int(result.rows_nominal.sum())
        row: Row = {
            "what": what, "prompts": len(prompts), "seconds": seconds, "prompts_per_s": len(prompts) / seconds,
            "rows_per_s": rows / seconds, "nominal_rows_per_s": nominal / seconds, "distinct_share": rows / nominal,
            "steps": int(result.nfe[0]), "tokens_a_row": int(result.sequences.shape[-1]),
        }  # fmt: skip
        if self.cuda:
            row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        return row

    def puzzles(self, count: int) -> list[str]:
        return [problem.prompt for problem in problems(count, NUMBERS)]

    def ids(self, count: int) -> list[list[int]]:
        """Prompts of token ids for the large model, all different."""
        most = self.plan.shape["vocab_size"] // 2
        return [[(7 * i + 13 * number) % most for i in range(self.plan.prompt)] for number in range(count)]

    @property
    def puzzle(self) -> dict[str, Any]:
        """One token a step."""
        window = 6 if self.small else WINDOW[NUMBERS]
        return dict(k=4, w=4, gen_length=window, steps=window)

    @property
    def answer(self) -> dict[str, Any]:
        return dict(k=4, w=4, gen_length=self.plan.answer, steps=self.plan.steps)


def show(row: Row) -> Row:
    shown = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
    print("  " + ", ".join(shown), flush=True)
    return row


def exchanged(bench: Bench) -> list[Row]:
    """Bytes a rank sends in a step, by kind, where two real processes (gloo) share a pool; the body is a look-up."""
    return [show(row) for row in scale_bytes.measure(bench.plan.exchange)]


def rows(bench: Bench) -> list[Row]:
    """Rows and prompts a second by how many prompts are decoded together, each step in one forward."""
    plan, found = bench.plan, []
    cases: list[tuple[str, str, Callable[[int], list[Any]], tuple[int, ...], dict[str, Any]]] = [
        ("countdown", "countdown", bench.puzzles, plan.puzzles, bench.puzzle),
        ("8B, rows differ", "large", bench.ids, plan.large, bench.answer),
        (f"8B, temperature {COLD:g}", "large", bench.ids, plan.large, bench.answer | {"temperature": COLD}),
    ]
    for what, name, prompts, counts, options in cases:
        model = getattr(bench, name)  # loaded now: memory is counted
        bench.decode(what, model, prompts(1), 1, **options)  # warms up
        alone = None
        for count in counts:
            row = bench.decode(what, model, prompts(count), max_tokens_per_forward=WHOLE, **options)
            alone = alone or row["rows_per_s"]  # not prompts: some prompts have fewer rows than others
            found.append(show(row | {"gain": row["rows_per_s"] / alone}))
    return found


def budget(bench: Bench) -> list[Row]:
    """Prompts a second by tokens of a forward (a call holds the pools of eight), and the least that is enough."""
    plan, found = bench.plan, []
    for what, name, prompts, budgets, repeats, options in (
        ("countdown", "countdown", bench.puzzles(plan.puzzles[-1]), plan.puzzle_budgets, 2, bench.puzzle),
        ("8B, rows differ", "large", bench.ids(plan.large[-1]), plan.large_budgets, 1, bench.answer),
    ):
        model = getattr(bench, name)
        bench.decode(what, model, prompts[:1], 1, **options)  # warms up
        measured = []
        for tokens in budgets:
            row = bench.decode(what, model, prompts, repeats, max_tokens_per_forward=tokens, **options)
            measured.append(show(row | {"budget": tokens}))
        best = max(row["prompts_per_s"] for row in measured)
        enough = next(row["budget"] for row in measured if row["prompts_per_s"] >= ENOUGH * best)
        found += [row | {"enough": row["budget"] == enough} for row in measured]
    return found


def batching(bench: Bench) -> list[Row]:
    """Whole files of puzzles through `run_file`: one prompt at a time, and batched by token budgets."""
    plan, model, found = bench.plan, bench.countdown, []
    puzzles, fixed = bench.puzzles(plan.file), {"max_tokens_per_forward": 64} if bench.small else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def run(what: str, count: int, window: int, **options: Any) -> list[str]:
            source, output = folder / f"{count}.jsonl", folder / f"{what.replace(' ', '-')}.jsonl"
            source.write_text("".join(json.dumps({"id": i, "prompt": p}) + "\n" for i, p in enumerate(puzzles[:count])))
            before, job_plan.WINDOW = job_plan.WINDOW, window
            try:
                report = d5p4.run_file(model, source, output, seed=0, **bench.puzzle | options)
            finally:
                job_plan.WINDOW = before
            row = {"what": what, "prompts": count, "seconds": report.seconds,
                   "prompts_per_s": count / report.seconds, "rows_per_s": report.rows / report.seconds}  # fmt: skip
            found.append(row)
            return output.read_text().splitlines()

        run("warm-up", min(8, plan.file), job_plan.WINDOW)
        found.clear()
        alone = run("one prompt at a time", plan.alone, 1)
        for what, options in (
            ("batched, default budget", {}),
            ("batched, 16384 tokens a forward", {"max_tokens_per_forward": 1 << 14}),
            ("batched, deterministic", {"deterministic": True} | fixed),
        ):
            lines = run(what, plan.file, job_plan.WINDOW, **options)
            same = sum(
                json.loads(a)["answers"] == json.loads(b)["answers"] for a, b in zip(alone, lines, strict=False)
            )
            gain = found[-1]["prompts_per_s"] / found[0]["prompts_per_s"]
            found[-1] |= {"gain": gain}
            if "deterministic" not in options:  # whose answers one by one are others; see deterministic.py
                found[-1] |= {"same_share": same / plan.alone}
            show(found[-1])
    return found


def distinct(bench: Bench) -> list[Row]:
    """Share of rows that differ within a pool of k = 16, w = 4, for the shipped trained models."""
    plan, window = bench.plan, bench.puzzle["gen_length"]
    common = dict(k=2, w=2) if bench.small else dict(k=16, w=4)
    found = []
    for tokens in (1, 4):
        options = common | dict(gen_length=window, steps=window // tokens)
        row = bench.decode("countdown", bench.countdown, bench.puzzles(plan.shares), 1, **options)
        found.append(show(row | {"tokens_a_step": tokens}))
    books = d5p4.load("books", bench.device)
    length = 8 if bench.small else 192  # the model's rows hold 256
    for tokens in (1, 4):
        options = common | dict(gen_length=length, steps=length // tokens)
        row = bench.decode("books", books, (2 * OPENINGS)[: plan.texts], 1, **options)
        found.append(show(row | {"tokens_a_step": tokens}))
    return found


def host(bench: Bench) -> list[Row]:
    """What the host does for one prompt, and its store for one request."""
    return scale_host.measure(bench.plan.host)


SECTIONS: dict[str, Callable[[Bench], list[Row]]] = {
    "bytes": exchanged, "rows": rows, "budget": budget, "batching": batching, "distinct": distinct, "host": host,
}  # fmt: skip


def run(plan: Plan, device: torch.device, names: Sequence[str], out: Path, small: bool = False) -> dict[str, Any]:
    """Measure the named sections and merge them into the JSON, which is written after each."""
    bench, results = Bench(plan, device, small), read(out)
    for name in SECTIONS:
        if name not in names:
            continue
        print(name, flush=True)
        section: dict[str, Any] = {"about": " ".join((SECTIONS[name].__doc__ or "").split()), "small": small}
        section |= provenance("cpu" if name in ("bytes", "host") else device)
        began = time.perf_counter()
        try:
            section["rows"] = SECTIONS[name](bench)
        except Exception as error:  # the other sections are worth having
            traceback.print_exc()
            section["error"] = one_line(error)
        section["seconds"] = time.perf_counter() - began
        print(f"  {section['seconds']:.0f} s", flush=True)
        sections = results["sections"] | {name: section}
        results["sections"] = {key: sections[key] for key in SECTIONS if key in sections}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        bench.forget()
    return results


def read(path: Path) -> dict[str, Any]:
    """The results in a file, or none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"sections": {}}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="cuda where there is one")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--sections", "--section", default=",".join(SECTIONS), help="of " + ",".join(SECTIONS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    names = [name.strip() for name in options.sections.split(",") if name.strip()]
    if unknown := sorted(set(names) - set(SECTIONS)):
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    try:
        device = choose_device(options.device)
    except d5p4.D5P4Error as error:
        parser.error(str(error))
    out = options.out or ROOT / ("out/scale-small.json" if options.small else "src/d5p4_lab/results/bench/scale.json")
    results = run(small_plan() if options.small else Plan(), device, names, out, options.small)
    failed = [name for name in names if "error" in results["sections"][name]]
    sys.exit(f"error: {', '.join(failed)} failed" if failed else 0)


if __name__ == "__main__":
    main()
