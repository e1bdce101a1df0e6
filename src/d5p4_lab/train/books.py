"""The recipe of the model `books`, which writes prose and has MDLM's layout and MDLM's loss.

It learns from rows of LENGTH tokens, cut from one long text at random places.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from d5p4.errors import D5P4Error
from d5p4.models.load import load
from d5p4.models.mdlm import MDLM

from .corpus import Corpus
from .recipe import LAST_STEP, Recipe, chances, masks

LENGTH = 256
DRAWS = 8  # the bound on the loss is estimated with this many random noise levels per row


class Books(Recipe):
    name = "books"
    small = {"hidden_dim": 96, "n_blocks": 2, "n_heads": 3}
    batch_rows = (384, 16)
    row_length = LENGTH

    def __init__(self, device: torch.device, seed: int, toy: bool, corpus: Corpus) -> None:
        super().__init__(device, seed, toy)
        for name, tokens in (("train", corpus.train), ("val", corpus.val)):
            if len(tokens) < LENGTH:
                raise D5P4Error(f"the {name} text has {len(tokens)} tokens, but a row needs {LENGTH}: give more text")
        self.corpus, self.data = corpus, corpus.size
        self.vocabulary = corpus.tokenizer.get_vocab_size()

    @property
    def config(self) -> dict[str, Any]:
        return super().config | {"vocab_size": self.vocabulary, "mask_token_id": self.vocabulary - 1}

    def new_model(self) -> nn.Module:
        return MDLM(self.config)

    def batches(self, start: int) -> Iterator[Tensor]:
        """Yield rows [B, LENGTH] from random places of the text, which the device holds as a whole."""
        text = torch.from_numpy(np.array(self.corpus.train).view(np.int16)).to(self.device)  # all ids fit into int16
        for step in range(start, LAST_STEP):
            yield crops(text, self.rows, LENGTH, self.generator(-1 - step))

    def loss(self, model: MDLM, batch: Tensor, generator: torch.Generator) -> Tensor:
        chance = chances(len(batch), generator)
        masked = masks(chance, LENGTH, generator)
        states = model.body(batch.masked_fill(masked, model.mask_id)).states[masked]
        weights = (1 / (chance * batch.numel()))[:, None].expand_as(masked)[masked]
        return self.cross_entropy(states, model.head, batch[masked], weights)

    def write_tokenizer(self, folder: Path) -> None:
        self.corpus.tokenizer.save(str(folder / "tokenizer.json"), pretty=False)

    def validate(self, folder: Path) -> dict[str, float]:
        """Return upper bounds on perplexity and bits per byte, for rows of the held-out and of the training text."""
        model, corpus, figures = load(folder, device=self.device, dtype="float32"), self.corpus, {}
        texts = {"held-out": (corpus.val, corpus.val_bytes), "training": (corpus.train, corpus.train_bytes)}
        for name, (tokens, size) in texts.items():
            nats = self.nats(model, spread_rows(tokens, 8 if self.toy else 2000))
            figures[f"{name} text: perplexity per token, at most"] = math.exp(nats)
            figures[f"{name} text: bits per byte, at most"] = nats * len(tokens) / size / math.log(2)
        return figures

    @torch.no_grad()
    def nats(self, model: Any, rows: Tensor) -> float:
        """Return the mean loss of rows [R, LENGTH] in nats per token. Each row is masked at random DRAWS times."""
        total = 0.0
        for draw in range(DRAWS):
            for part in rows.split(self.rows):
                total += float(self.loss(model, part.to(self.device), self.generator(draw))) * len(part)
        return total / (DRAWS * len(rows))


def crops(text: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Return int64 tokens [rows, length]. Each row is cut from a random place of the text [n]."""
    starts = torch.randint(len(text) - length + 1, (rows, 1), generator=generator, device=text.device)
    return text[starts + torch.arange(length, device=text.device)].long()


def spread_rows(tokens: np.ndarray, rows: int) -> Tensor:
    """Return int64 tokens [rows, LENGTH]. The rows are cut from evenly spaced places of the text."""
    starts = np.linspace(0, len(tokens) - LENGTH, rows).astype(np.int64)
    return torch.from_numpy(np.stack([tokens[s : s + LENGTH] for s in starts]).astype(np.int64))
