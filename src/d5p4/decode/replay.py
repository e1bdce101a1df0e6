"""Records forwards of few tokens, and steps of pure searches, as CUDA graphs, one graph per shape, and replays them.

In a forward of few tokens, the GPU waits for the host to launch hundreds of kernels. A replay is a single launch.
Replays help in the first step (in which all rows are equal), in pools of mostly equal rows, for blocks that run with a
cache, and for short answers of small models. A recording belongs to one decode call, so that the recording cannot
outlive the weights that it uses.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..ops import kernels
from ..types import Choice, Context, Hidden, Model, Store
from .pool import Call, Pool
from .schedule import Expected, Steps

if TYPE_CHECKING:
    from ..search import Search
    from .view import ForwardView

T = TypeVar("T")

FEW = 1024
"""A forward is replayed only if it has at most this many tokens, and a step of a search only if its beams have at
most this many positions in their blocks, with the number of prompts rounded up to a power of two. On an H200, a forward
of one row of LLaDA-8B with 384 tokens takes 7 ms of work and 15 ms of launches."""

MOST = 64  # a recorder that has this many recordings drops all of them, as their shapes may never come again
OFTEN = 4  # a step is recorded after this many calls of the same shapes, because a recording costs time

_streams = threading.local()


class Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]  # the tensors from which a replay reads
    result: Any  # has the tensors into which a replay writes


class Recorder:
    """Runs a function of tensors, or replays a recorded call of it. The next call may overwrite the result.

    A call is recorded once calls with the same key and shapes have run `after` times. The first one compiles kernels.
    """

    def __init__(self, what: str, after: int) -> None:
        self.what, self.after = what, after
        self._seen = Counter[Any]()
        self._recordings: dict[Any, Recording] = {}
        self._memory = torch.cuda.graph_pool_handle()  # shared by all recordings, because only one runs at a time
        self.works = True  # False after a recording has failed

    def __call__(self, key: Any, inputs: Sequence[Tensor | None], run: Callable[[list[Tensor | None]], T]) -> T:
        """Return run(inputs). Calls with equal keys and equal shapes and dtypes of the inputs must do the same."""
        shape = key, *(None if x is None else (x.dtype, *x.shape) for x in inputs)
        self._seen[shape] += 1
        if not self.works or self._seen[shape] <= self.after:
            return run(list(inputs))
        if shape not in self._recordings:
            if len(self._recordings) == MOST:
                self._recordings.clear()
            try:
                self._recordings[shape] = self._record(inputs, run)
            except RuntimeError as error:
                self.works = False
                self._recordings.clear()
                warnings.warn(f"{self.what} runs without a CUDA graph: {error}", stacklevel=2)
                return run(list(inputs))
        recording = self._recordings[shape]
        torch._foreach_copy_(recording.inputs, [x for x in inputs if x is not None])
        recording.graph.replay()
        return recording.result

    def _record(self, inputs: Sequence[Tensor | None], run: Callable[[list[Tensor | None]], Any]) -> Recording:
        own = [None if x is None else x.clone() for x in inputs]
        device = next(x.device for x in inputs if x is not None)
        with torch.cuda.device(device):
            graph, side = torch.cuda.CUDAGraph(), _side_stream(device)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                graph.capture_begin(self._memory, capture_error_mode="thread_local")
                try:
                    result = run(own)
                except BaseException:
                    with suppress(RuntimeError):  # ignored, because the error of `run` (raised below) says more
                        graph.capture_end()
                    raise
                graph.capture_end()
            torch.cuda.current_stream().wait_stream(side)
        return Recording(graph, [x for x in own if x is not None], result)


class Replay:
    """Calls `model.body`, or replays a recorded call if that is faster. The next call may overwrite the result.

    A recording reads the stores of a context where they are, so stores must not move during a decode call.
    """

    def __init__(self, model: Model) -> None:
        self.model, self._recorder = model, Recorder(model.name, after=1)

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None, context: Context | None = None) -> Hidden:
        def run(inputs: Sequence[Tensor | None]) -> Hidden:
            tokens, attention_mask, *rest = inputs
            assert tokens is not None
            if context is None:
                return self.model.body(tokens, attention_mask)
            return self.model.body(tokens, attention_mask, with_tensors(context, rest))  # type: ignore[call-arg]

        inputs = tensors_of(tokens, attention_mask, context)
        if tokens.numel() > FEW:
            return run(inputs)
        key = () if context is None else (context.keep, *((x.kv.data_ptr(), x.kv.shape) for x in context.stores))
        return self._recorder(key, inputs, run)


class RecordedStep:
    """Calls the `step` of a search, or replays a recorded call, in which the block of the step is in tensors.

    A step of a tree has hundreds of small operations between the forward and the next pool, whose launches take longer
    than the forward of a block of an 8B model.
    """

    def __init__(self, step: Callable[[ForwardView, Steps], tuple[Pool, Choice]]) -> None:
        self.step = step
        self._recorder = Recorder("the search", after=OFTEN)

    def __call__(self, view: ForwardView, now: Steps) -> tuple[Pool, Choice]:
        call, pool, hidden = view.call, view.pool, view.hidden
        block = call.settings.block_length or pool.tokens.shape[2]
        checks, count = call.checks, len(pool.key)
        size = 1 << (count - 1).bit_length()  # prompts come and go, but there are few powers of two
        if size * call.settings.groups * block > FEW:
            return self.step(view, now)
        if size > count:  # the last prompt fills the other places
            at = torch.arange(size, device=pool.key.device).clamp_max(count - 1)
            pool, hidden, now = pool.keep(at), hidden.part(at), now.of(at)
        own = pool.tensors()
        starts, stops = now.starts, now.stops
        if starts is None or stops is None:
            starts, stops = (torch.full_like(pool.key, edge) for edge in (now.start, now.stop))
        # The states of all rows, so that the number of rows that were run does not change the shapes.
        states = hidden.states[hidden.slot.flatten()]
        first = starts, stops, states

        def run(inputs: Sequence[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], Choice, list[Expected]]:
            starts, stops, states, *rest = inputs
            given = dict(zip(own, rest, strict=False))
            state = dict(zip(pool.state, rest[len(own) :], strict=False))
            memory = dict(zip(pool.memory, rest[len(own) + len(state) :], strict=True))
            # Rows with fewer open positions than the block are filled up, so that all steps have the same shapes.
            wide = Steps((), (), 0, block, block, block, starts=starts, stops=stops)
            slot = torch.arange(states.shape[0], device=states.device).view_as(hidden.slot)
            before, checks.expected = checks.expected, []
            try:
                rows = replace(pool, **given, state=state, memory=memory)
                seen = replace(hidden, states=states, slot=slot)
                following, choice = self.step(type(view)(call, rows, seen, wide, view.given), wide)
            finally:  # the conditions of a recording that failed have no values
                expected, checks.expected = checks.expected, before
            changed = {name: value for name in own if (value := getattr(following, name)) is not given[name]}
            return changed, following.state, choice, expected

        inputs = [*first, *own.values(), *pool.state.values(), *pool.memory.values()]
        changed, state, choice, expected = self._recorder(None, inputs, run)
        checks.expected += expected
        # The next replay overwrites the results, but the tensors of a pool are needed for longer.
        changed, state = ({name: x[:count].clone() for name, x in values.items()} for values in (changed, state))
        following = replace(view.pool, **changed, state=state)  # type: ignore[arg-type]
        return following, choice._replace(parents=choice.parents[:count].clone())


def recorded(search: Search, call: Call, ranks: int) -> Callable[[ForwardView, Steps], tuple[Pool, Choice]]:
    """Return the `step` of a search. It is replayed on one GPU with Triton, without other ranks, if the search is pure,
    unless the order or the rule is the user's own code, which a CUDA graph may not be able to record."""
    settings, own = call.settings, __name__.split(".")[0] + "."
    parts = settings.order_spec.priority, settings.reveal_spec.rule
    ours = all(part is None or part.__module__.startswith(own) for part in parts)
    plain = settings.savings and not settings.deterministic and settings.start != "entropy" and call.matchers is None
    pure = vars(type(search)).get("pure", False)  # a subclass must declare it again
    if pure and ours and plain and ranks == 1 and kernels.usable(call.end_ids):
        return RecordedStep(search.step)
    return search.step


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
