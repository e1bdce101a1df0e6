"""Attention over stores at real sizes, large and recorded inputs, and bodies with and without kernels."""

import pytest
import torch

pytest.importorskip("triton")

import d5p4  # noqa: E402
from d5p4.ops import kernels  # noqa: E402
from d5p4.ops.attention import attend_stored  # noqa: E402
from d5p4.ops.body import silu_gate  # noqa: E402
from d5p4.types import Store  # noqa: E402
from tests.ops.cases import attention_inputs  # noqa: E402
from tests.ops.kernels import cases  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def randn(*shape, dtype=torch.float32, seed=0):
    g = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=g).to(dtype)


def both(function, *args):
    """What the kernels give and what the plain version gives."""
    assert kernels.usable(args[0])
    with kernels.off():
        plain = function(*args)
    return function(*args), plain


def test_more_numbers_than_32_bits_count():
    a = torch.ones(180_000, 12288, dtype=torch.bfloat16, device="cuda")
    product = silu_gate(a, a)
    assert (product[-1] == product[0]).all() and (product[-1] == silu_gate(a[:1], a[:1])[0]).all()


BLOCKS = [  # the shapes of blocks of SDAR-8B and LLaDA-8B, small blocks, a long suffix, and odd sizes
    dict(rows=16, tokens=32, heads=32, key_heads=8, width=128, positions=(133, 224)),
    dict(rows=4, tokens=32, heads=32, key_heads=32, width=128, positions=(133, 224)),
    dict(rows=60, tokens=4, heads=32, key_heads=8, width=128),
    dict(rows=3, tokens=300, heads=8, key_heads=2, width=128, positions=(133, 224)),
    dict(rows=5, tokens=33, heads=14, key_heads=2, width=80),
    dict(rows=3, tokens=1, heads=3, key_heads=1, width=12),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", BLOCKS, ids=str)
def test_attention_over_stores(shape, dtype):
    """The error of the kernel against float64, and the same bits for a row among other rows."""
    cases.check_attention(dtype, "cuda", **shape)
    cases.check_attention_alone(dtype, "cuda", **shape)


def test_recorded_attention_reads_new_lengths():
    given, own, stores = attention_inputs(4, 32, 32, 8, 128, torch.bfloat16, "cuda")
    attend_stored(*given, own, stores, 1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mixed = attend_stored(*given, own, stores, 1)
    for length in (40, 0, 17):
        for store in stores:
            store.length.fill_(length)
        graph.replay()
        assert torch.equal(mixed, attend_stored(*given, own, stores, 1))


def test_a_store_of_more_numbers_than_32_bits_count():
    given, _, _ = attention_inputs(2, 32, 32, 8, 128, torch.bfloat16, "cuda")
    given = [x.nan_to_num() for x in given]
    kv = torch.empty(1, 2, 2200, 1024, 8, 128, dtype=torch.bfloat16, device="cuda")
    kv[:, :, -2:] = randn(2, 2, 1024, 8, 128, dtype=torch.bfloat16)
    slot, length = torch.tensor([2199, 2198], device="cuda"), torch.tensor([1024, 1000], device="cuda")
    few = Store(kv[:, :, -2:].clone(), torch.tensor([1, 0], device="cuda"), length)
    assert kv[0, 0].numel() > 2**31
    mixed = attend_stored(*given, None, [Store(kv, slot, length)], 0)
    assert torch.equal(mixed, attend_stored(*given, None, [few], 0))


def batch():
    """Tokens [5, 24] and their left padding."""
    tokens = torch.randint(0, 40, (5, 24), generator=torch.Generator().manual_seed(0)).cuda()
    first = torch.tensor([[0], [3], [23], [1], [0]], device="cuda")
    return tokens, torch.arange(24, device="cuda")[None] >= first


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype, bound", [("bf16", 2**-6), ("float32", 1e-5)])
def test_bodies_agree(folder, dtype, bound, padded):
    """Relative error of the states at real tokens; of bfloat16 two units in the last place."""
    model = d5p4.load(folder, "cuda", dtype)
    tokens, mask = batch()
    with_kernels, plain = both(lambda x: model.body(tokens, mask if padded else None), model.head.weight)
    for got, want in zip(with_kernels[:2], plain[:2], strict=True):
        if padded:
            got, want = got[mask], want[mask]
        assert got.dtype == want.dtype and (got - want).norm() <= bound * want.norm()


def test_gradients_go_round_the_kernels(folder):
    """Also where only some weights want one: the first norm then sees rows without gradient."""
    model = d5p4.load(folder, "cuda", "float32")
    tokens, mask = batch()

    def gradients():
        model.zero_grad()
        model.body(tokens, mask).states.sin().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    for wanted in ("", "norm", "proj"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(wanted in name)
        if not any(p.requires_grad for p in model.parameters()):
            continue
        got = gradients()
        with kernels.off():
            plain = gradients()
        assert got.keys() == plain.keys() and got
        for name, gradient in plain.items():
            assert (got[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name
