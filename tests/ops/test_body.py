import itertools

import pytest
import torch

from d5p4.models.layers import rotary
from d5p4.ops.body import add_rms_norm, norm_rotate, silu_gate
from tests.interpreter import interpreted

# In half precision a value may round the other way, and its product with it; in float32 the order of a sum, exp and a
# quotient show. The interpreter cuts bfloat16 off where CUDA rounds: one more for the product.
NORM_BOUND = {torch.float32: 8, torch.bfloat16: 3, torch.float16: 2}
GATE_BOUND = {torch.float32: 4, torch.bfloat16: 3, torch.float16: 2}
HALF = torch.float16


def normals(count, *shape, dtype, scale=1, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g).mul(scale).to(dtype) for _ in range(count)]


def norm_case(shape, dtype):
    return *normals(2, *shape, dtype=dtype, scale=3), *normals(1, shape[-1], dtype=dtype, seed=1)


def rotate_case(rows, length, heads, width, dtype, angle_rows=1):
    """x [R, T, H * d], positions [R or 1, T] that are no mere count, and their angles."""
    x = normals(1, rows, length, heads * width, dtype=dtype)[0]
    positions = torch.randint(0, 500, (angle_rows, length), generator=torch.Generator().manual_seed(1))
    return x, positions, rotary(positions, width, 10000.0, dtype)


def within(units, x, y):
    """Whether x is within this many units in the last place of y."""
    bound = units * torch.finfo(x.dtype).eps * y.double().abs() + torch.finfo(x.dtype).tiny
    return bool(((x.double() - y.double()).abs() <= bound).all())


def cases(quick, *axes):
    """All combinations; those that are not in `quick` run with the full tests only."""
    every = itertools.product(*axes)
    return [pytest.param(*case, marks=[pytest.mark.full] * (case not in quick), id=str(case)) for case in every]


def test_the_norm_matches_the_formula():
    x, delta, weight = norm_case((4, 7, 33), torch.float64)
    total, normal = add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    rms = (total.pow(2).sum(-1, keepdim=True) / 33 + 1e-5).sqrt()
    torch.testing.assert_close(normal, total / rms * weight, atol=1e-13, rtol=0)


def test_nothing_to_add_gives_the_rows_themselves():
    x, _, weight = norm_case((3, 8), torch.float32)
    total, normal = add_rms_norm(x, None, weight, 1e-5)
    assert total is x
    assert torch.equal(normal, add_rms_norm(x, torch.zeros_like(x), weight, 1e-5)[1])


def test_bf16_is_normalised_in_float32_and_rounded_twice():
    x, delta, weight = norm_case((5, 96), torch.bfloat16)
    total, normal = add_rms_norm(x, delta, weight, 1e-5)
    exact = add_rms_norm(total.double(), None, weight.double(), 1e-5)[1]
    assert normal.dtype == torch.bfloat16 and within(1, normal, exact)


@interpreted
@pytest.mark.parametrize(
    "shape, dtype",
    cases(
        [((2, 5, 384), torch.bfloat16), ((3, 1, 96), torch.float16), ((7, 1), torch.float32)],
        [(1, 33), (3, 1, 96), (2, 5, 384), (7, 1)],
        NORM_BOUND,
    ),
)
def test_the_norm_kernel_agrees(shape, dtype):
    from d5p4.ops.kernels import body

    x, delta, weight = norm_case(shape, dtype)
    for more in (delta, None):
        total, normal = body.add_rms_norm(x, more, weight, 1e-5)
        expected = x if more is None else x + more
        assert torch.equal(total, expected) or (dtype == torch.bfloat16 and within(1, total, expected))
        plain = add_rms_norm(total, None, weight, 1e-5)[1]
        assert normal.dtype == plain.dtype and normal.shape == plain.shape and within(NORM_BOUND[dtype], normal, plain)


