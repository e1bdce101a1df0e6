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


def logits_of(folder: Path, kind: str) -> Callable[[Tensor], Tensor]:
    """Return a function that gives the logits [T, V] of a row [T] by an independent implementation."""
    if kind == "llada2_moe":
        return PlainLLaDA2(folder, torch.float64)
    reference = qwen_of(folder, torch.float64)
    return lambda row: causal_logits(reference, row[None], BLOCK)[0]


def public_loop(
    logits: Callable[[Tensor], Tensor], banned: Tensor, mask: int, prompt: list[int], length: int, tau: float | None
) -> list[int]:
    """The loop of SDAR and LLaDA2, at temperature 0. The row is filled with masks to the end of a block, each block is
    revealed by confidence (one position per step, or all those above tau), and the row is cut."""
    total = -(-(len(prompt) + length) // BLOCK) * BLOCK
    row = torch.tensor(prompt + [mask] * (total - len(prompt)))
    for start in range(len(prompt) // BLOCK * BLOCK, total, BLOCK):
        inside = slice(start, start + BLOCK)
        while (row[inside] == mask).any():
            sure, token = logits(row[: start + BLOCK])[inside].masked_fill(banned, -torch.inf).softmax(-1).max(-1)
            sure = sure.masked_fill(row[inside] != mask, -1)
            shown = sure > (1 if tau is None else tau)
            shown[sure.argmax()] = True
            row[inside] = torch.where(shown, token, row[inside])
    return row[len(prompt) : len(prompt) + length].tolist()


@pytest.mark.parametrize("tau", [None, 0.1])
@pytest.mark.parametrize("kind", ["sdar", "llada2_moe"])
def test_the_last_block_is_whole_as_in_the_public_loops(tmp_path: Path, kind: str, tau: float | None) -> None:
    folder = WRITERS[kind](tmp_path, dtype=torch.float64)
    model, logits = d5p4.load(folder, "cpu", "float64"), logits_of(folder, kind)
    options = dict(
        order="confidence", eos="free", stop=False, temperature=0.0, k=1, method="independent", logprobs=True
    )
    options |= {} if tau is None else dict(reveal="threshold", tau=tau)
    cut = 0
    for length in (5, 8):
        result = d5p4.generate(model, PROMPTS, gen_length=length, **options)
        for p, prompt in enumerate(PROMPTS):
            wanted = public_loop(logits, model.head.banned, model.mask_id, prompt, length, tau)
            answer = result.answers[p][0]
            ended = next((i for i, token in enumerate(wanted) if token in model.eos_ids), length)
            assert answer == wanted[:ended], (length, prompt)
            assert len(result.logprobs[p][0]) == len(result.reveal_step[p][0]) == len(answer)
            cut += (len(prompt) + length) % BLOCK > 0
    assert cut > 10
