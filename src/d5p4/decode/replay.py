"""Records forwards of few tokens as CUDA graphs, one graph per shape, and replays the graphs.

In a forward of few tokens, the GPU waits for the host to launch hundreds of kernels. A replay is a single launch.
Replays help in the first step (in which all rows are equal), in pools of mostly equal rows, and for short answers of
small models. A recording belongs to one decode call, so that the recording cannot outlive the weights that it uses.
"""

from __future__ import annotations

import threading
import warnings
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from ..types import Hidden, Model

FEW = 1024
"""A forward is replayed only if it has at most this many tokens. On an H200, a forward of one row of LLaDA-8B with 384
tokens takes 7 ms of work and 15 ms of launches."""

_streams = threading.local()


class Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    tokens: Tensor  # the tensor from which a replay reads the tokens
    attention_mask: Tensor | None
    hidden: Hidden  # the tensors into which a replay writes


class Replay:
    """Calls `model.body`, or replays a recorded call if that is faster. The next call may overwrite the result."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._seen: set[tuple[int, int, bool]] = set()
        self._recordings: dict[tuple[int, int, bool], Recording] = {}
        self._memory = torch.cuda.graph_pool_handle()  # shared by all recordings, because only one runs at a time
        self._works = True

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None) -> Hidden:
        rows, length = tokens.shape
        shape = (rows, length, attention_mask is None)
        if tokens.numel() > FEW or shape not in self._seen or not self._works:
            self._seen.add(shape)  # the first forward of a shape is not recorded, because it compiles kernels
            return self.model.body(tokens, attention_mask)
        if shape not in self._recordings:
            try:
                self._recordings[shape] = self._record(tokens, attention_mask)
            except RuntimeError as error:
                self._works = False
                warnings.warn(f"{self.model.name} runs without a CUDA graph: {error}", stacklevel=2)
                return self.model.body(tokens, attention_mask)
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
            graph, side = torch.cuda.CUDAGraph(), _side_stream(tokens.device)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                graph.capture_begin(self._memory, capture_error_mode="thread_local")
                try:
                    hidden = self.model.body(tokens, attention_mask)
                except BaseException:
                    with suppress(RuntimeError):  # ignored, because the error of `body` (raised below) says more
                        graph.capture_end()
                    raise
                graph.capture_end()
            torch.cuda.current_stream().wait_stream(side)
        return Recording(graph, tokens, attention_mask, hidden)


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream to record on. A device has only one such stream per thread, because cuBLAS keeps memory for
    every stream."""
    streams: dict[torch.device, torch.cuda.Stream] = _streams.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]
