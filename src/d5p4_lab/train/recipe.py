"""The class `Recipe` and the loss of masked diffusion.

The loss masks each token with chance p and weighs the token's cross-entropy by 1/p. A `Recipe` has everything that the
training loop needs to know about one of the models `countdown`, `programs` and `books`.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d5p4.rng import mix

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


def loaded(batches: torch.utils.data.Dataset, start: int, workers: int) -> Iterable[Any]:
    """Return the items start, start + 1, and so on of a dataset, made by so many processes, or by this process if 0."""
    return torch.utils.data.DataLoader(
        batches,
        batch_size=None,
        sampler=range(start, LAST_STEP),
        num_workers=workers,
        prefetch_factor=8 if workers else None,
        pin_memory=workers > 0,
    )


class Rates(NamedTuple):
    """The highest learning rates of a run: for the matrices of the blocks, and for all other parameters."""

    matrices: float
    others: float


class Card(NamedTuple):
    """The text of a model's card. The run adds the figures."""

    title: str
    about: str
    data: str
    licence: str
    limits: str


class Recipe(ABC):
    """The recipe of one model: its shape, its data as a function of (seed, step), its loss, figures and files."""

    name: ClassVar[str]
    rates: ClassVar[Rates] = Rates(matrices=0.02, others=3e-3)
    full: ClassVar[dict[str, int]]  # the shape of the shipped model
    small: ClassVar[dict[str, int]]  # the shape of a toy model
    card: Card
    data: str = ""  # describes the data; a continued run must have the same text
    scratch: Path | None = None  # a folder that `tidy` removes when the run has finished

    def __init__(self, device: torch.device, seed: int, toy: bool) -> None:
        self.device, self.seed, self.toy = device, seed, toy
        self.shape = self.small if toy else self.full
        self.cross_entropy = weighted_cross_entropy

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The content of config.json."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """Rows per batch."""

    @property
    @abstractmethod
    def row_length(self) -> int:
        """Tokens per row."""

    @abstractmethod
    def build(self) -> nn.Module:
        """Return the model with fresh float32 weights."""

    @abstractmethod
    def batches(self, start: int) -> Iterator[Any]:
        """Yield the batches of the steps start, start + 1, and so on. Batch i depends only on the seed and on i."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any, generator: torch.Generator) -> Tensor:
        """Return the scalar to minimise."""

    @abstractmethod
    def layers(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return the layers, to be compiled one by one. Equal layers share a program; LLaDA's first layer differs."""

    @abstractmethod
    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the weights under the names of the public layout."""

    @abstractmethod
    def write_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer's files and generation_config.json."""

    @abstractmethod
    def validate(self, folder: Path) -> dict[str, float]:
        """Return figures of the written model on held-out data."""

    def compile(self, model: nn.Module) -> None:
        for layer in self.layers(model):
            layer.compile()
        self.cross_entropy = torch.compile(weighted_cross_entropy, dynamic=True)

    def tidy(self) -> None:
        """Remove the scratch folder of this run."""
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def generator(self, step: int) -> torch.Generator:
        """Return the random generator for the masks of one step."""
        key = int(mix(self.seed, step)) & 0x7FFF_FFFF_FFFF_FFFF
        return torch.Generator(self.device).manual_seed(key)


def start_as_identity(model: nn.Module, endings: tuple[str, ...]) -> None:
    """Set the last matrices of the blocks to zero, so that at the start no block changes its input."""
    for name, parameter in model.named_parameters():
        if is_block_matrix(name, parameter) and name.endswith(endings):
            nn.init.zeros_(parameter)
