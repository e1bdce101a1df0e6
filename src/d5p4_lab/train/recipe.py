"""The class `Recipe`, and the loss of masked diffusion: mask tokens with chance p, weigh their cross-entropy by 1/p."""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d5p4.generate import generate
from d5p4.models.checkpoint import read_json
from d5p4.models.load import find, load
from d5p4.rng import mix
from d5p4.types import Head

from .folder import write_json, write_weights
from .optimiser import is_block_matrix

LAST_STEP = 2**40  # loops over steps have this end, which no run reaches
LEAST = 1e-3  # the masking chance p is at least this, so that 1/p stays bounded


def chances(rows: int, generator: torch.Generator) -> Tensor:
    """Return a masking chance for each row. Even spacing over (LEAST, 1) makes the loss less noisy."""
    device = generator.device
    shift = torch.rand((), generator=generator, device=device)
    even = (torch.arange(rows, device=device) / rows + shift) % 1
    return (1 - LEAST) * even + LEAST


def masks(chance: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Return random bool masks [rows, length]. A position is True with the chance of its row."""
    return torch.rand(len(chance), length, generator=generator, device=chance.device) < chance[:, None]


def weighted_cross_entropy(
    states: Tensor, weight: Tensor, bias: Tensor | None, banned: Tensor, targets: Tensor, weights: Tensor
) -> Tensor:
    """Return the sum over M tokens of weight [M] × cross-entropy of the target [M], from hidden states [M, D]."""
    logits = F.linear(states, weight, bias).float().masked_fill(banned, -torch.inf)
    return (F.cross_entropy(logits, targets, reduction="none") * weights).sum()


class Generated(torch.utils.data.Dataset):
    """Batches of numpy arrays from a function of the step, as tensors."""

    def __init__(self, make: Callable[[int], Iterable[Any]]) -> None:
        self.make = make

    def __getitem__(self, step: int) -> list[Tensor]:
        return [torch.from_numpy(part) for part in self.make(step)]


class Recipe(ABC):
    """The recipe of one model: its shape, its data as a function of (seed, step), its loss, figures and files."""

    name: ClassVar[str]
    rates: ClassVar[tuple[float, float]] = (0.02, 3e-3)  # the highest: for matrices of blocks, for other parameters
    small: ClassVar[dict[str, int]]  # the shape of a toy model, as entries of config.json
    batch_rows: ClassVar[tuple[int, int]]  # the rows of a batch of the shipped model, and of a toy model
    row_length: int  # tokens per row
    at_start_zero: ClassVar[tuple[str, ...]] = ()  # the last matrices of the blocks: at first, blocks change nothing
    average: ClassVar[float] = 0.999  # after each step, average = average * average + (1 - average) * weights
    autocast: ClassVar[bool] = True  # whether training on CUDA chooses bfloat16 by itself
    data: str = ""  # describes the data; a continued run must have the same text

    def __init__(self, device: torch.device, seed: int, toy: bool) -> None:
        self.device, self.seed, self.toy = device, seed, toy
        self.rows = self.batch_rows[toy]
        self._cross_entropy = weighted_cross_entropy

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json: that of the shipped model of this name, with the shape of a toy model."""
        return read_json(find(self.name) / "config.json") | (self.small if self.toy else {})

    @abstractmethod
    def new_model(self) -> nn.Module:
        """Return the model with fresh float32 weights."""

    @abstractmethod
    def batches(self, start: int) -> Iterator[Any]:
        """Yield the batches of the steps start, start + 1, and so on. Batch i depends only on the seed and on i."""

    @abstractmethod
    def loss(self, model: Any, batch: Any, generator: torch.Generator) -> Tensor:
        """Return the scalar to minimise."""

    @abstractmethod
    def validate(self, folder: Path) -> dict[str, float]:
        """Return figures of the written model on held-out data."""

    def write_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer and the default options of the shipped model of this name."""
        for name in ("tokenizer.json", "generation_config.json"):
            shutil.copyfile(find(self.name) / name, folder / name)

    def build(self) -> nn.Module:
        model = self.new_model()
        for name, parameter in model.named_parameters():
            if is_block_matrix(name, parameter) and name.endswith(self.at_start_zero):
                nn.init.zeros_(parameter)
        return model

    def write(self, folder: Path, model: nn.Module) -> str:
        """Write the weights and config.json, and return the size of the weights for the card."""
        size = write_weights(folder, self.tensors(model))
        write_json(folder / "config.json", self.config)
        return f"{size / 2**20:.1f} MiB, bfloat16"

    def tensors(self, model: Any) -> dict[str, Tensor]:
        """Return the weights under the names of the public layout."""
        return {model.stored_names(name): parameter for name, parameter in model.named_parameters()}

    def compile(self, model: nn.Module) -> None:
        """Compile the layers one by one. Equal layers share a program; LLaDA's first layer differs."""
        for layer in next(part for part in model.modules() if isinstance(part, nn.ModuleList)):
            layer.compile()
        self._cross_entropy = torch.compile(weighted_cross_entropy, dynamic=True)

    def cross_entropy(self, states: Tensor, head: Head, targets: Tensor, weights: Tensor) -> Tensor:
        return self._cross_entropy(states, head.weight, head.bias, head.banned, targets, weights)

    def generated(self, make: Callable[[int], Iterable[Any]], start: int, workers: int) -> Iterator[list[Tensor]]:
        """Yield the batches of the steps start, start + 1, and so on. For a GPU, worker processes make them."""
        workers = workers if self.device.type == "cuda" else 0
        source = torch.utils.data.DataLoader(
            Generated(make),
            batch_size=None,
            sampler=range(start, LAST_STEP),
            num_workers=workers,
            prefetch_factor=8 if workers else None,
            pin_memory=workers > 0,
        )
        for parts in source:
            yield [part.to(self.device, non_blocking=True).long() for part in parts]

    def share_solved(
        self, folder: Path, problems: Sequence[Any], is_right: Callable[[Any, str], bool], **options: Any
    ) -> float:
        """Return the share of problems that one sample solves."""
        model = load(folder, device=self.device, dtype="float32")
        prompts = [problem.prompt for problem in problems]
        result = generate(model, prompts, k=1, method="independent", seed=self.seed, **options)
        return sum(map(is_right, problems, (texts[0] for texts in result.texts))) / len(problems)

    def generator(self, step: int) -> torch.Generator:
        """Return the random generator for the masks of one step."""
        key = int(mix(self.seed, step)) & 0x7FFF_FFFF_FFFF_FFFF
        return torch.Generator(self.device).manual_seed(key)
