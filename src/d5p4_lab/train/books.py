"""Two models of the same prose with the same tokenizer: `books` writes texts, and `judge` scores these texts.

`books` has MDLM's layout (adaLN blocks, no time conditioning) and MDLM's loss. `judge` reads from left to right and has
transformers' Llama layout. Both models learn from rows of LENGTH tokens, cut from one long text at random places.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from d5p4.errors import D5P4Error
from d5p4.models.mdlm import MDLM

from .corpus import Corpus
from .recipe import LAST_STEP, Card, Recipe, chances, masks

LENGTH = 256
DRAWS = 8  # the bound on the loss is estimated with this many random noise levels per row
LICENCE = "The weights may be used as the texts allow; the code is d5p4's (Apache-2.0)."


class TextRecipe(Recipe):
    """The recipe of a model that learns a corpus, LENGTH tokens at a time."""

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
        """Yield rows [B, LENGTH] from random places of the text."""
        text = on_device(self.corpus.train, self.device)
        for step in range(start, LAST_STEP):
            yield crops(text, self.rows, LENGTH, self.generator(-1 - step))

    def write_tokenizer(self, folder: Path) -> None:
        self.corpus.tokenizer.save(str(folder / "tokenizer.json"), pretty=False)

    @torch.no_grad()
    def nats(self, model: nn.Module, rows: Tensor, draws: int) -> float:
        """Return the mean loss of rows [R, LENGTH] in nats per token. Each row is masked at random `draws` times."""
        total = 0.0
        for draw in range(draws):
            for part in rows.split(self.rows):
                total += float(self.loss(model, part.to(self.device), self.generator(draw))) * len(part)
        return total / (draws * len(rows))

    def measured(self, model: nn.Module, draws: int, bound: str = "") -> dict[str, float]:
        """Return perplexity and bits per byte on held-out text, and on as many rows of the training text."""
        rows = 8 if self.toy else 2000
        held_out, trained = (
            self.nats(model, spread_rows(tokens, rows), draws) for tokens in (self.corpus.val, self.corpus.train)
        )
        return language_figures(self.corpus, held_out, trained, bound)


class Books(TextRecipe):
    name = "books"
    full = {"hidden_dim": 320, "n_blocks": 7, "n_heads": 5, "cond_dim": 16}
    small = {"hidden_dim": 96, "n_blocks": 2, "n_heads": 3, "cond_dim": 16}

    def __init__(self, device: torch.device, seed: int, toy: bool, corpus: Corpus) -> None:
        super().__init__(device, seed, toy, corpus)
        self.card = Card(
            title="books",
            about=f"Continues, fills in and invents prose like the texts it was trained on, {LENGTH} tokens at a time. "
            "A masked diffusion model in MDLM's layout, with tied embeddings and a byte-level BPE of "
            f"{self.vocabulary:,} tokens trained on the same texts.",
            data=self.data,
            licence=LICENCE,
            limits="Facts, instructions, anything that matters. It is a small model: its sentences are grammatical for "
            "a while and mean little. It is for trying out decoding on open-ended text.",
        )

    @property
    def config(self) -> dict[str, Any]:
        return {
            "model_type": "mdlm",
            "architectures": ["MDLM"],
            "backbone": "dit",
            **self.shape,
            "model_length": LENGTH,
            "vocab_size": self.vocabulary,
            "mask_token_id": self.vocabulary - 1,
            "dropout": 0.0,
            "time_conditioning": False,
            "tie_word_embeddings": True,
        }

    def build(self) -> nn.Module:
        return MDLM(self.config)

    def layers(self, model: nn.Module) -> Iterable[nn.Module]:
        assert isinstance(model, MDLM)
        return model.blocks

    def loss(self, model: nn.Module, batch: Tensor, generator: torch.Generator) -> Tensor:
        assert isinstance(model, MDLM)
        chance = chances(len(batch), generator)
        masked = masks(chance, LENGTH, generator)
        states = model.body(batch.masked_fill(masked, model.mask_id)).states[masked]
        weights = (1 / (chance * batch.numel()))[:, None].expand_as(masked)[masked]
        head = model.head
        return self.cross_entropy(states, head.weight, head.bias, head.banned, batch[masked], weights)

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        return {MDLM.prefix + name: parameter for name, parameter in model.named_parameters()}

    def validate(self, folder: Path) -> dict[str, float]:
        """Return figures on held-out and training text. The loss is an upper bound, so the figures are upper bounds."""
        from d5p4.models.load import load

        return self.measured(load(folder, device=self.device, dtype="float32"), DRAWS, ", at most")


def language_figures(corpus: Corpus, held_out: float, trained: float, bound: str = "") -> dict[str, float]:
    """Return perplexity and bits per byte, given the nats per token on held-out and training text."""
    figures = {}
    for name, nats, tokens, size in (
        ("held-out text", held_out, corpus.val, corpus.val_bytes),
        ("training text", trained, corpus.train, corpus.train_bytes),
    ):
        figures[f"{name}: perplexity per token{bound}"] = math.exp(nats)
        figures[f"{name}: bits per byte{bound}"] = nats * len(tokens) / size / math.log(2)
    return figures


def require_rows(corpus: Corpus) -> None:
    """Raise an error if the training text or the held-out text is shorter than a row."""
    for name, tokens in (("train", corpus.train), ("val", corpus.val)):
        if len(tokens) < LENGTH:
            raise D5P4Error(f"the {name} text has {len(tokens)} tokens, but a row needs {LENGTH}: give more text")


def on_device(tokens: np.ndarray, device: torch.device) -> Tensor:
    """Copy the whole text [n] to the device as int16. Every token id of a corpus fits into int16."""
    return torch.from_numpy(np.array(tokens).view(np.int16)).to(device)


def crops(text: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Return int64 tokens [rows, length]. Each row is cut from a random place of the text [n]."""
    starts = torch.randint(len(text) - length + 1, (rows, 1), generator=generator, device=text.device)
    return text[starts + torch.arange(length, device=text.device)].long()


def spread_rows(tokens: np.ndarray, rows: int) -> Tensor:
    """Return int64 tokens [rows, LENGTH]. The rows are cut from evenly spaced places of the text."""
    starts = np.linspace(0, len(tokens) - LENGTH, rows).astype(np.int64)
    return torch.from_numpy(np.stack([tokens[s : s + LENGTH] for s in starts]).astype(np.int64))
