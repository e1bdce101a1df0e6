"""What `books` and `judge` share: rows cut from one long text, and figures a token and a byte."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from d5p4.errors import D5P4Error

from .corpus import Corpus
from .recipe import LAST, Rates, Recipe

LENGTH = 256
LICENCE = "The weights may be used as the texts allow; the code is d5p4's (Apache-2.0)."


class TextRecipe(Recipe):
    """A model of a corpus, LENGTH tokens at a time."""

    rates = Rates(matrices=0.02, others=3e-3)
    row_length = LENGTH

    def __init__(self, device: torch.device, seed: int, toy: bool, corpus: Corpus) -> None:
        super().__init__(device, seed, toy)
        require_rows(corpus)
        self.corpus, self.data = corpus, corpus.size
        self.vocabulary = corpus.tokenizer.get_vocab_size()

    @property
    def rows(self) -> int:
        return 16 if self.toy else 384

    def batches(self, start: int) -> Iterator[Tensor]:
        """Rows [B, LENGTH] cut anywhere from the text."""
        text = on_device(self.corpus.train, self.device)
        for step in range(start, LAST):
            yield crops(text, self.rows, LENGTH, self.generator(-1 - step))

    def write_tokenizer(self, folder: Path) -> None:
        self.corpus.tokenizer.save(str(folder / "tokenizer.json"), pretty=False)

    @torch.no_grad()
    def nats(self, model: nn.Module, rows: Tensor, draws: int) -> float:
        """Nats a token, the mean loss of rows [R, LENGTH] over `draws` draws of its randomness."""
        total = 0.0
        for draw in range(draws):
            for part in rows.split(self.rows):
                total += float(self.loss(model, part.to(self.device), self.generator(draw))) * len(part)
        return total / (draws * len(rows))

    def measured(self, model: nn.Module, draws: int, bound: str = "") -> dict[str, float]:
        """Figures on held-out text, and on as much of the training text."""
        rows = 8 if self.toy else 2000
        held_out, seen = (
            self.nats(model, spread_rows(tokens, rows), draws) for tokens in (self.corpus.val, self.corpus.train)
        )
        return language_figures(self.corpus, held_out, seen, bound)


def language_figures(corpus: Corpus, held_out: float, seen: float, bound: str = "") -> dict[str, float]:
    """Perplexity and bits a byte from nats a token on held-out and training text."""
    figures = {}
    for name, nats, tokens, size in (
        ("held-out text", held_out, corpus.val, corpus.val_bytes),
        ("training text", seen, corpus.train, corpus.train_bytes),
    ):
        figures[f"{name}: perplexity a token{bound}"] = math.exp(nats)
        figures[f"{name}: bits a byte{bound}"] = nats * len(tokens) / size / math.log(2)
    return figures


def require_rows(corpus: Corpus) -> None:
    """Training cuts rows from the one text, validation from the other."""
    for name, tokens in (("train", corpus.train), ("val", corpus.val)):
        if len(tokens) < LENGTH:
            raise D5P4Error(f"the {name} text has {len(tokens)} tokens, and a row takes {LENGTH}: give more text")


def on_device(tokens: np.ndarray, device: torch.device) -> Tensor:
    """The whole text [n] as int16, which holds every id of a corpus."""
    return torch.from_numpy(np.array(tokens).view(np.int16)).to(device)


def crops(text: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """[rows, length] int64, each row from a random place of text [n]."""
    starts = torch.randint(len(text) - length + 1, (rows, 1), generator=generator, device=text.device)
    return text[starts + torch.arange(length, device=text.device)].long()


def spread_rows(tokens: np.ndarray, rows: int) -> Tensor:
    """[rows, LENGTH] int64: rows evenly spread over the text."""
    starts = np.linspace(0, len(tokens) - LENGTH, rows).astype(np.int64)
    return torch.from_numpy(np.stack([tokens[s : s + LENGTH] for s in starts]).astype(np.int64))
