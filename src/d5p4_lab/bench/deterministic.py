"""What `deterministic=True` gives and costs in bf16: prompts with unchanged answers between batch sizes, rows/s.

    python benchmarks/deterministic.py [--models countdown,llada-8b] [--device cpu --small] [--out FILE]

The same prompts, keys and seed are decoded alone, a few at a time and all at once, without and with the option. A
prompt is unchanged when its answers equal those of the largest batch; its bits are when scores and similarities do,
too. llada-8b has that shape and random weights, its logits spread like a trained model's. Rows are the distinct ones
that needed a forward; what fills forwards up counts only in the time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import d5p4  # noqa: E402
from d5p4.eval.countdown import WINDOW, problems  # noqa: E402
from d5p4.models.load import choose_device  # noqa: E402
from d5p4.provenance import provenance  # noqa: E402
from d5p4_lab.bench.gpu_measure import Counted, random_model  # noqa: E402
from d5p4_lab.bench.large_checkpoint import CONFIG  # noqa: E402

SPREAD = 8.0  # standard deviation of the random model's logits; those of flat logits would change with any bit
TINY = CONFIG | {
    "d_model": 64, "n_heads": 4, "n_kv_heads": 4, "n_layers": 2, "mlp_hidden_size": 96, "vocab_size": 512,
    "embedding_size": 512, "mask_token_id": 511, "eos_token_id": 510, "pad_token_id": 510,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, its prompts, and how many of them go together."""

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
    """The model in bf16 and its prompts: puzzles, or token ids of different lengths."""
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", d5p4.DuplicateAnswers)
        return d5p4.generate(model, [prompts[i] for i in numbers], keys=list(numbers), seed=1, **options)


def measure(model: Any, prompts: Sequence[Any], size: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """All prompts, `size` at a time: what came out of each, and how long it took."""
    parts = [range(start, min(start + size, len(prompts))) for start in range(0, len(prompts), size)]
    decode(model, prompts, parts[0], {**options, "steps": 2})  # compiles what must be
    counted = Counted(model, recordable=True)  # as in use; what is counted below has no replays
    sync(model)
    began = time.perf_counter()
    results = [decode(counted, prompts, part, options) for part in parts]
    sync(model)
    seconds = time.perf_counter() - began
    rows = sum(int(result.rows.sum()) for result in results)
    row = {"size": size, "seconds": seconds, "rows": rows, "rows_s": rows / seconds}
    row["prompts_s"] = len(prompts) / seconds
    if options["deterministic"]:
        row["filled_share"] = 1 - rows / counted.rows
    row["answers"] = [answers for result in results for answers in result.answers]
    row["bits"] = [bits for r in results for bits in zip(r.score.tolist(), r.similarity.tolist(), strict=True)]
    return row


def sync(model: Any) -> None:
    if model.head.weight.is_cuda:
        torch.cuda.synchronize()


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The shares of prompts that a batch size leaves as the largest one has them, in place of what came out."""
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
    found: dict[str, Any] = {"prompts": len(prompts), "options": dict(case.options)}
    for name, on in (("plain", False), ("deterministic", True)):
        options = {**case.options, "deterministic": on}
        found[name] = compare([measure(model, prompts, size, options) for size in case.sizes])
    settings = d5p4.Settings.make(model, **case.options, deterministic=True)
    found["max_tokens_per_forward"] = settings.max_tokens_per_forward
    return found


def table(results: Mapping[str, Any]) -> str:
    """One line a model and batch size; cost is how much longer the same rows take."""
    pairs = f"{'unchanged':>15}  {'same bits':>15}  {'rows/s':>15}"
    modes = "  ".join(f"{'plain':>7} {'fixed':>7}" for _ in range(3))
    lines = [f"{'':<16}  {pairs}", f"{'model':<10} {'batch':>5}  {modes}  {'cost':>5}  {'filled':>6}"]
    for model, found in results["models"].items():
        for plain, fixed in zip(found["plain"], found["deterministic"], strict=True):
            shares = "  ".join(f"{plain[x]:>7.1%} {fixed[x]:>7.1%}" for x in ("unchanged", "same_bits"))
            rates = f"{plain['rows_s']:>7.0f} {fixed['rows_s']:>7.0f}  {plain['rows_s'] / fixed['rows_s']:>4.2f}x"
            lines.append(f"{model:<10} {plain['size']:>5}  {shares}  {rates}  {fixed['filled_share']:>6.1%}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--models", default=",".join(CASES), help="of " + ",".join(CASES))
    parser.add_argument("--out", type=Path, help="where the JSON goes (benchmarks/results, with --small out)")
    options = parser.parse_args(arguments)
    names = [name.strip() for name in options.models.split(",") if name.strip()]
    unknown = sorted(set(names) - set(CASES))
    if unknown:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(CASES)}")
    try:
        device = choose_device(options.device)
    except d5p4.D5P4Error as error:
        parser.error(str(error))
    out = options.out or ROOT / ("out" if options.small else "src/d5p4_lab/results/bench") / "deterministic.json"
    results: dict[str, Any] = {"small": options.small, "spread": SPREAD, "models": {}}
    words = sys.argv[1:] if arguments is None else arguments
    results |= provenance(device, ["python", "benchmarks/deterministic.py", *words])
    out.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        began = time.perf_counter()
        results["models"][name] = run((SMALL if options.small else CASES)[name], device, options.small)
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
        out.write_text(json.dumps(results, indent=1) + "\n")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(table(results))


if __name__ == "__main__":
    main()
