"""Train `countdown` by reinforcement learning with the rollouts of several samplers, and compare the trained models.

    python -m d5p4_lab bench rollouts --device cuda --processes 8

The loop is a plain GRPO. It decodes k answers to each puzzle of a batch, gives a right answer the reward 1, subtracts
the mean reward of the puzzle, and takes one gradient step on -mean(advantage * log p). With one step per batch, no
ratio and no clipping are needed. `d5p4.integrations.rl.log_probabilities` computes log p. All samplers have the same
puzzles, the same number of updates and the same learning rates. Evaluation draws independent samples at temperature 1
for held-out puzzles, in two orders. No puzzle of the training is held out.
"""

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

import d5p4
from d5p4.eval.countdown import WINDOW, is_right
from d5p4.eval.stats import pass_at
from d5p4.integrations.rl import (
    ON_POLICY,
    WITHOUT_REPLACEMENT,
    Rollouts,
    log_probabilities,
    relative_weights,
    rollout,
    weighted_advantages,
)
from d5p4.models.load import choose_device
from d5p4.types import Model

from ..provenance import about
from ..puzzles import problems
from ..statistics import interval
from ..tables import Row, Tables, half_width, table_of
from ..train.countdown_data import CHARACTERS, batch
from . import RESULTS, generate, make_parser, write

CONFIDENCE: Mapping[str, Any] = {"method": "independent", "temperature": 1.0, "order": "confidence", "stop": True}
SAMPLERS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "confidence": ("independent, confidence", CONFIDENCE),
    "left": ("independent, left", ON_POLICY),
    "tree": ("tree, left", WITHOUT_REPLACEMENT),
    "d5p4": ("d5p4, confidence", {**CONFIDENCE, "method": "d5p4", "w": 4}),
}
ORDERS: dict[str, Mapping[str, Any]] = {"left": ON_POLICY, "confidence": CONFIDENCE}
RESULT = RESULTS / "rollouts.jsonl.xz"
Rows = Sequence[Row]  # of the results: the facts, then one row per run
TOKENS = 1 << 16  # tokens per forward; what their gradients need fits into memory
RATES, SEEDS = (3e-5, 1e-4), (0, 1)  # learning rates and seeds; one run per sampler, seed and rate
DRAWN = 16  # evaluation draws this many samples per puzzle


@dataclass(frozen=True)
class Plan:
    """The sizes that all runs share."""

    updates: int = 60
    puzzles: int = 32  # puzzles per update
    k: int = 8  # rollouts per puzzle
    numbers: int = 5  # numbers per puzzle
    held_out: int = 400  # puzzles of the evaluation at the end of a run


SMALL = Plan(updates=2, puzzles=2, k=2, numbers=3, held_out=2)


def training_puzzles(count: int, numbers: int, seed: int, update: int) -> list[str]:
    """Return the prompts of puzzles that are not held out."""
    rows = batch(count, seed + 1000, update, {numbers: 1.0})
    return ["".join(CHARACTERS[i] for i in row[-n:]) for row, n in zip(rows.prompts, rows.lengths, strict=True)]


def add_gradients(model: Model, rollouts: Rollouts, advantages: Tensor, length: int) -> None:
    """Add the gradients of -mean(advantage * log p) / length. Rollouts whose advantage is 0 are not run."""
    useful = (advantages.abs() > 1e-9).nonzero()[:, 0]
    if len(useful):
        logp, _ = log_probabilities(model, rollouts.take(useful), max_tokens_per_forward=TOKENS)
        (-(advantages[useful, None] * logp).sum() / (len(advantages) * length)).backward()


def evaluate(model: Model, plan: Plan) -> Row:
    """Return {order: counts}: how many of the `DRAWN` samples of each held-out puzzle are right."""
    puzzles = problems(plan.held_out, plan.numbers, seed=21)
    prompts, right = [puzzle.prompt for puzzle in puzzles], {}
    for order, options in ORDERS.items():
        length = {"gen_length": WINDOW[plan.numbers], "max_tokens_per_forward": TOKENS}
        result = generate(model, prompts, k=DRAWN, seed=7, **{**length, **options})
        answers = zip(puzzles, result.texts, strict=True)
        right[order] = [sum(is_right(puzzle, text) for text in texts) for puzzle, texts in answers]
    return right


