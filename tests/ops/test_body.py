"""The plain operations between matrix products against formulas. tests/ops/kernels has their kernels."""

import torch

from d5p4.models.layers import rotary
from d5p4.ops.body import add_rms_norm, norm_rotate, silu_gate
from tests.ops.cases import normals


def norm_case(shape, dtype):
    return *normals(2, *shape, dtype=dtype, scale=3), *normals(1, shape[-1], dtype=dtype, seed=1)


def rotate_case(rows, length, heads, width, dtype, angle_rows=1):
    """x [R, T, H * d], positions [R or 1, T] that are no mere count, and their angles."""
    x = normals(1, rows, length, heads * width, dtype=dtype)[0]
    positions = torch.randint(0, 500, (angle_rows, length), generator=torch.Generator().manual_seed(1))
    return x, positions, rotary(positions, width, 10000.0, dtype)


def rotated(x, angles, weight=None, width=None):
    return norm_rotate(x, weight, 1e-6, *angles, width)


def test_the_norm_matches_the_formula():
    x, delta, weight = norm_case((4, 7, 33), torch.float64)
    total, normal = add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    rms = (total.pow(2).sum(-1, keepdim=True) / 33 + 1e-5).sqrt()
    torch.testing.assert_close(normal, total / rms * weight, atol=1e-13, rtol=0)
    same, normal = add_rms_norm(x, None, weight, 1e-5)
    assert same is x and torch.equal(normal, add_rms_norm(x, torch.zeros_like(x), weight, 1e-5)[1])


def test_rotation_matches_complex_numbers():
    for angle_rows in (1, 3):
        x, positions, angles = rotate_case(3, 5, 2, 6, torch.float64, angle_rows)
        heads = x.view(3, 5, 2, 6)
        speed = 10000.0 ** (-torch.arange(3, dtype=torch.float64) / 3)
        turn = torch.exp(1j * positions[:, :, None, None] * speed)
        turned = torch.complex(heads[..., :3], heads[..., 3:]) * turn
        torch.testing.assert_close(rotated(x, angles), torch.cat((turned.real, turned.imag), -1), atol=1e-12, rtol=0)


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


def test_the_gate_matches_the_formula():
    a, b = normals(2, 4, 33, dtype=torch.float64, scale=4)
    torch.testing.assert_close(silu_gate(a, b), a * torch.sigmoid(a) * b, atol=1e-13, rtol=0)
    a, b = normals(2, 4, 96, dtype=torch.bfloat16, scale=4)
    silu = (a.float() * torch.sigmoid(a.float())).bfloat16()  # rounded before the product
    off = (silu_gate(a, b).double() - (silu.float() * b.float()).bfloat16().double()).abs()
    assert (off == 0).float().mean() > 0.99