@interpreted
def test_the_norm_kernel_takes_views_and_mixed_dtypes():
    from d5p4.ops.kernels import body

    x, delta, weight = norm_case((3, 5, 40), torch.float32)
    given = [(x[..., :33], delta[..., 7:], weight[:33]), (x, delta.to(HALF), weight), (x.to(HALF), delta, weight)]
    for args in (*given, (x.to(HALF), delta.to(HALF), weight)):
        for got, want in zip(body.add_rms_norm(*args, 1e-5), add_rms_norm(*args, 1e-5), strict=True):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
    assert body.add_rms_norm(x[:0], delta[:0], weight, 1e-5)[1].shape == (0, 5, 40)


def rotated(x, angles, weight=None, width=None):
    return norm_rotate(x, weight, 1e-6, *angles, width)


@pytest.mark.parametrize("angle_rows", [1, 3])
def test_rotation_matches_complex_numbers(angle_rows):
    x, positions, angles = rotate_case(3, 5, 2, 6, torch.float64, angle_rows)
    heads = x.view(3, 5, 2, 6)
    speed = 10000.0 ** (-torch.arange(3, dtype=torch.float64) / 3)
    turn = torch.exp(1j * positions[:, :, None, None] * speed)
    turned = torch.complex(heads[..., :3], heads[..., 3:]) * turn
    torch.testing.assert_close(rotated(x, angles), torch.cat((turned.real, turned.imag), -1), atol=1e-12, rtol=0)


def test_a_bf16_rotation_is_rounded_once():
    x, _, angles = rotate_case(2, 7, 3, 8, torch.bfloat16)
    turned = rotated(x, angles)
    assert turned.dtype == torch.bfloat16 and torch.equal(turned, rotated(x.float(), angles).bfloat16())


