"""Compiles the kernels for an H100 or H200 (sm_90), without one: `python compile_all.py [all]`.

The interpreter runs what the compiler refuses (a variable that changes its type in a branch, say). Run as a program of
its own, because the tests' process holds interpreted kernels.
"""

import sys

from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from d5p4.ops.kernels import body, gram, mmr, partition_map, rng, sample, vocab

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
    types |= dict.fromkeys(("quality", "value_out", "worth_out"), "*fp64") | ({"gain": "*fp64"} if gain else {})
    types |= dict.fromkeys(("tie", "hash_out", "out"), "*i64") | ({} if "k" in ones else {"k": "i32"})
    types |= dict.fromkeys(("sets", "zeros_out", "done", "members"), "*i32")
    types |= dict.fromkeys(("rows", "roots", "inverse"), real)
    constants = dict(START=start, SEARCH=search, WIDE=wide, N=block, K=slots, **ones)
    build(partition_map._solve, warps, constants | ({} if gain else {"gain": None}), **types)


def relevance(mean, start, **ones):
    types = {"similarity": "*fp32"} | dict.fromkeys(("alpha_high", "alpha_low"), "fp32")
    types |= dict.fromkeys(("quality", "value_out"), "*fp64") | dict.fromkeys(("tie", "tie_out", "out"), "*i64")
    types |= dict.fromkeys(("sets", "done"), "*i32") | {name: "i32" for name in ("size", "k") if name not in ones}
    build(mmr._mmr, 1, dict(MEAN=mean, START=start, N=64, K=8, **ones), **types)


def over_vocabulary(logits):
    """With all that is optional, and without."""
    optional = dict.fromkeys(("moment", "second", "total", "entropy", "best", "margin", "certainty", "offset"), "*fp32")
    optional |= dict(rows="*i64", drawable="*i64")
    needed = dict.fromkeys(("top", "mass", "lse"), "*fp32") | dict(logits=logits, u="*fp64", token="*i64")
    needed |= dict.fromkeys(("count", "ids", "stride", "blocks"), "i32") | dict(sharpness="fp32")
    for function, sizes in (
        (vocab._block_stats, dict(ROWS=2, SIZE=2048)),
        (vocab._join_blocks, dict(SIZE=64)),
        (sample._draw, dict(COUNT=64, SIZE=2048)),
    ):
        for types, absent in ((needed | optional, {}), (needed, dict.fromkeys(optional))):
            constants = sizes | {name: None for name in absent if name in function.arg_names}
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
    sizes = dict(HEADS=32, HALF=64, TOKENS_BLOCK=1, HEADS_BLOCK=32, HALF_BLOCK=64)
    counts = dict.fromkeys(("step", "tokens", "length", "angle_rows"), "i32")
    build(body._rotate, 4, sizes, x=kind, out=kind, cos="*fp32", sin="*fp32", **counts)


if __name__ == "__main__":
    solver(16, 4, True, False, 2, True, 1)
    relevance(True, 2)
    over_vocabulary("*bf16")
    cosines("*bf16", 64)
    integers()
    layers("*bf16")
    if "all" in sys.argv:
        for gain in (False, True):
            for start, search in ((0, True), (1, True), (2, False), (2, True)):
                solver(64, 8, True, gain, start, search, 1)
                solver(1024, 32, False, gain, start, search, 8)
        for start in (1, 2):
            solver(4096, 64, False, False, start, True, 16)
            solver(16, 1, True, False, start, True, 1, k=1)
        for mean in (False, True):
            for start in (0, 1, 2):
                relevance(mean, start)
        relevance(True, 2, k=1)
        for kind in ("*fp16", "*fp32"):
            over_vocabulary(kind)
            layers(kind)
            cosines(kind, 16)
