"""Small models with the manners that a server has to cope with."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from d5p4.types import Hidden
from tests.fake import FakeModel
from tests.serve.running import until


class Gated(FakeModel):
    """Forwards wait until the gate is open, or for a turn, so that a test decides what happens meanwhile.

    `calls` are the rows of each that passed.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gate = threading.Event()
        self.turns = threading.Semaphore(0)
        self.entered = threading.Event()
        self.calls: list[int] = []

    def body(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Hidden:
        self.entered.set()
        until(lambda: self.gate.is_set() or self.turns.acquire(blocking=False))
        self.calls.append(len(tokens))
        return super().body(tokens, attention_mask)


class Faulty(FakeModel):
    """Goes wrong for prompts that begin with a letter of `faults`: {"x": "raise"}, "nan" or "memory" (once)."""

    def __init__(self, faults: dict[str, str], vocabulary: int = 30, **options: Any) -> None:
        super().__init__(vocabulary=vocabulary, **options)
        self.faults = {ord(letter) - 97: fault for letter, fault in faults.items()}

    def body(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Hidden:
        hidden = super().body(tokens, attention_mask)
        real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
        first = tokens.gather(1, real.long().argmax(1, keepdim=True))[:, 0]
        for token, fault in list(self.faults.items()):
            rows = first == token
            if not rows.any():
                continue
            if fault == "raise":
                raise RuntimeError("the model is broken by " + self.tokenizer.decode(tokens[rows][0].tolist()))
            if fault == "memory":
                del self.faults[token]
                raise torch.OutOfMemoryError("there is none")
            hidden.states[rows] = torch.nan
        return hidden
