"""The functions of `d5p4.rng` as Triton kernels. Each is one launch and returns the bits of the plain version."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 512
_GOLDEN = tl.constexpr(-7046029254386353131)
_FIRST = tl.constexpr(-4658895280553007687)
_SECOND = tl.constexpr(-7723592293110705685)


@triton.jit
def _finish(x):
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _absorb(state, word):
    return _finish((state + _GOLDEN) ^ _finish(word + _GOLDEN))


@triton.jit
def _mix(words, out, size, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    state = tl.zeros((BLOCK,), tl.int64)
    for word in tl.static_range(WORDS):
        state = _absorb(state, tl.load(words + word * size + place, mask=inside, other=0))
    tl.store(out + place, state, mask=inside)


@triton.jit
def _hash_rows(tokens, positions, out, length, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    heap = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, length, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < length
        token = tl.load(tokens + row * length + place, mask=inside, other=0)
        position = tl.load(positions + row * length + place, mask=inside, other=0)
        hashed = _absorb(_absorb(tl.zeros((BLOCK,), tl.int64), token), position)
        heap += tl.where(inside & (position >= 0), hashed, 0)
    tl.store(out + row, _finish(tl.sum(heap, 0)))


@triton.jit
def _uniform(stream, position, child, out, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    key = tl.load(stream + place, mask=inside, other=0)
    k0, k1 = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    c0 = tl.load(position + place, mask=inside, other=0) & 0xFFFFFFFF
    c1 = tl.load(child + place, mask=inside, other=0) & 0xFFFFFFFF
    c2, c3 = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    for _ in tl.static_range(10):
        one, two = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = ((two >> 32) & 0xFFFFFFFF) ^ c1 ^ k0, ((one >> 32) & 0xFFFFFFFF) ^ c3 ^ k1
        c1, c3 = two & 0xFFFFFFFF, one & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    tl.store(out + place, (c0.to(tl.float64) + 0.5) / 4294967296.0, mask=inside)


def mix(words: Sequence[Tensor]) -> Tensor:
    """Return `d5p4.rng.mix` of int64 tensors of the same shape."""
    stacked = torch.stack(tuple(words))
    out = torch.empty_like(stacked[0])
    if size := out.numel():
        with torch.cuda.device_of(out):
            _mix[triton.cdiv(size, _BLOCK),](stacked, out, size, len(words), _BLOCK)
    return out


def hash_tokens(tokens: Tensor, positions: Tensor) -> Tensor:
    """Return `d5p4.rng.hash_tokens` of int64 tokens and positions [..., L] of the same shape."""
    tokens, positions = tokens.to(torch.int64), positions.to(torch.int64)
    out = tokens.new_empty(tokens.shape[:-1])
    if out.numel():
        with torch.cuda.device_of(out):
            rows = (part.contiguous() for part in (tokens, positions))
            _hash_rows[out.numel(),](*rows, out, tokens.shape[-1], 128, num_warps=1)
    return out


def uniform(stream: Tensor, position: Tensor, child: Tensor) -> Tensor:
    """Return `d5p4.rng.uniform` of int64 tensors of the same shape, in float64."""
    out = torch.empty(stream.shape, dtype=torch.float64, device=stream.device)
    if size := out.numel():
        parts = (part.contiguous() for part in (stream, position, child))
        with torch.cuda.device_of(out):
            _uniform[triton.cdiv(size, _BLOCK),](*parts, out, size, _BLOCK)
    return out
