"""The body of a model for few rows, recorded once a shape as a CUDA graph and replayed.

A forward of few tokens waits for the host, which launches hundreds of kernels; a replay is one launch. Later steps have
few distinct rows, and always the same few counts of them. A recording belongs to one decode call, so that it cannot
outlive the weights it points to.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .types import Hidden, Model

FEW = 1024
"""Tokens of a forward up to which a replay pays (LLaDA-8B on an H200: 18 ms of launches, about 900 tokens of work)."""


class Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    tokens: Tensor  # where a replay reads
    attention_mask: Tensor | None
    hidden: Hidden  # where it writes


class Replay:
    """`model.body`, replayed where it pays. What it returns holds until the next call."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._seen: set[tuple[int, int, bool]] = set()
        self._recordings: dict[tuple[int, int, bool], Recording] = {}
        self._memory = torch.cuda.graph_pool_handle()  # one for all: they never run at the same time

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None) -> Hidden:
        rows, length = tokens.shape
        shape = (rows, length, attention_mask is None)
        if tokens.numel() > FEW or shape not in self._seen:
            self._seen.add(shape)  # the first time may be the only one, and it compiles what must be
            return self.model.body(tokens, attention_mask)
        if shape not in self._recordings:
            self._recordings[shape] = self._record(tokens, attention_mask)
        recording = self._recordings[shape]
        recording.tokens.copy_(tokens)
        if recording.attention_mask is not None and attention_mask is not None:
            recording.attention_mask.copy_(attention_mask)
        recording.graph.replay()
        return recording.hidden

    def _record(self, tokens: Tensor, attention_mask: Tensor | None) -> Recording:
        tokens = tokens.clone()
        attention_mask = None if attention_mask is None else attention_mask.clone()
        with torch.cuda.device(tokens.device):
            graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                graph.capture_begin(self._memory, capture_error_mode="thread_local")
                try:
                    hidden = self.model.body(tokens, attention_mask)
                finally:
                    graph.capture_end()
            torch.cuda.current_stream().wait_stream(side)
        return Recording(graph, tokens, attention_mask, hidden)
