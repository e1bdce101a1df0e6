"""Compiles the kernels for an H100 or H200 (sm_90), without one: `python compile_all.py [all]`.

The interpreter runs what the compiler refuses (a variable that changes its type in a branch, say). Run as a program of
its own, because the tests' process holds interpreted kernels.
"""

import sys

import torch
import triton
from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from d5p4.ops.kernels import attention, body, gram, partition_map, rng, sample, vocab

H200 = GPUTarget("cuda", 90, 32)


def build(function, warps=4, constants=None, **types):
    """types: of the arguments by name; what has none is a constant."""
    constants = constants or {}
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    missing = [name for name, kind in signature.items() if kind == "constexpr" and name not in constants]
    assert not missing, f"{function.__name__}: {missing}"
    triton_compile(ASTSource(function, signature, constants), target=H200, options={"num_warps": warps})
    print(function.__name__, flush=True)


def solver(block, slots, wide, gain, start, search, warps, **ones):
    real = "*fp64" if wide else "*fp32"
    types = {"kernel": "*fp32", "size": "i32", "first": "i32"} | dict.fromkeys(("floor", "enough"), "fp32")
    types |= dict.fromkeys(("quality", "value_out"), "*fp64") | ({"gain": "*fp64"} if gain else {})
    types |= {"tie": "*i64"} | ({} if "k" in ones else {"k": "i32"})
    types |= dict.fromkeys(("sets", "zeros_out", "members"), "*i32")
    types |= dict.fromkeys(("rows", "roots", "inverse"), real)
    constants = dict(START=start, SEARCH=search, WIDE=wide, N=block, K=slots, **ones)
    build(partition_map._solve, warps, constants | ({} if gain else {"gain": None}), **types)


def over_vocabulary(logits, bare=False):
    """With all that is optional, or without."""
    optional = dict.fromkeys(("moment", "second", "total", "entropy", "best", "margin", "certainty", "offset"), "*fp32")
    optional |= dict(drawable="*i64")
    needed = dict.fromkeys(("top", "mass", "lse"), "*fp32") | dict(logits=logits, u="*fp64", token="*i64")
    needed |= dict.fromkeys(("rows", "ids", "stride", "step", "blocks"), "i32") | dict(sharpness="fp32")
    for function, sizes in (
        (vocab._block_stats, dict(ROWS=2, SIZE=2048)),
        (vocab._join_blocks, dict(SIZE=64)),
        (sample._draw, dict(COUNT=64, SIZE=2048)),
    ):
        types = needed if bare else needed | optional
        constants = sizes | {name: None for name in optional if bare and name in function.arg_names}
        build(function, 4, constants, **{name: types[name] for name in function.arg_names if name in types})


def cosines(features, tile):
    counts = dict.fromkeys(("size", "length", "stride", "steps", "count"), "i32")
    build(gram._products, 4, dict(TILE=tile, STEP=64), features=features, slot="*i64", pieces="*fp32", **counts)


def integers():
    build(rng._mix, 4, dict(WORDS=5, BLOCK=512), words="*i64", out="*i64", size="i32")
    build(rng._hash_rows, 1, dict(BLOCK=128), tokens="*i64", positions="*i64", out="*i64", length="i32")
    build(rng._uniform, 4, dict(BLOCK=512), stream="*i64", position="*i64", child="*i64", out="*fp64", size="i32")
    build(gram._cosine, 4, dict(BLOCK=64, DEEP=32), pieces="*fp32", first="*i64", out="*fp32", size="i32", count="i32")


def layers(kind):
    rows = dict.fromkeys(("x", "delta", "weight", "total", "normal"), kind)
    build(body._add_rms_norm, 8, dict(D=4096, BLOCK=4096, ADD=True), x_step="i32", delta_step="i32", eps="fp32", **rows)
    build(body._silu_gate, 8, dict(WIDTH=12288, BLOCK=2048), a=kind, b=kind, out=kind, a_step="i32", b_step="i32")
    counts = dict.fromkeys(("step", "tokens", "length", "angle_rows"), "i32") | dict(eps="fp32")
    heads = dict.fromkeys(("x", "out", "weight"), kind) | dict(cos="*fp32", sin="*fp32") | counts
    sizes = dict(HEADS=32, WIDTH=128, TOKENS_BLOCK=1, HEADS_BLOCK=32)
    build(body._norm_rotate, 4, sizes | dict(HALF=64, HALF_BLOCK=64, REST_BLOCK=0), **heads)
    del heads["weight"]
    sizes |= dict(HALF=24, HALF_BLOCK=32, REST_BLOCK=128, weight=None)
    build(body._norm_rotate, 4, sizes, **heads)


def stored_attention(kind, tokens, copies, width=128, stores=2, masked=True, causal=False, precision="ieee"):
    dtype = {"*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32}[kind]
    tiles = zip(("TOKENS", "PACKED", "OWN", "STEP"), attention.tile_sizes(tokens, copies, dtype), strict=True)
    constants = dict(tiles, KEY_HEADS=8, COPIES=copies, WIDTH=width, BLOCK=max(16, triton.next_power_of_2(width)))
    types = {"scale": "fp32", "tokens": "i32", "own": "*i1", "causal": "*i1"}
    types |= dict.fromkeys(("query", "key", "value", "out"), kind)
    types |= {f"{x}_{y}": "i32" for x in ("query", "key", "value") for y in ("row", "step", "head")}
    for i in range(attention.MOST_STORES):
        types |= {f"{name}_{i}": "i32" for name in ("slot_step", "step", "head_step")}
        types |= {f"keys_{i}": kind, f"values_{i}": kind}
        types |= {f"{name}_{i}": "*i64" for name in ("slot", "length", "hole")}
        if i >= stores:
            constants |= {f"{name}_{i}": None for name in ("keys", "values", "slot", "length", "hole")}
    if not masked:
        constants |= dict.fromkeys(("own", "hole_0", "hole_1"))
    if not causal:
        constants |= {"causal": None}
    types = {name: type for name, type in types.items() if name not in constants}
    warps = 8 if kind == "*fp32" else 4
    build(attention._attend_stored, warps, constants | {"PRECISION": precision}, **types)


if __name__ == "__main__":
    solver(16, 4, True, False, 2, True, 1)
    over_vocabulary("*bf16")
    cosines("*bf16", 64)
    integers()
    layers("*bf16")
    stored_attention("*bf16", 1, 4, 16, 1)
    if "all" in sys.argv:
        for gain in (False, True):
            for start, search in ((0, True), (1, True), (2, False), (2, True)):
                solver(64, 8, True, gain, start, search, 1)
                solver(1024, 32, False, gain, start, search, 8)
        solver(4096, 64, False, False, 2, True, 16)
        solver(16, 1, True, False, 2, True, 1, k=1)
        for kind in ("*fp16", "*fp32"):
            over_vocabulary(kind, bare=True)
            layers(kind)
            cosines(kind, 16)
        for kind in ("*bf16", "*fp16", "*fp32"):
            for shape in ((32, 1, 128, 2, False), (300, 4, 128, 1), (1, 1, 12, 1, False), (32, 7, 80, 0)):
                stored_attention(kind, *shape)
        stored_attention("*fp32", 32, 4, precision="tf32")
