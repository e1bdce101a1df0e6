"""`books`: English prose in MDLM's layout (adaLN blocks, no time conditioning), trained with MDLM's loss."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from d5p4.models.mdlm import MDLM

from .corpus import Corpus
from .masking import chances, masks
from .recipe import Card
from .texts import LENGTH, LICENCE, TextRecipe

FULL = {"hidden_dim": 320, "n_blocks": 7, "n_heads": 5, "cond_dim": 16}
TOY = {"hidden_dim": 96, "n_blocks": 2, "n_heads": 3, "cond_dim": 16}
DRAWS = 8  # noise levels for each row when the bound is measured


class Books(TextRecipe):
    name = "books"

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
            **(TOY if self.toy else FULL),
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
        """The bound."""
        from d5p4.models.load import load

        return self.measured(load(folder, device=self.device, dtype="float32"), DRAWS, ", at most")
