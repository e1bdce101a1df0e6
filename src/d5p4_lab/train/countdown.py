"""The recipe of the model `countdown`, which solves arithmetic puzzles and has LLaDA's layout and LLaDA's loss.

The loss covers only answer tokens. Prompts are unmasked, except that in one of ten rows the whole prompt is masked,
which trains the unconditional predictions that guidance needs. The window of an answer has a random length, so any
`gen_length` works.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor, nn

from d5p4.models.llada import LLaDA

from . import countdown_data as task
from .folder import write_json
from .recipe import Card, Recipe, chances, loaded, masks, start_as_identity

PROMPT = 24  # positions for a prompt; prompts need at most 17, but rows of 24 + 48 tokens suit the attention kernels
ANSWER = max(task.WINDOW.values())
DROPPED = 0.1  # the share of rows whose whole prompt is masked


class Rows(NamedTuple):
    prompts: Tensor  # [B, PROMPT] int64 token ids; each prompt ends at the last position
    prompt_lengths: Tensor  # [B]
    answers: Tensor  # [B, ANSWER] int64 token ids; after an answer come end-of-text tokens
    least: Tensor  # [B] the shortest window (in tokens) that fits any answer to a puzzle of this many numbers


class Problems(torch.utils.data.Dataset):
    """The training problems as a dataset. Item i of the dataset is the batch of step i."""

    def __init__(self, rows: int, seed: int) -> None:
        self.rows, self.seed = rows, seed

    def __getitem__(self, index: int) -> Rows:
        problems = task.batch(self.rows, self.seed, index)
        blank = torch.full((self.rows, PROMPT - problems.prompts.shape[1]), task.END)
        prompts = torch.cat((blank, torch.from_numpy(problems.prompts).long()), dim=1)
        least = torch.zeros(max(task.WINDOW) + 1, dtype=torch.int64)
        for count, window in task.WINDOW.items():
            least[count] = window
        answers = torch.from_numpy(problems.answers).long()
        return Rows(prompts, torch.from_numpy(problems.lengths), answers, least[torch.from_numpy(problems.counts)])


class Countdown(Recipe):
    name = "countdown"
    full = {"d_model": 320, "n_layers": 8, "n_heads": 5, "mlp_hidden_size": 832}
    small = {"d_model": 96, "n_layers": 3, "n_heads": 3, "mlp_hidden_size": 256}
    row_length = PROMPT + ANSWER
    card = Card(
        title="countdown",
        about="Reaches a target with given numbers, each used once: prompt `86,28,13,31:96`, answer "
        "`86+28=114,31-13=18,114-18=96`. Three to five numbers from 1 to 99, targets from 10 to 99. A masked diffusion "
        "model in LLaDA's layout over 17 characters, an end and a mask. One puzzle has many right answers, and a few "
        "lines can check them: `from d5p4.eval.countdown import is_right`.",
        data="made by `d5p4.eval.countdown` while training: uniform over all valid ways to reach a target, so a puzzle "
        "is as frequent as it has solutions; 10 % with three numbers, 50 % with four, 40 % with five. One puzzle in "
        "64, chosen by a hash of its numbers and target, is held out.",
        licence="Apache-2.0, like d5p4. No outside data was used.",
        limits="Anything but these puzzles. It knows no words, no values above 999 and no puzzles without a solution: "
        "it answers those too, wrongly and with confidence. Check its answers.",
    )

    @property
    def config(self) -> dict[str, Any]:
        size = len(task.CHARACTERS) + 2
        return {
            "model_type": "llada",
            "architectures": ["LLaDAModelLM"],
            **self.shape,
            "n_kv_heads": self.shape["n_heads"],
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-5,
            "max_sequence_length": 96,
            "vocab_size": size,
            "embedding_size": size,
            "mask_token_id": task.MASK,
            "eos_token_id": task.END,
            "pad_token_id": task.END,
            "weight_tying": False,
        }

    @property
    def rows(self) -> int:
        return 32 if self.toy else 1536

    def build(self) -> nn.Module:
        model = LLaDA(self.config)
        start_as_identity(model, ("attn_out.weight", "ff_out.weight"))
        return model

    def layers(self, model: nn.Module) -> Iterable[nn.Module]:
        assert isinstance(model, LLaDA)
        return model.blocks

    def batches(self, start: int) -> Iterator[Rows]:
        """Yield batches. Worker processes make the batches for a GPU. Without a GPU, this process makes them."""
        for rows in loaded(Problems(self.rows, self.seed), start, 8 if self.device.type == "cuda" else 0):
            yield Rows(*(part.to(self.device, non_blocking=True) for part in rows))

    def loss(self, model: nn.Module, batch: Rows, generator: torch.Generator) -> Tensor:
        assert isinstance(model, LLaDA)
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
        head = model.head
        return self.cross_entropy(states, head.weight, head.bias, head.banned, batch.answers[masked], weights)

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        return {LLaDA.prefix + name: parameter for name, parameter in model.named_parameters()}

    def write_tokenizer(self, folder: Path) -> None:
        vocabulary = {character: i for i, character in enumerate(task.CHARACTERS)}
        vocabulary |= {"<|endoftext|>": task.END, "<|mask|>": task.MASK}
        codec = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=""))
        codec.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        codec.decoder = decoders.Fuse()
        codec.add_special_tokens(["<|endoftext|>", "<|mask|>"])
        codec.save(str(folder / "tokenizer.json"))
        # The tree: docs/tree-measurements.md. The others: best in sweeps at temperature 1, for puzzles of four numbers.
        tree = {"temperature": 0.0, "diversity": 1.0, "reveal": "threshold", "tau": 0.99, "spare": 4}
        methods = {"tree": tree, "d5p4": {"beta": 100.0}, "diverse-beam": {"alpha": 100.0}, "d5p4x": {"beta": 3.0}}
        defaults = {"grader": "countdown", "length": ANSWER, "order": "confidence", "methods": methods}
        write_json(folder / "generation_config.json", {"d5p4": defaults})

    def validate(self, folder: Path) -> dict[str, float]:
        from d5p4.generate import generate
        from d5p4.models.load import load

        model = load(folder, device=self.device, dtype="float32")
        figures = {}
        for count in (3, 4, 5):
            puzzles = task.problems(20 if self.toy else 500, numbers=count, seed=1)
            prompts = [puzzle.prompt for puzzle in puzzles]
            result = generate(model, prompts, k=1, method="independent", gen_length=task.WINDOW[count], seed=self.seed)
            right = [task.is_right(puzzle, texts[0]) for puzzle, texts in zip(puzzles, result.texts, strict=True)]
            solved = f"share of {len(puzzles)} held-out puzzles of {count} numbers solved by one sample"
            figures[solved] = sum(right) / len(right)
        return figures
