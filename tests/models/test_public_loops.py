"""Block-causal models write the tokens of the loops that their authors published, for prompts of every length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import d5p4
from tests.checkpoints import WRITERS
from tests.models.references import PlainLLaDA2, causal_logits, qwen_of

BLOCK = 4
PROMPTS = [[(7 * i + n) % 40 for i in range(n)] for n in range(1, 10)]


def logits_of(folder: Path, kind: str, mask: int | None = None) -> Callable[[Tensor], Tensor]:
    """Return a function that gives the logits [T, V] of a row [T] by an independent implementation. If the model is
    shifted, row i of the result predicts token i + 1."""
    if kind == "llada2_moe":
        return PlainLLaDA2(folder, torch.float64)
    reference = qwen_of(folder, torch.float64)
    return lambda row: causal_logits(reference, row[None], BLOCK, mask)[0]


@torch.no_grad()
def public_loop(
    logits: Callable[[Tensor], Tensor],
    banned: Tensor,
    mask: int,
    prompt: list[int],
    length: int,
    tau: float | None = None,
    shifted: bool = False,
    at_once: bool = False,
) -> list[int]:
    """The loops of SDAR, LLaDA2 and Fast-dLLM v2 (shifted, at_once) at temperature 0. The row is filled with masks to
    the end of a block, each block is revealed by confidence (one position per step, or all those above tau), and the
    row is cut. Fast-dLLM v2 first reveals the first token of a block, from the last row before the block."""
    total = -(-(len(prompt) + length) // BLOCK) * BLOCK
    row = torch.tensor(prompt + [mask] * (total - len(prompt)))
    for start in range(len(prompt) // BLOCK * BLOCK, total, BLOCK):
        if at_once and row[start] == mask:
            row[start] = logits(row[:start])[-1].masked_fill(banned, -torch.inf).argmax()
        inside = slice(start, start + BLOCK)
        while (row[inside] == mask).any():
            rows = logits(row[: start + BLOCK])
            rows = torch.cat([rows[:1], rows[:-1]]) if shifted else rows
            sure, token = rows[inside].masked_fill(banned, -torch.inf).softmax(-1).max(-1)
            sure = sure.masked_fill(row[inside] != mask, -1)
            shown = sure > (1 if tau is None else tau)
            shown[sure.argmax()] = True
            row[inside] = torch.where(shown, token, row[inside])
    return row[len(prompt) : len(prompt) + length].tolist()


GREEDY = dict(order="confidence", eos="free", stop=False, temperature=0.0, k=1, method="independent", logprobs=True)


@pytest.mark.parametrize("tau", [None, 0.1])
@pytest.mark.parametrize(
    "kind, config, loop",
    [
        ("sdar", {}, {}),
        ("llada2_moe", {}, {}),
        ("fast_dllm", {}, {"shifted": True, "at_once": True}),
        ("fast_dllm", {"next_token_first": False}, {"shifted": True}),
        ("fast_dllm_llama", {"causal_context": False}, {"shifted": True}),
        ("fast_dllm_llama", {"next_token_first": True}, {"shifted": True, "at_once": True}),
        ("fast_dllm_llama", {}, {"shifted": True}),
        ("sdar", {"causal_context": True}, {}),
    ],
)
def test_tokens_are_those_of_the_public_loops(
    tmp_path: Path, kind: str, config: dict, loop: dict, tau: float | None
) -> None:
    """The last block is whole, also where the answer ends inside it, and is cut afterwards."""
    folder = WRITERS[kind](tmp_path, dtype=torch.float64, **config)
    model = d5p4.load(folder, "cpu", "float64")
    logits = logits_of(folder, kind, model.mask_id if model.causal_context else None)
    options = GREEDY | ({} if tau is None else dict(reveal="threshold", tau=tau))
    cut = 0
    for length in (5, 8):
        result = d5p4.generate(model, PROMPTS, gen_length=length, **options)
        for p, prompt in enumerate(PROMPTS):
            wanted = public_loop(logits, model.head.banned, model.mask_id, prompt, length, tau, **loop)
            answer = result.answers[p][0]
            ended = next((i for i, token in enumerate(wanted) if token in model.eos_ids), length)
            assert answer == wanted[:ended], (length, prompt)
            assert len(result.logprobs[p][0]) == len(result.reveal_step[p][0]) == len(answer)
            cut += (len(prompt) + length) % BLOCK > 0
    assert cut > 10


@pytest.mark.parametrize(
    "options",
    [
        dict(method="tree", k=4),
        dict(method="tree", k=4, steps=6),
        dict(method="d5p4", k=2, w=3),
        dict(method="d5p4", k=2, w=3, steps=5),
        dict(method="d5p4", k=2, w=3, steps=2),
        dict(method="independent", k=4, order="ancestral", steps=7),
        dict(method="d5p4", k=2, w=2, reveal="threshold", tau=0.05),
        dict(method="tree", k=4, reveal="threshold", tau=0.05, cache="none"),
    ],
)
def test_the_first_token_of_a_block_is_drawn_alone(tmp_path: Path, options: dict) -> None:
    """Also at temperature 1, with any number of steps. A tree branches on it."""
    model = d5p4.load(WRITERS["fast_dllm"](tmp_path, dtype=torch.float64), "cpu", "float64")
    common = dict(temperature=1.0, eos="never", gen_length=8, logprobs=True, seed=1)
    result = d5p4.generate(model, [[1, 2, 3, 4], [5, 6, 7]], **common | options)
    for p, edges in enumerate([(0, 4), (1, 5)]):
        for steps in result.reveal_step[p]:
            assert len(steps) == 8
            for edge in edges:
                others = steps[edge + 1 : edge + 4]
                assert steps[edge] < min(others), steps
    if options["method"] == "tree":
        assert len({answer[0] for answer in result.answers[0]}) > 1
