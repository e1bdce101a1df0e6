"""The recipe of the model `countdown`, which solves arithmetic puzzles and has LLaDA's layout and LLaDA's loss.

The loss covers only answer tokens. Prompts are unmasked, except that in one of ten rows the whole prompt is masked,
which trains the unconditional predictions that guidance needs. The window of an answer has a random length, so any
`gen_length` works.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d5p4.eval.countdown import is_right
from d5p4.models.llada import LLaDA

from ..puzzles import problems
from . import countdown_data as task
from .recipe import Recipe, chances, masks

PROMPT = 24  # positions for a prompt; prompts need at most 17, but rows of 24 + 48 tokens suit the attention kernels
ANSWER = max(task.WINDOW.values())
DROPPED = 0.1  # the share of rows whose whole prompt is masked


class Rows(NamedTuple):
    prompts: Tensor  # [B, PROMPT] int64 token ids; each prompt ends at the last position
    prompt_lengths: Tensor  # [B]
    answers: Tensor  # [B, ANSWER] int64 token ids; after an answer come end-of-text tokens
    least: Tensor  # [B] the shortest window (in tokens) that fits any answer to a puzzle of this many numbers


class Countdown(Recipe):
    name = "countdown"
    small = {"d_model": 96, "n_layers": 3, "n_heads": 3, "n_kv_heads": 3, "mlp_hidden_size": 256}
    batch_rows = (1536, 32)
    row_length = PROMPT + ANSWER
    at_start_zero = ("o_proj.weight", "down_proj.weight")

    def new_model(self) -> nn.Module:
        return LLaDA(self.config)

    def batches(self, start: int) -> Iterator[Rows]:
        least = torch.tensor([task.WINDOW.get(count, 0) for count in range(max(task.WINDOW) + 1)], device=self.device)
        for parts in self.generated(partial(task.batch, self.rows, self.seed), start, workers=8):
            prompts, lengths, answers, counts = parts
            yield Rows(F.pad(prompts, (PROMPT - task.PROMPT, 0), value=task.END), lengths, answers, least[counts])

    def loss(self, model: LLaDA, batch: Rows, generator: torch.Generator) -> Tensor:
        count = len(batch.answers)
        chance = chances(count, generator)
        draw = torch.rand(2, count, generator=generator, device=self.device)
        window = batch.least + (draw[0] * (ANSWER - batch.least + 1)).long()
        inside = torch.arange(ANSWER, device=self.device) < window[:, None]
        masked = masks(chance, ANSWER, generator) & inside
        shown = batch.answers.masked_fill(masked, task.MASK)
        prompts = batch.prompts.masked_fill((draw[1] < DROPPED)[:, None], task.MASK)
        known = torch.arange(PROMPT, device=self.device) >= PROMPT - batch.prompt_lengths[:, None]
        # No position attends to the padding before a prompt or to the positions after an answer's window.
        states = model.body(torch.cat((prompts, shown), 1), torch.cat((known, inside), 1)).states[:, PROMPT:][masked]
        weights = (1 / (chance * window * count))[:, None].expand_as(masked)[masked]
        return self.cross_entropy(states, model.head, batch.answers[masked], weights)

    def validate(self, folder: Path) -> dict[str, float]:
        figures = {}
        for count, window in task.WINDOW.items():
            puzzles = problems(20 if self.toy else 500, numbers=count, seed=1)
            name = f"share of {len(puzzles)} held-out puzzles of {count} numbers solved by one sample"
            figures[name] = self.share_solved(folder, puzzles, is_right, gen_length=window)
        return figures
