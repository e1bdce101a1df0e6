"""What a model needs to be trained: the contract between the loop and `countdown`, `books`, `judge`."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from d5p4.rng import mix

from .masking import weighted_cross_entropy
from .optimiser import is_block_matrix

LAST = 2**40  # no run has so many steps


class Rates(NamedTuple):
    """Learning rates at their highest."""

    matrices: float
    others: float


class Card(NamedTuple):
    """What only people know about a model; the figures are filled in by the run."""

    title: str
    about: str
    data: str
    licence: str
    limits: str


class Recipe(ABC):
    """One model: its shape, its data as a function of (seed, step), its loss, its figures, its files."""

    name: ClassVar[str]
    rates: ClassVar[Rates]
    card: Card
    data: str = ""  # what it learns from, in words that tell two corpora apart
    scratch: Path | None = None  # a folder only this run needs

    def __init__(self, device: torch.device, seed: int, toy: bool) -> None:
        self.device, self.seed, self.toy = device, seed, toy
        self.cross_entropy = weighted_cross_entropy

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """config.json."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """Rows of a batch."""

    @property
    @abstractmethod
    def row_length(self) -> int:
        """Tokens of a row."""

    @abstractmethod
    def build(self) -> nn.Module:
        """The model with fresh float32 weights."""

    @abstractmethod
    def batches(self, start: int) -> Iterator[Any]:
        """The batches of steps start, start + 1, ...; batch i depends on the seed and i alone."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any, generator: torch.Generator) -> Tensor:
        """A scalar, to be minimised."""

    @abstractmethod
    def layers(self, model: nn.Module) -> Iterable[nn.Module]:
        """The layers, all of one kind: compiled one by one they share a compilation (LLaDA: the first has its own)."""

    @abstractmethod
    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """The weights under the names of the public layout."""

    @abstractmethod
    def write_tokenizer(self, folder: Path) -> None:
        """The tokenizer's files and generation_config.json."""

    @abstractmethod
    def validate(self, folder: Path) -> dict[str, float]:
        """Figures on held-out data, of the files as written."""

    def compile(self, model: nn.Module) -> None:
        for layer in self.layers(model):
            layer.compile()
        self.cross_entropy = torch.compile(weighted_cross_entropy, dynamic=True)

    def tidy(self) -> None:
        """Remove what only this run needed."""
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def generator(self, step: int) -> torch.Generator:
        """The randomness of one step's masks."""
        key = int(mix(self.seed, step)) & 0x7FFF_FFFF_FFFF_FFFF
        return torch.Generator(self.device).manual_seed(key)


def start_as_identity(model: nn.Module, endings: tuple[str, ...]) -> None:
    """Zero the last matrices of the blocks, so that at first each adds nothing."""
    for name, parameter in model.named_parameters():
        if is_block_matrix(name, parameter) and name.endswith(endings):
            nn.init.zeros_(parameter)
