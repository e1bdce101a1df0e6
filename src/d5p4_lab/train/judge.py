"""`judge`: an autoregressive scorer of the same books and tokenizer, in transformers' Llama layout."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from d5p4.eval.perplexity import transformers

from .corpus import END_TEXT, Corpus
from .folder import write_json
from .recipe import Card, start_as_identity
from .texts import LENGTH, LICENCE, TextRecipe

FULL = {"hidden_size": 192, "num_hidden_layers": 5, "num_attention_heads": 3, "intermediate_size": 512}
TOY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 192}


def causal(model: nn.Module) -> Any:
    """A LlamaForCausalLM, whose type is not known where transformers is missing."""
    return model


class Judge(TextRecipe):
    """Every row starts with end-of-text and goes on anywhere in the books, so a text is scored without context."""

    name = "judge"

    def __init__(self, device: torch.device, seed: int, toy: bool, corpus: Corpus) -> None:
        super().__init__(device, seed, toy, corpus)
        self.card = Card(
            title="judge",
            about="Scores prose: the perplexity of samples of `books` under a model that reads left to right. A Llama "
            "in transformers' layout (`AutoModelForCausalLM.from_pretrained`) with the tokenizer of `books`. Put "
            f"`{END_TEXT}` before the text, or let `d5p4.eval.perplexity.CausalJudge` do it.",
            data=self.data,
            licence=LICENCE,
            limits=f"Texts of other kinds: it has read only these, {LENGTH} tokens at a time, and is a small model. It "
            "shares its data with `books`, so it likes what `books` likes; use an outside judge too.",
        )
        end = corpus.tokenizer.token_to_id(END_TEXT)
        assert end is not None
        self.end = end

    @property
    def config(self) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            **(TOY if self.toy else FULL),
            "num_key_value_heads": (TOY if self.toy else FULL)["num_attention_heads"],
            "hidden_act": "silu",
            "max_position_embeddings": LENGTH,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "vocab_size": self.vocabulary,
            "bos_token_id": self.end,
            "eos_token_id": self.end,
            "torch_dtype": "bfloat16",
        }

    def build(self) -> nn.Module:
        library = transformers()
        settings = {name: value for name, value in self.config.items() if name not in ("torch_dtype", "architectures")}
        model = library.LlamaForCausalLM(library.LlamaConfig(**settings, use_cache=False))
        start_as_identity(model, ("o_proj.weight", "down_proj.weight"))
        return model

    def layers(self, model: nn.Module) -> Iterable[nn.Module]:
        return causal(model).model.layers

    def loss(self, model: nn.Module, batch: Tensor, generator: torch.Generator) -> Tensor:
        read = torch.cat((torch.full_like(batch[:, :1], self.end), batch[:, :-1]), dim=1)
        states = causal(model).model(input_ids=read).last_hidden_state.flatten(0, 1)
        head = causal(model).lm_head.weight
        nothing = torch.zeros(len(head), dtype=torch.bool, device=head.device)
        even = torch.full((batch.numel(),), 1 / batch.numel(), device=head.device)
        return self.cross_entropy(states, head, None, nothing, batch.flatten(), even)

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        return dict(model.named_parameters())

    def write_tokenizer(self, folder: Path) -> None:
        super().write_tokenizer(folder)
        names = {"bos_token": END_TEXT, "eos_token": END_TEXT, "pad_token": END_TEXT}
        write_json(
            folder / "tokenizer_config.json",
            {"tokenizer_class": "PreTrainedTokenizerFast", **names, "model_max_length": LENGTH},
        )

    def validate(self, folder: Path) -> dict[str, float]:
        model = transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return self.measured(model.to(self.device), draws=1)
