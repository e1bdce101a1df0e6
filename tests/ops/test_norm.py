import itertools

import pytest
import torch

from d5p4.ops.norm import add_rms_norm
from tests.interpreter import interpreted

# In half precision the normalised value may round the other way, and its product with it; in float32 the order of the
# sum shows. The interpreter cuts bfloat16 off where CUDA rounds: one more for the product.
BOUND = {torch.float32: 8, torch.bfloat16: 3, torch.float16: 2}
SHAPES = [(1, 33), (3, 1, 96), (2, 5, 384), (7, 1)]
QUICK = [((2, 5, 384), torch.bfloat16), ((3, 1, 96), torch.float16), ((7, 1), torch.float32)]


def case(shape, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    x, delta = (torch.randn(shape, generator=g).mul(3).to(dtype) for _ in range(2))
    return x, delta, torch.randn(shape[-1], generator=g).to(dtype)


def within(units, x, y):
    """Whether x is within so many units in the last place of y."""
    return bool(((x.double() - y.double()).abs() <= units * torch.finfo(x.dtype).eps * y.double().abs()).all())


def test_matches_the_formula():
    x, delta, weight = case((4, 7, 33), torch.float64)
    total, normal = add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    rms = (total.pow(2).sum(-1, keepdim=True) / 33 + 1e-5).sqrt()
    torch.testing.assert_close(normal, total / rms * weight, atol=1e-13, rtol=0)


def test_nothing_to_add_gives_the_rows_themselves():
    x, _, weight = case((3, 8), torch.float32)
    total, normal = add_rms_norm(x, None, weight, 1e-5)
    assert total is x
    assert torch.equal(normal, add_rms_norm(x, torch.zeros_like(x), weight, 1e-5)[1])


def test_bf16_is_normalised_in_float32_and_rounded_twice():
    x, delta, weight = case((5, 96), torch.bfloat16)
    total, normal = add_rms_norm(x, delta, weight, 1e-5)
    exact = add_rms_norm(total.double(), None, weight.double(), 1e-5)[1]
    assert normal.dtype == torch.bfloat16 and within(1, normal, exact)


@interpreted
@pytest.mark.parametrize("shape, dtype", [
    pytest.param(*case, marks=[pytest.mark.full] * (case not in QUICK)) for case in itertools.product(SHAPES, BOUND)
], ids=str)  # fmt: skip
def test_kernel_agrees(shape, dtype):
    from d5p4.ops.kernels import norm

    x, delta, weight = case(shape, dtype)
    for more in (delta, None):
        total, normal = norm.add_rms_norm(x, more, weight, 1e-5)
        expected = x if more is None else x + more
        assert torch.equal(total, expected) or (dtype == torch.bfloat16 and within(1, total, expected))
        plain = add_rms_norm(total, None, weight, 1e-5)[1]
        assert normal.dtype == plain.dtype and normal.shape == plain.shape and within(BOUND[dtype], normal, plain)


@interpreted
def test_kernel_takes_views_and_mixed_dtypes():
    from d5p4.ops.kernels import norm

    x, delta, weight = case((3, 5, 40), torch.float32)
    half = torch.float16
    cases = [(x[..., :33], delta[..., 7:], weight[:33]), (x, delta.to(half), weight), (x.to(half), delta, weight)]
    for args in (*cases, (x.to(half), delta.to(half), weight)):
        for got, want in zip(norm.add_rms_norm(*args, 1e-5), add_rms_norm(*args, 1e-5), strict=True):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
    assert norm.add_rms_norm(x[:0], delta[:0], weight, 1e-5)[1].shape == (0, 5, 40)
