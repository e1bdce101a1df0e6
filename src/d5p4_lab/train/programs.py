"""The recipe of the model `programs`, which writes list programs from examples and has SDAR's layout.

SDAR is block-causal: a block of tokens is decoded when all earlier blocks are known, and sees nothing after itself.
A training row therefore ends with one block of the answer. The loss masks answer tokens of this block alone, each with
the chance of its row. In one of twenty rows the whole prompt is masked, which trains the unconditional predictions that
guidance needs.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from d5p4.eval.programs import is_right
from d5p4.models.qwen import SDAR

from . import programs_data as task
from .recipe import Recipe, chances, masks

DROPPED = 0.05  # the share of rows whose whole prompt is masked


class Rows(NamedTuple):
    tokens: Tensor  # [B, ROW or less] token ids; each row ends at the last position
    lengths: Tensor  # [B] tokens per row
    prompts: Tensor  # [B] tokens per prompt
    opened: Tensor  # [B] tokens at the end of each row that may be masked


class Programs(Recipe):
    name = "programs"
    small = {"hidden_size": 96, "num_hidden_layers": 4, "intermediate_size": 192}
    small |= {"num_attention_heads": 3, "num_key_value_heads": 3}
    batch_rows = (2048, 128)
    row_length = task.ROW
    at_start_zero = ("o_proj.weight", "down_proj.weight")

    def __init__(self, device: torch.device, seed: int, toy: bool) -> None:
        super().__init__(device, seed, toy)
        self.mix = task.TOY_MIX if toy else task.MIX
        shares = ", ".join(f"{share:.0%} with {count}" for count, share in self.mix.items())
        self.data = f"{shares} operations"

    def new_model(self) -> nn.Module:
        model = SDAR(self.config)
        nn.init.normal_(model.unembedding[0], std=self.config["hidden_size"] ** -0.5)  # it is also the head
        return model

    def batches(self, start: int) -> Iterator[Rows]:
        make = partial(task.batch, self.rows, self.seed, mix=self.mix)
        for tokens, *sizes in self.generated(make, start, workers=14):
            if self.device.type != "cuda":  # a GPU gets rows of one length, so that the model is compiled once
                tokens = tokens[:, -int(sizes[0].max()) :]
            yield Rows(tokens, *sizes)

    def loss(self, model: SDAR, batch: Rows, generator: torch.Generator) -> Tensor:
        count, width = batch.tokens.shape
        chance = chances(count, generator)
        left = torch.arange(width, 0, -1, device=self.device)  # tokens from each position to the end of the row
        masked = masks(chance, width, generator) & (left <= batch.opened[:, None])
        known = left <= batch.lengths[:, None]
        dropped = torch.rand(count, generator=generator, device=self.device) < DROPPED
        prompt = known & (left > (batch.lengths - batch.prompts)[:, None])
        tokens = batch.tokens.masked_fill(masked | (prompt & dropped[:, None]), task.MASK)
        # The loss is summed over all open columns, with weight 0 where nothing is masked: the shape of the rows is then
        # known without waiting for the device.
        states = model.body(tokens, known).states[:, -task.BLOCK :].flatten(0, 1)
        weights = (masked / (chance * batch.opened * count)[:, None])[:, -task.BLOCK :].flatten()
        return self.cross_entropy(states, model.head, batch.tokens[:, -task.BLOCK :].flatten(), weights)

    def validate(self, folder: Path) -> dict[str, float]:
        figures = {}
        for count in (count for count in self.mix if count >= task.HELDOUT_OPERATIONS[0]):
            drawn = task.tasks(100 if self.toy else 500, operations=count, seed=1)
            name = f"share of {len(drawn)} held-out tasks of {count} operations solved by one sample at temperature 1"
            figures[name] = self.share_solved(folder, drawn, is_right)
        return figures
