"""`check` tests whether a checkpoint loads and behaves like a model. The command `d5p4 check MODEL` calls `check`."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import D5P4Error
from ..ops.vocab import logits_of
from ..types import Context, Store
from .base import NativeModel
from .load import load
from .quant import weight_count
from .tokenizer import Tokenizer

PROMPT = "The capital of France is"
SENTENCE = "two plus two is 4, isn't it?"
MASKS = 8
PADS = 3
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2, torch.float16: 0.25, torch.bfloat16: 1.0}


class CheckLine(NamedTuple):
    name: str
    passed: bool
    detail: str


@torch.inference_mode()
def check(
    name_or_path: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    decode: Callable[[NativeModel, str], str] | None = None,
) -> list[CheckLine]:
    """Load a checkpoint and test it on one prompt. `decode` returns a line about the answers to one text."""
    start = time.perf_counter()
    model = load(name_or_path, device, dtype)
    seconds = time.perf_counter() - start
    kind = ", ".join(filter(None, (model.bits, str(model.dtype)[6:])))
    facts = f"{model.architecture}, {weight_count(model):,} parameters, {kind} on {model.device}, {seconds:.1f} s"
    codec = model.tokenizer
    assert isinstance(codec, Tokenizer)  # load always sets a Tokenizer
    ids = [*model.frame[0], *_written(codec, PROMPT)[1], *[model.mask_id] * MASKS, *model.frame[1]]
    row = torch.tensor([ids], device=model.device)
    logits = _logits(model, model.body(row).states)
    bad = int((logits.isnan() | logits.isposinf()).sum()) + int(logits.isneginf().all(-1).sum())
    lines = [CheckLine("load", True, facts)]
    lines += [CheckLine("logits finite", bad == 0, f"{bad} of {logits.numel():,} logits are NaN or infinite")]

    logp = logits[:, ~model.head.banned].log_softmax(-1)
    entropy, ceiling = float(-(logp.exp() * logp).sum(-1).mean()), math.log(logp.shape[-1])
    detail = f"the mean entropy at {MASKS} masks is {entropy:.3f} nats; a uniform guess has {ceiling:.3f} nats"
    lines += [CheckLine("knows something", entropy < ceiling - 0.1, detail)]

    padded = torch.cat((row.new_full((1, PADS), model.pad_id), row), dim=1)
    real = torch.arange(padded.shape[1], device=row.device)[None] >= PADS
    theirs = _logits(model, model.body(padded, real).states)
    lines += [_agreement("padding changes nothing", model, logits, theirs, f"{PADS} pads on the left")]
    lines += _stores(model, row)

    text, ids = _written(codec, SENTENCE)
    back = codec.decode(ids)
    detail = f"{text!r} encoded and decoded is {back!r}"
    lines += [CheckLine("tokenizer round trip", bool(text) and back == text, detail)]

    text, decoded = codec.mask_token or "", codec.decode([model.mask_id])
    ids = codec.encode(text)
    passed = ids == [model.mask_id] and decoded == "" and bool(model.head.banned[model.mask_id])
    detail = f"{text!r} encodes to {ids}; the mask id {model.mask_id} decodes to {decoded!r}"
    if not text:
        detail = f"id {model.mask_id} has no string, so prompts cannot contain a mask"
    lines += [CheckLine("mask token", passed, detail)]
    if decode is not None and all(line.passed for line in lines):
        lines += [CheckLine("decodes", True, decode(model, _written(codec, PROMPT)[0]))]
    return lines


def _logits(model: NativeModel, states: Tensor, count: int = MASKS) -> Tensor:
    """Return the logits at the last positions of a text, [count, V] in float32 or wider. Banned ids have minus
    infinity."""
    end = states.shape[1] - len(model.frame[1])
    return logits_of(states[0, end - count : end], model.head.weight, model.head.bias, model.head.banned)


def _stores(model: NativeModel, row: Tensor) -> list[CheckLine]:
    """Run the last tokens of the row again, with the keys and values of all others, and compare."""
    length = row.shape[1]
    start = length - MASKS if model.block is None else (length - 1) // model.block * model.block
    if not start or not hasattr(model, "cache_shape"):
        return []
    whole = model.body(row, None, Context(keep=True))
    assert whole.kept is not None
    kv = torch.stack([torch.stack(pair) for pair in whole.kept])
    first = row.new_tensor([start])
    edge = None if whole.edge is None else whole.states[:, start]
    store = Store(kv, torch.zeros_like(first), torch.full_like(first, length), row.new_tensor([[start, length]]))
    part = model.body(row[:, start:], None, Context(first, (store,), edge))
    ours, theirs = (_logits(model, hidden.states, min(MASKS, length - start)) for hidden in (whole, part))
    what = f"the last {length - start} tokens alone, with {start} stored ones"
    return [_agreement("stored tokens change nothing", model, ours, theirs, what)]


def _agreement(name: str, model: NativeModel, ours: Tensor, theirs: Tensor, what: str) -> CheckLine:
    ours, theirs = (logits[:, ~model.head.banned] for logits in (ours, theirs))
    worst, limit = float((ours - theirs).abs().max()), TOLERANCE[model.dtype]
    same = int((ours.argmax(-1) == theirs.argmax(-1)).sum())
    # Rounding to half precision may swap the two most likely tokens when their logits are nearly equal.
    half = model.dtype in (torch.float16, torch.bfloat16)
    agreed = f"same most likely token at {same} of {len(ours)} masks"
    detail = f"{what}: logits differ by up to {worst:.2e} (limit {limit:g}), {agreed}"
    return CheckLine(name, worst <= limit and (half or same == len(ours)), detail)


def _written(codec: Tokenizer, text: str) -> tuple[str, list[int]]:
    """Return an English text and its ids or, if the model has no tokens for it, a text of the model's first tokens."""
    with suppress(D5P4Error):
        return text, codec.encode(text)
    text = ""
    for token in sorted(codec.ids())[:20]:
        with suppress(D5P4Error):  # raised if this token cannot follow the others: two words may make a third one
            codec.encode(text + codec.decode([token]))
            text += codec.decode([token])
    return text, codec.encode(text)
