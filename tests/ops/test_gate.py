import itertools

import pytest
import torch

from d5p4.ops.gate import silu_gate
from tests.interpreter import interpreted

# In half precision silu may round the other way, and its product with it; in float32 exp and the quotient show. The
# interpreter cuts bfloat16 off where CUDA rounds: one more for the product.
BOUND = {torch.float32: 4, torch.bfloat16: 3, torch.float16: 2}
SHAPES = [(1, 33), (3, 1, 96), (2, 3, 384), (2, 2500)]
QUICK = [((2, 3, 384), torch.bfloat16), ((2, 2500), torch.float16), ((1, 33), torch.float32)]


def case(shape, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g).mul(4).to(dtype) for _ in range(2))


def test_matches_the_formula():
    a, b = case((4, 33), torch.float64)
    torch.testing.assert_close(silu_gate(a, b), a * torch.sigmoid(a) * b, atol=1e-13, rtol=0)


def test_bf16_rounds_silu_and_then_the_product():
    a, b = case((4, 96), torch.bfloat16)
    silu = (a.float() * torch.sigmoid(a.float())).bfloat16()
    off = (silu_gate(a, b).double() - (silu.float() * b.float()).bfloat16().double()).abs()
    assert (off == 0).float().mean() > 0.99


@interpreted
@pytest.mark.parametrize("shape, dtype", [
    pytest.param(*case, marks=[pytest.mark.full] * (case not in QUICK)) for case in itertools.product(SHAPES, BOUND)
], ids=str)  # fmt: skip
def test_kernel_agrees(shape, dtype):
    from d5p4.ops.kernels import gate

    a, b = case(shape, dtype)
    product, plain = gate.silu_gate(a, b), silu_gate(a, b)
    assert product.dtype == plain.dtype and product.shape == plain.shape
    off = (product.double() - plain.double()).abs()
    assert (off <= BOUND[dtype] * torch.finfo(dtype).eps * plain.double().abs() + torch.finfo(dtype).tiny).all()


@interpreted
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_kernel_at_the_ends():
    from d5p4.ops.kernels import gate

    a = torch.tensor([0.0, -1e4, 1e4, torch.inf, torch.nan])
    for dtype in BOUND:
        ones = torch.ones(5, dtype=dtype)
        torch.testing.assert_close(gate.silu_gate(a.to(dtype), ones), silu_gate(a.to(dtype), ones), equal_nan=True)


@interpreted
def test_kernel_takes_views():
    from d5p4.ops.kernels import gate

    both = torch.randn(3, 5, 66, generator=torch.Generator().manual_seed(0))
    a, b = both.chunk(2, dim=-1)
    torch.testing.assert_close(gate.silu_gate(a, b), silu_gate(a, b))
    assert gate.silu_gate(a[:0], b[:0]).shape == (0, 5, 33)
