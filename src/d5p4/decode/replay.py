"""Records forwards of few tokens as CUDA graphs, one graph per shape, and replays the graphs.

In a forward of few tokens, the GPU waits for the host to launch hundreds of kernels. A replay is a single launch.
Replays help in the first step (in which all rows are equal), in pools of mostly equal rows, and for short answers of
small models. A recording belongs to one decode call, so that the recording cannot outlive the weights that it uses.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..types import Context, Hidden, Model, Store

FEW = 1024
"""A forward is replayed only if it has at most this many tokens. On an H200, a forward of one row of LLaDA-8B with 384
tokens takes 7 ms of work and 15 ms of launches."""

_streams = threading.local()


class Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]  # the tensors from which a replay reads
    hidden: Hidden  # the tensors into which a replay writes


class Replay:
    """Calls `model.body`, or replays a recorded call if that is faster. The next call may overwrite the result.

    A recording reads the stores of a context where they are, so stores must not move during a decode call.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._seen: set[Any] = set()
        self._recordings: dict[Any, Recording] = {}
        self._memory = torch.cuda.graph_pool_handle()  # shared by all recordings, because only one runs at a time
        self._works = True

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None, context: Context | None = None) -> Hidden:
        inputs = tensors_of(tokens, attention_mask, context)
        places = () if context is None else tuple(store.kv.data_ptr() for store in context.stores)
        shape = (*(None if x is None else tuple(x.shape) for x in inputs), *places)
        few = tokens.numel() <= FEW and not (context is not None and context.keep)
        if not few or shape not in self._seen or not self._works:
            self._seen.add(shape)  # the first forward of a shape is not recorded, because it compiles kernels
            return self._run(inputs, context)
        if shape not in self._recordings:
            try:
                self._recordings[shape] = self._record(inputs, context)
            except RuntimeError as error:
                self._works = False
                warnings.warn(f"{self.model.name} runs without a CUDA graph: {error}", stacklevel=2)
                return self._run(inputs, context)
        recording = self._recordings[shape]
        for own, given in zip(recording.inputs, (x for x in inputs if x is not None), strict=True):
            own.copy_(given)
        recording.graph.replay()
        return recording.hidden

    def _run(self, inputs: Sequence[Tensor | None], context: Context | None) -> Hidden:
        tokens, attention_mask, *rest = inputs
        assert tokens is not None
        if context is None:
            return self.model.body(tokens, attention_mask)
        return self.model.body(tokens, attention_mask, with_tensors(context, rest))  # type: ignore[call-arg]

    def _record(self, inputs: Sequence[Tensor | None], context: Context | None) -> Recording:
        own = [None if x is None else x.clone() for x in inputs]
        device = next(x.device for x in inputs if x is not None)
        with torch.cuda.device(device):
            graph, side = torch.cuda.CUDAGraph(), _side_stream(device)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                graph.capture_begin(self._memory, capture_error_mode="thread_local")
                try:
                    hidden = self._run(own, context)
                except BaseException:
                    with suppress(RuntimeError):  # ignored, because the error of `body` (raised below) says more
                        graph.capture_end()
                    raise
                graph.capture_end()
            torch.cuda.current_stream().wait_stream(side)
        return Recording(graph, [x for x in own if x is not None], hidden)


def tensors_of(tokens: Tensor, attention_mask: Tensor | None, context: Context | None) -> list[Tensor | None]:
    """Return all tensors that a forward reads and that change from step to step."""
    tensors = [tokens, attention_mask]
    if context is not None:
        tensors += [context.first, context.edge]
        tensors += [x for store in context.stores for x in (store.slot, store.length, store.hole)]
    return tensors


def with_tensors(context: Context, tensors: Sequence[Tensor | None]) -> Context:
    """Return a context with other tensors: those of `tensors_of` behind the attention mask."""
    first, edge, *rest = tensors
    stores = (Store(store.kv, *rest[3 * i : 3 * i + 3]) for i, store in enumerate(context.stores))  # type: ignore[arg-type]
    return Context(first, tuple(stores), edge, context.keep)


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream to record on. A device has only one such stream per thread, because cuBLAS keeps memory for
    every stream."""
    streams: dict[torch.device, torch.cuda.Stream] = _streams.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]