def train(run: tuple[str, int, float], plan: Plan, device: str) -> Row:
    """Make one run with a sampler, seed and learning rate. Return a row per update, and the evaluation at the end."""
    name, seed, rate = run
    facts = {"sampler": name, "seed": seed, "rate": rate}
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    model: Any = d5p4.load("countdown", device, dtype="float32").requires_grad_(True)
    if name == "start":
        return {**facts, "updates": [], "evaluations": {"0": evaluate(model, plan)}}
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    rows, began = [], time.perf_counter()
    for update in range(plan.updates):
        prompts = training_puzzles(plan.puzzles, plan.numbers, seed, update)
        options = {**SAMPLERS[name][1], "gen_length": WINDOW[plan.numbers], "max_tokens_per_forward": TOKENS}
        rollouts = rollout(model, prompts, plan.k, seed=seed * 10**6 + update, **options)
        pairs = zip(rollouts.prompt.tolist(), rollouts.texts, strict=True)
        rewards = torch.tensor([float(is_right(prompts[p], text)) for p, text in pairs], device=rollouts.steps.device)
        add_gradients(model, rollouts, weighted_advantages(rewards, rollouts), WINDOW[plan.numbers])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        groups = rewards.view(-1, plan.k)
        texts = [set(rollouts.texts[i : i + plan.k]) for i in range(0, len(rollouts), plan.k)]
        rows.append(
            {
                "reward": float(rewards.mean()),
                "estimate": float((relative_weights(rollouts) * rewards).mean()),  # the mean if weights are equal
                "flat": float((groups == groups[:, :1]).all(1).float().mean()),
                "different": sum(map(len, texts)) / len(texts),
                "rows": rollouts.rows / len(groups),
            }
        )
        if update % 20 == 0:
            print(f"{name} {seed}: update {update}, reward {rows[-1]['reward']:.3f}", flush=True)
    print(f"{name} {seed}: {time.perf_counter() - began:.0f} s", flush=True)
    return {**facts, "updates": rows, "evaluations": {str(plan.updates): evaluate(model, plan)}}


def pass_rates(right: Sequence[int], k: int) -> list[float]:
    """Return pass@k of each puzzle, in per cent, given how many of its `DRAWN` samples are right."""
    return (100 * pass_at(np.arange(DRAWN) < np.array(right)[:, None], k)).tolist()


def table(results: Rows, by_seed: bool = False) -> str:
    """Return a table with one row per sampler and learning rate, or per run. Figures are means over the seeds."""
    last, lines = str(results[0]["plan"]["updates"]), []
    groups: dict[tuple[float, int, int], list[Row]] = {}
    for run in results[1:]:
        place = list(SAMPLERS).index(run["sampler"]) if run["rate"] else 0
        groups.setdefault((run["rate"], place, run["seed"] if by_seed else 0), []).append(run)
    for (rate, _, seed), runs in sorted(groups.items()):
        updates = [row for run in runs for row in run["updates"]]
        late = [row for run in runs for row in run["updates"][-20:]]
        line: Row = {"rate": f"{rate:g}" if rate else None}
        line["rollouts"] = SAMPLERS[runs[0]["sampler"]][0] if rate else "before training"
        line |= {"seed": seed} if by_seed else {}
        for heading, name, source, digits in (
            ("reward", "estimate", late, 2),
            ("flat groups", "flat", updates, 2),
            ("different texts", "different", updates, 1),
            ("rows", "rows", updates, 0),
        ):
            line[heading] = f"{np.mean([row[name] for row in source]):.{digits}f}" if source else None
        for order, k in product(ORDERS, (1, DRAWN)):
            values = np.mean([pass_rates(run["evaluations"][last if rate else "0"][order], k) for run in runs], 0)
            line[f"{order} pass@{k}"] = half_width(interval(values), 1)
        lines.append(line)
    return table_of(lines)


def tables(results: Rows) -> Tables:
    return {"table": partial(table, results), "seeds": partial(table, results, by_seed=True)}


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("rollouts", __doc__, RESULT, small=True)
    parser.add_argument("--processes", type=int, default=1, help="how many runs share the device at a time")
    options = parser.parse_args(arguments)
    plan, device = SMALL if options.small else Plan(), str(choose_device(options.device))
    runs = [("start", 0, 0.0), *((name, seed, rate) for rate in RATES for name in SAMPLERS for seed in SEEDS)]
    results: list[Row] = [{"plan": vars(plan), **about(device, ["bench", "rollouts", *arguments])}]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for run in pool.imap(partial(train, plan=plan, device=device), runs):
            results.append(run)
            write(options.out, results)
    print(table(results))
    print(table(results, by_seed=True))
