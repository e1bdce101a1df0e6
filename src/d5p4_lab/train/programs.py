"""The recipe of the model `programs`, which writes list programs from examples and has SDAR's layout.

SDAR is block-causal: a block of tokens is decoded when all earlier blocks are known, and sees nothing after itself.
A training row therefore ends with one block of the answer. The loss masks answer tokens of this block alone, each with
the chance of its row. In one of twenty rows the whole prompt is masked, which trains the unconditional predictions that
guidance needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
from tokenizers import Regex, decoders, models, pre_tokenizers
from torch import Tensor, nn

from d5p4.eval.programs import is_right
from d5p4.models.qwen import SDAR

from . import programs_data as task
from .folder import write_json
from .recipe import Card, Recipe, chances, loaded, masks, start_as_identity

DROPPED = 0.05  # the share of rows whose whole prompt is masked


class Rows(NamedTuple):
    tokens: Tensor  # [B, ROW or less] token ids; each row ends at the last position
    lengths: Tensor  # [B] tokens per row
    prompts: Tensor  # [B] tokens per prompt
    opened: Tensor  # [B] tokens at the end of each row that may be masked


class Tasks(torch.utils.data.Dataset):
    """The training tasks as a dataset. Item i of the dataset is the batch of step i."""

    def __init__(self, rows: int, seed: int, mix: Mapping[int, float]) -> None:
        self.rows, self.seed, self.mix = rows, seed, mix

    def __getitem__(self, index: int) -> Rows:
        return Rows(*map(torch.from_numpy, task.batch(self.rows, self.seed, index, self.mix)))


class Programs(Recipe):
    name = "programs"
    full = {"hidden_size": 160, "num_hidden_layers": 8, "num_attention_heads": 5, "intermediate_size": 416}
    small = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 192}
    row_length = task.ROW

    def __init__(self, device: torch.device, seed: int, toy: bool) -> None:
        super().__init__(device, seed, toy)
        self.mix = task.TOY_MIX if toy else task.MIX
        shares = ", ".join(f"{share:.0%} with {count}" for count, share in self.mix.items())
        self.data = f"{shares} operations"
        self.card = Card(
            title="programs",
            about="This model writes a short list program that satisfies three examples. For the prompt "
            "`4 -7 2 9>2 4 9|-3 8 -1 6 1>1 6 8|5 -2 7>5 7:` one right answer is `keep pos sort`. The language has 28 "
            "operations, which `d5p4.eval.programs` lists and runs; numbers are -99 to 99. The model is a block-causal "
            f"masked diffusion model in SDAR's layout with blocks of {task.BLOCK} tokens. Each number and each "
            "word of a program is one token. Only predictions of masked tokens were trained, so answers are ranked by "
            "the log-probabilities that their tokens had when they were revealed. One task has many right programs, "
            "and `d5p4.eval.programs.is_right` checks them.",
            data="`d5p4_lab.train.programs_data` makes the tasks during training: programs and inputs are uniform over "
            f"all valid draws; {self.data}. Every operation is needed for the examples. One function in 64, chosen by "
            "a hash of its results on eight fixed lists, is held out: no program of the training data computes "
            "the function of a held-out task.",
            licence="Apache-2.0, like d5p4. No outside data was used.",
            limits="Anything but these tasks. It was trained on prompts of three examples with inputs of three to six "
            f"numbers from -9 to 9, and on programs of {min(self.mix)} to {max(self.mix)} operations. It also "
            "answers tasks that have no solution, wrongly and with confidence. Check its answers, also on inputs "
            "that the prompt does not show.",
        )

    @property
    def config(self) -> dict[str, Any]:
        return {
            "model_type": "sdar",
            "architectures": ["SDARForCausalLM"],
            **self.shape,
            "num_key_value_heads": self.shape["num_attention_heads"],
            "hidden_act": "silu",
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 128,
            "block_length": task.BLOCK,
            "carry_over": True,  # predictions at revealed positions are not trained, and rank answers badly
            "vocab_size": len(task.VOCABULARY) + 2,
            "mask_token_id": task.MASK,
            "eos_token_id": task.END,
            "pad_token_id": task.END,
            "tie_word_embeddings": True,
        }

    @property
    def rows(self) -> int:
        return 128 if self.toy else 2048

    def build(self) -> nn.Module:
        model = SDAR(self.config)
        nn.init.normal_(model.unembedding[0], std=self.config["hidden_size"] ** -0.5)  # it is also the head
        start_as_identity(model, ("o_proj.weight", "down_proj.weight"))
        return model

    def layers(self, model: nn.Module) -> Iterable[nn.Module]:
        assert isinstance(model, SDAR)
        return model.parts()[1]

    def batches(self, start: int) -> Iterator[Rows]:
        """Yield batches. Worker processes make the batches for a GPU. Without a GPU, this process makes them."""
        on_gpu = self.device.type == "cuda"
        for rows in loaded(Tasks(self.rows, self.seed, self.mix), start, 14 if on_gpu else 0):
            tokens, *sizes = (part.to(self.device, non_blocking=True).long() for part in rows)
            if not on_gpu:  # a GPU gets rows of one length, so that the model is compiled once
                tokens = tokens[:, -int(sizes[0].max()) :]
            yield Rows(tokens, *sizes)

    def loss(self, model: nn.Module, batch: Rows, generator: torch.Generator) -> Tensor:
        assert isinstance(model, SDAR)
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
        targets = batch.tokens[:, -task.BLOCK :].flatten()
        head = model.head
        return self.cross_entropy(states, head.weight, head.bias, head.banned, targets, weights)

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        return dict(model.named_parameters())

    def write_tokenizer(self, folder: Path) -> None:
        vocabulary = {token: i for i, token in enumerate(task.VOCABULARY)}
        vocabulary |= {"<|endoftext|>": task.END, "<|MASK|>": task.MASK}
        codec = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=""))
        codec.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[^ >|:]+|[>|:]"), "isolated")
        codec.decoder = decoders.Fuse()
        codec.add_special_tokens(["<|endoftext|>", "<|MASK|>"])
        codec.save(str(folder / "tokenizer.json"))
        # In sweeps on held-out tasks of three and four operations, no other values were clearly better.
        methods = {
            "tree": {"temperature": 0.0, "diversity": 1.0, "reveal": "threshold", "tau": 0.99},
            "d5p4": {"beta": 20.0},
            "diverse-beam": {"alpha": 20.0},
            "d5p4x": {"beta": 3.0},
        }
        defaults = {"grader": "programs", "length": task.WINDOW, "order": "confidence", "eos": "last"}
        defaults |= {"methods": methods}
        write_json(folder / "generation_config.json", {"d5p4": defaults})

    def validate(self, folder: Path) -> dict[str, float]:
        from d5p4.generate import generate
        from d5p4.models.load import load

        model = load(folder, device=self.device, dtype="float32")
        figures = {}
        for count in (count for count in self.mix if count >= task.HELDOUT_OPERATIONS[0]):
            problems = task.tasks(100 if self.toy else 500, operations=count, seed=1)
            prompts = [problem.prompt for problem in problems]
            result = generate(model, prompts, k=1, method="independent", seed=self.seed)
            right = [is_right(problem, texts[0]) for problem, texts in zip(problems, result.texts, strict=True)]
            solved = (
                f"share of {len(problems)} held-out tasks of {count} operations solved by one sample at temperature 1"
            )
            figures[solved] = sum(right) / len(right)
        return figures
