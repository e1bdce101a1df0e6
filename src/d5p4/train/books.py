"""`books`: English prose in MDLM's layout (adaLN blocks, no time conditioning), trained with MDLM's loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import D5P4Error
from ..models.mdlm import MDLM
from .corpus import Corpus
from .masking import chances, masks
from .recipe import LAST, Card, Rates, Recipe

LENGTH = 256
FULL = {"hidden_dim": 320, "n_blocks": 7, "n_heads": 5, "cond_dim": 16}
TOY = {"hidden_dim": 96, "n_blocks": 2, "n_heads": 3, "cond_dim": 16}
DRAWS = 8  # noise levels for each row when the bound is measured
LICENCE = "The weights may be used as the texts allow; the code is d5p4's (Apache-2.0)."


class Books(Recipe):
    name = "books"
    rates = Rates(matrices=0.02, others=3e-3)
    row_length = LENGTH
    def __init__(self, device: torch.device, seed: int, toy: bool, corpus: Corpus) -> None:
        super().__init__(device, seed, toy)
        self.corpus = corpus
        self.data = corpus.size
        self.card = Card(
            title="books",
            about=f"Continues, fills in and invents prose like the texts it was trained on, {LENGTH} tokens at a time. "
            "A masked diffusion model in MDLM's layout, with tied embeddings and a byte-level BPE of "
            f"{corpus.tokenizer.get_vocab_size():,} tokens trained on the same texts.",
            data=self.data,
            licence=LICENCE,
            limits="Facts, instructions, anything that matters. It is a small model: its sentences are grammatical for "
            "a while and mean little. It is for trying out decoding on open-ended text.",
        )
        self.vocabulary = corpus.tokenizer.get_vocab_size()

    @property
    def config(self) -> dict[str, Any]:
        return {
            "model_type": "mdlm",
            "architectures": ["MDLM"],
            "backbone": "dit",
            **(TOY if self.toy else FULL),
            "model_length": LENGTH,
            "vocab_size": self.vocabulary,
            "mask_token_id": self.vocabulary - 1,
            "dropout": 0.0,
            "time_conditioning": False,
            "tie_word_embeddings": True,
        }

    @property
    def rows(self) -> int:
        return 16 if self.toy else 384

    def build(self) -> nn.Module:
        return MDLM(self.config)

    def layers(self, model: nn.Module) -> Iterable[nn.Module]:
        assert isinstance(model, MDLM)
        return model.blocks

    def batches(self, start: int) -> Iterator[Tensor]:
        """Rows [B, LENGTH] cut anywhere from the text."""
        text = on_device(self.corpus.train, self.device)
        for step in range(start, LAST):
            yield crops(text, self.rows, LENGTH, self.generator(-1 - step))

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

    def write_tokenizer(self, folder: Path) -> None:
        self.corpus.tokenizer.save(str(folder / "tokenizer.json"), pretty=False)

    def validate(self, folder: Path) -> dict[str, float]:
        """The bound on held-out text, and on as much of the training text."""
        from ..models.load import load

        model = load(folder, device=self.device, dtype="float32")
        assert isinstance(model, MDLM)
        corpus, rows = self.corpus, 8 if self.toy else 2000
        held_out = self._bound(model, spread_rows(corpus.val, rows))
        seen = self._bound(model, spread_rows(corpus.train, rows))
        return language_figures(corpus, held_out, seen, ", at most")

    @torch.no_grad()
    def _bound(self, model: MDLM, rows: Tensor) -> float:
        """Nats a token, the mean loss over DRAWS noise levels of each row."""
        total, batches = 0.0, 0
        for draw in range(DRAWS):
            for part in rows.split(self.rows):
                total += float(self.loss(model, part.to(self.device), self.generator(draw))) * len(part)
                batches += len(part)
        return total / batches


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
