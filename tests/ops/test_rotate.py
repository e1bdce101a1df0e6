import itertools

import pytest
import torch

from d5p4.models.layers import rotary
from d5p4.ops.rotate import rotate
from tests.interpreter import interpreted

QUICK = [((7, 3, 6), 3, torch.float32), ((5, 33, 128), 1, torch.bfloat16)]


def case(rows, length, heads, width, dtype, angle_rows=1, seed=0):
    """x [R, T, H * d], positions [R or 1, T] that are no mere count, and their angles."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, length, heads * width, generator=g).to(dtype)
    positions = torch.randint(0, 500, (angle_rows, length), generator=g)
    return x, positions, rotary(positions, width, 10000.0, dtype)


@pytest.mark.parametrize("angle_rows", [1, 3])
def test_matches_complex_numbers(angle_rows):
    x, positions, angles = case(3, 5, 2, 6, torch.float64, angle_rows)
    heads = x.view(3, 5, 2, 6)
    speed = 10000.0 ** (-torch.arange(3, dtype=torch.float64) / 3)
    turn = torch.exp(1j * positions[:, :, None, None] * speed)
    turned = torch.complex(heads[..., :3], heads[..., 3:]) * turn
    torch.testing.assert_close(rotate(x, *angles), torch.cat((turned.real, turned.imag), -1), atol=1e-12, rtol=0)


def test_bf16_is_rounded_once():
    x, _, angles = case(2, 7, 3, 8, torch.bfloat16)
    turned = rotate(x, *angles)
    assert turned.dtype == torch.bfloat16 and torch.equal(turned, rotate(x.float(), *angles).bfloat16())


@interpreted
@pytest.mark.parametrize("shape, angle_rows, dtype", [
    pytest.param(*case, marks=[pytest.mark.full] * (case not in QUICK))
    for case in itertools.product(
        [(1, 4, 2), (7, 3, 6), (5, 33, 128)], [1, 3], [torch.float32, torch.bfloat16, torch.float16]
    )
], ids=str)  # fmt: skip
def test_kernel_gives_the_same_bits(shape, angle_rows, dtype):
    from d5p4.ops.kernels import rotate as triton

    length, heads, width = shape
    x, _, angles = case(3, length, heads, width, dtype, angle_rows)
    turned, plain = triton.rotate(x, *angles), rotate(x, *angles)
    assert turned.is_contiguous() and turned.dtype == dtype
    if dtype == torch.bfloat16:  # the interpreter cuts off where CUDA rounds: one unit in the last place
        assert ((turned.double() - plain.double()).abs() <= torch.finfo(dtype).eps * plain.double().abs()).all()
    else:
        assert torch.equal(turned, plain)


@interpreted
def test_kernel_takes_a_part_of_a_wider_projection():
    from d5p4.ops.kernels import rotate as triton

    x, _, angles = case(2, 5, 12, 8, torch.float32)
    for part in x.chunk(3, dim=-1):
        assert torch.equal(triton.rotate(part, *angles), rotate(part, *angles))
    assert triton.rotate(x[:0], *angles).shape == (0, 5, 12, 8)