def test_heads_are_normalised_and_then_rotated():
    """Of the width 10, the first 6 numbers turn, and the other 4 pass through."""
    x, _, angles = rotate_case(3, 5, 2, 6, torch.float64)
    x, weight = (normals(1, *shape, dtype=torch.float64)[0] for shape in ((3, 5, 20), (10,)))
    heads = x.view(3, 5, 2, 10)
    normal = heads / (heads.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    expected = torch.cat((rotated(normal[..., :6].flatten(2), angles), normal[..., 6:]), -1)
    torch.testing.assert_close(rotated(x, angles, weight), expected, atol=1e-13, rtol=0)
    expected = torch.cat((rotated(heads[..., :6].flatten(2), angles), heads[..., 6:]), -1)
    assert torch.equal(rotated(x, angles, width=10), expected)


def test_normalised_heads_round_as_the_norm_does_before_they_turn():
    x, _, angles = rotate_case(2, 7, 3, 8, torch.bfloat16)
    weight = normals(1, 8, dtype=torch.bfloat16, seed=2)[0]
    for factor in (weight, weight.float()):
        normal = add_rms_norm(x.unflatten(-1, (-1, 8)), None, factor, 1e-6)[1]
        assert normal.dtype == factor.dtype
        turned = rotated(x, angles, factor)
        assert turned.dtype == torch.bfloat16
        assert torch.equal(turned, rotated(normal.float().flatten(2), angles).bfloat16())


@interpreted
@pytest.mark.parametrize(
    "shape, angle_rows, dtype",
    cases(
        [((7, 3, 6), 3, torch.float32), ((5, 33, 128), 1, torch.bfloat16)],
        [(1, 4, 2), (7, 3, 6), (5, 33, 128)],
        [1, 3],
        [torch.float32, torch.bfloat16, torch.float16],
    ),
)
def test_the_rotation_kernel_gives_the_same_bits(shape, angle_rows, dtype):
    from d5p4.ops.kernels import body

    x, _, angles = rotate_case(3, *shape, dtype, angle_rows)
    turned, plain = body.norm_rotate(x, None, 0.0, *angles, shape[-1]), rotated(x, angles)
    assert turned.is_contiguous() and turned.dtype == dtype
    if dtype == torch.bfloat16:  # the interpreter cuts off where CUDA rounds
        assert within(1, turned, plain)
    else:
        assert torch.equal(turned, plain)


@interpreted
@pytest.mark.parametrize(
    "shape, width, dtype",
    cases(
        [((7, 3, 6), 6, torch.float32), ((5, 4, 16), 22, torch.bfloat16), ((7, 3, 6), 22, torch.float16)],
        [(7, 3, 6), (5, 4, 16)],
        [16, 22],
        [torch.float32, torch.bfloat16, torch.float16],
    ),
)
def test_the_kernel_normalises_and_rotates(shape, width, dtype):
    """Rotations subtract, so the error is bounded relative to the largest number of a head."""
    from d5p4.ops.kernels import body

    tokens, heads, _ = shape
    _, _, angles = rotate_case(3, *shape, dtype, 3)
    x = normals(1, 3, tokens, heads * width, dtype=dtype, scale=3, seed=3)[0]
    weight = normals(1, width, dtype=dtype, seed=4)[0]
    for factor in (weight, weight.float(), None):
        given = (x, factor, 1e-6, *angles, width)
        got, plain = body.norm_rotate(*given), norm_rotate(*given)
        assert got.dtype == dtype and got.shape == plain.shape == (3, tokens, heads, width)
        scale = plain.double().abs().amax(-1, keepdim=True)
        assert ((got.double() - plain.double()).abs() <= NORM_BOUND[dtype] * torch.finfo(dtype).eps * scale).all()


@interpreted
def test_the_rotation_kernel_takes_a_part_of_a_wider_projection():
    from d5p4.ops.kernels import body

    x, _, angles = rotate_case(2, 5, 12, 8, torch.float32)
    for part in x.chunk(3, dim=-1):
        assert torch.equal(body.norm_rotate(part, None, 0.0, *angles, 8), rotated(part, angles))
    assert body.norm_rotate(x[:0], None, 0.0, *angles, 8).shape == (0, 5, 12, 8)


def test_the_gate_matches_the_formula():
    a, b = normals(2, 4, 33, dtype=torch.float64, scale=4)
    torch.testing.assert_close(silu_gate(a, b), a * torch.sigmoid(a) * b, atol=1e-13, rtol=0)


def test_a_bf16_gate_rounds_silu_and_then_the_product():
    a, b = normals(2, 4, 96, dtype=torch.bfloat16, scale=4)
    silu = (a.float() * torch.sigmoid(a.float())).bfloat16()
    off = (silu_gate(a, b).double() - (silu.float() * b.float()).bfloat16().double()).abs()
    assert (off == 0).float().mean() > 0.99


@interpreted
@pytest.mark.parametrize(
    "shape, dtype",
    cases(
        [((2, 3, 384), torch.bfloat16), ((2, 2500), torch.float16), ((1, 33), torch.float32)],
        [(1, 33), (3, 1, 96), (2, 3, 384), (2, 2500)],
        GATE_BOUND,
    ),
)
def test_the_gate_kernel_agrees(shape, dtype):
    from d5p4.ops.kernels import body

    a, b = normals(2, *shape, dtype=dtype, scale=4)
    product, plain = body.silu_gate(a, b), silu_gate(a, b)
    assert product.dtype == plain.dtype and product.shape == plain.shape and within(GATE_BOUND[dtype], product, plain)


@interpreted
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_the_gate_kernel_at_the_ends():
    from d5p4.ops.kernels import body

    a = torch.tensor([0.0, -1e4, 1e4, torch.inf, torch.nan])
    for dtype in GATE_BOUND:
        ones = torch.ones(5, dtype=dtype)
        torch.testing.assert_close(body.silu_gate(a.to(dtype), ones), silu_gate(a.to(dtype), ones), equal_nan=True)


@interpreted
def test_the_gate_kernel_takes_views():
    from d5p4.ops.kernels import body

    a, b = normals(1, 3, 5, 66, dtype=torch.float32)[0].chunk(2, dim=-1)
    torch.testing.assert_close(body.silu_gate(a, b), silu_gate(a, b))
    assert body.silu_gate(a[:0], b[:0]).shape == (0, 5, 33)
