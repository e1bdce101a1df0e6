"""Measure how `deterministic=True` changes two things in bf16: how often answers depend on the batch, and the speed.

    python -m d5p4_lab bench deterministic [--models countdown,llada-8b] [--device cpu --small] [--out FILE]
    python -m d5p4_lab bench deterministic --table      print the table of the last run

The same prompts, with the same keys and seed, are decoded one by one, a few at a time and all at once, without and with
the option. A prompt is unchanged if it gets the same answers as in the largest batch. Its bits are the same if its
scores and similarities are equal too. `llada-8b` has the shape of LLaDA-8B and random weights, scaled so that its
logits spread like those of a trained model. "Rows" are the distinct rows that needed a forward. Rows that only fill up
a forward cost time but are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import d5p4
from d5p4.eval.countdown import WINDOW, problems
from d5p4.models.load import choose_device

from ..provenance import about
from ..timing import wall
from . import CHECKOUT, RESULTS, Row, chosen, generate, make_parser, markdown, read, write
from .large_checkpoint import CONFIG, TINY, Counted, random_model

SPREAD = 8.0  # the random model's logits have this standard deviation; if they were flat, rounding would change answers


@dataclass(frozen=True)
class Case:
    """One measured model, with the number of its prompts, the batch sizes and the options of `generate`."""

    model: str
    count: int
    sizes: tuple[int, ...]
    options: Mapping[str, Any]


CASES = {
    "countdown": Case("countdown", 64, (1, 4, 64), dict(k=4, w=4, gen_length=WINDOW[4])),
    "llada-8b": Case("llada-8b", 16, (1, 4, 16), dict(k=4, w=4, gen_length=32, steps=8)),
}
SMALL = {
    "countdown": Case("countdown", 4, (1, 2, 4), dict(k=2, w=2, gen_length=WINDOW[4], steps=3)),
    "llada-8b": Case("llada-8b", 4, (1, 2, 4), dict(k=2, w=2, gen_length=8, steps=3)),
}


def make(case: Case, device: torch.device, small: bool) -> tuple[Any, list[Any]]:
    """Return the model in bf16 and its prompts: puzzles, or lists of random token ids of different lengths."""
    if case.model == "countdown":
        model = d5p4.load("countdown", str(device), "bfloat16")
        return model, [problem.prompt for problem in problems(case.count, numbers=4, seed=6)]
    config = TINY if small else CONFIG
    model = random_model(config, device, torch.bfloat16)
    model.unembedding[0].data.mul_(SPREAD)
    generator = torch.Generator().manual_seed(0)
    lengths = [40 + (7 * i) % 50 for i in range(case.count)]
    ids = config["vocab_size"] // 2
    return model, [torch.randint(ids, (length,), generator=generator).tolist() for length in lengths]


def decode(model: Any, prompts: Sequence[Any], numbers: Sequence[int], options: Mapping[str, Any]) -> d5p4.Result:
    return generate(model, [prompts[i] for i in numbers], keys=list(numbers), seed=1, **options)


def measure(model: Any, prompts: Sequence[Any], size: int, options: Mapping[str, Any]) -> Row:
    """Decode all prompts in batches of `size`. Return the time, the answers, the scores and the similarities."""
    parts = [range(start, min(start + size, len(prompts))) for start in range(0, len(prompts), size)]
    decode(model, prompts, parts[0], {**options, "steps": 2})  # compiles the kernels before the timing
    counted = Counted(model, recordable=True)  # allows CUDA graphs, as in normal use
    results, seconds = wall(lambda: [decode(counted, prompts, part, options) for part in parts], model.device)
    rows = sum(int(result.rows.sum()) for result in results)
    row: Row = {"size": size, "seconds": seconds, "rows": rows, "rows_s": rows / seconds}
    row["prompts_s"] = len(prompts) / seconds
    if options["deterministic"]:
        row["filled_share"] = 1 - rows / counted.rows
    row["answers"] = [answers for result in results for answers in result.answers]
    row["bits"] = [bits for r in results for bits in zip(r.score.tolist(), r.similarity.tolist(), strict=True)]
    return row


def compare(rows: list[Row]) -> list[Row]:
    """Replace the answers by the share of prompts that get the same answers in the largest batch; likewise the bits."""
    answers, bits = rows[-1]["answers"], rows[-1]["bits"]
    for row in rows:
        same = [a == b for a, b in zip(row.pop("answers"), answers, strict=True)]
        exact = [a == b for a, b in zip(row.pop("bits"), bits, strict=True)]
        row["unchanged"] = sum(same) / len(same)
        row["same_bits"] = sum(s and e for s, e in zip(same, exact, strict=True)) / len(same)
    return rows


@torch.no_grad()
def run(case: Case, device: torch.device, small: bool) -> dict[str, Any]:
    model, prompts = make(case, device, small)
    results: dict[str, Any] = {"prompts": len(prompts), "options": dict(case.options)}
    for name, on in (("plain", False), ("deterministic", True)):
        options = {**case.options, "deterministic": on}
        results[name] = compare([measure(model, prompts, size, options) for size in case.sizes])
    settings = d5p4.Settings.make(model, method="d5p4", **case.options, deterministic=True)
    results["max_tokens_per_forward"] = settings.max_tokens_per_forward
    return results


def table(results: Mapping[str, Any]) -> str:
    """Return a table by model and batch size. The cost is the time with the option divided by the time without it."""
    rows = []
    for model, measured in results["models"].items():
        for plain, fixed in zip(measured["plain"], measured["deterministic"], strict=True):
            shares = (plain["unchanged"], fixed["unchanged"], fixed["same_bits"])
            rates = (plain["rows_s"], fixed["rows_s"], plain["rows_s"] / fixed["rows_s"])
            rows.append([model, str(plain["size"]), *(f"{100 * share:.1f} %" for share in shares), *rates])
    header = ["model", "prompts in a batch", "unchanged answers without", "with", "same bits with"]
    text = markdown([*header, "rows/s without", "rows/s with", "times the cost"], rows)
    return f"{text}\n\nMeasured on: {results['machine']}, torch {results['torch']}."


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("deterministic", __doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to test that everything runs")
    parser.add_argument("--models", default=",".join(CASES), help="some of " + ",".join(CASES))
    parser.add_argument("--out", type=Path, help="the JSON file; default: in the lab's results, in out/ with --small")
    parser.add_argument("--table", action="store_true", help="print the table of the last run")
    options = parser.parse_args(arguments)
    out = options.out or (CHECKOUT / "out" if options.small else RESULTS) / "deterministic.json.xz"
    if not options.table:
        names, device = chosen(options.models, CASES, "model"), choose_device(options.device)
        results: dict[str, Any] = {"small": options.small, "spread": SPREAD, "models": {}}
        results |= about(device, ["bench", "deterministic", *arguments])
        for name in names:
            case = (SMALL if options.small else CASES)[name]
            results["models"][name], seconds = wall(partial(run, case, device, options.small), device)
            print(f"{name}: {seconds:.0f} s", flush=True)
            write(out, results)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print(table(read(out)))
