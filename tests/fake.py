"""A small model that satisfies the contract: how most tests run the real loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import d5p4
from d5p4.models.base import NativeModel
from d5p4.models.qwen import SDAR, FastDLLM
from d5p4.types import Head, Hidden

d5p4.load_plugins(["d5p4_lab.methods"])  # also in the processes of tests


def fitting(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options without those that a method refuses, for tests that run every method with the same options."""
    if options.get("method") == "odd" and options.get("order") == "ancestral":
        return options | {"order": "random"}
    trees, method = ("w", "stop", "distinct"), str(options.get("method"))
    refused = {"tree": trees, "wide-start": trees, "soar": (*trees, "temperature", "steps"), "ots": ("distinct",)}.get(
        method, ()
    )
    options = {name: value for name, value in options.items() if name not in refused}
    if method not in ("tree", "wide-start", "soar"):
        return options
    if method == "soar" and options.get("reveal") == "schedule":
        options.pop("reveal")
    if options.get("order") in ("confidence", "tempered", "ancestral"):
        options["order"] = "top"
    return options


class Letters:
    """Token i is the letter chr(97 + i)."""

    def __init__(self, template: bool = False) -> None:
        self.template = self.has_chat = template

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 97 for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + i) for i in ids)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str | None:
        return "a".join(m["content"] for m in messages) + "b" if self.template else None


class FakeModel:
    """Each position sees itself, its distance to every other token and a mean of all: cheap, bidirectional, seeded."""

    name = "fake"

    def __init__(
        self,
        vocabulary: int = 12,
        width: int = 8,
        *,
        carry_over: bool = False,
        seed: int = 0,
        scale: float = 1.5,
        max_length: int = 64,
        dtype: torch.dtype = torch.float64,
        template: bool = False,
        ordered: bool = True,
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        random = torch.randn(vocabulary, width, generator=g, dtype=dtype)
        self.embedding = random
        self.place = torch.randn(max_length, width, generator=g, dtype=dtype) * ordered
        self.ordered = ordered  # False: positions are alike, so permuted rows tie exactly
        self.mixer = torch.randn(2 * width, width, generator=g, dtype=dtype) / width**0.5
        banned = torch.zeros(vocabulary, dtype=torch.bool)
        banned[-1] = True
        weight = torch.randn(vocabulary, width, generator=g, dtype=dtype) * scale
        self.head = Head(weight, torch.randn(vocabulary, generator=g, dtype=dtype), banned)
        self.mask_id, self.pad_id, self.eos_ids = vocabulary - 1, 0, (vocabulary - 2,)
        self.max_length, self.carry_over = max_length, carry_over
        self.default_order = "ancestral" if carry_over else "confidence"
        self.tokenizer: Any = Letters(template)
        self.generation_defaults: dict[str, Any] = {}
        self.rows_seen = 0

    def body(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Hidden:
        real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
        self.rows_seen += len(tokens)
        position = (real.cumsum(-1) - 1).clamp_min(0)
        x = (self.embedding[tokens] + self.place[position]) * real[..., None]
        distance = (position[:, :, None] - position[:, None, :]).abs().to(x.dtype) * self.ordered
        near = torch.exp(-distance) * real[:, None, :]
        context = torch.tanh(near @ x)
        states = torch.tanh(torch.cat([x, context], -1) @ self.mixer)
        return Hidden(states, states + 0.5 * x)


def block_model(shifted: bool = False, seed: int = 0, block: int = 4) -> NativeModel:
    """Return a small block-causal model with random weights and the letters of `FakeModel`: SDAR or Fast-dLLM v2."""
    sizes = dict(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24)
    config = dict(sizes, num_hidden_layers=2, vocab_size=12, mask_token_id=11, max_position_embeddings=64)
    model = (FastDLLM if shifted else SDAR)(config | dict(tie_word_embeddings=False, block_length=block))
    generator = torch.Generator().manual_seed(seed)
    model.settle(torch.float64)
    for weight in model.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype) / weight.shape[-1] ** 0.5)
    model.lm_head.weight.mul_(4)
    model.tokenizer, model.eos_ids = Letters(), (10,)
    return model
