"""The kernels through Triton's interpreter: small shapes, on the CPU. tests/gpu repeats them on CUDA."""

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with the dev extra on Linux")
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs these on CUDA", allow_module_level=True)

from d5p4.ops import sample, vocab  # noqa: E402
from d5p4.ops.body import add_rms_norm  # noqa: E402
from d5p4.ops.kernels import body, partition_map  # noqa: E402
from d5p4_lab.baseline import draw_logits  # noqa: E402
from tests.interpreter import bfloat16_products  # noqa: E402, F401
from tests.ops.cases import normals  # noqa: E402
from tests.ops.kernels import cases  # noqa: E402

pytestmark = pytest.mark.usefixtures("bfloat16_products")
full = pytest.mark.full
HALF, SINGLE, BRAIN = DTYPES = (torch.float16, torch.float32, torch.bfloat16)
BETAS = {"additive": 100.0, "multiplicative": 1.0}
SHAPES = [  # rows, tokens, heads, key heads, width
    (3, 4, 4, 1, 16),  # four heads of four tokens fill a tile of 16
    (2, 33, 6, 2, 20),  # three heads per key head, and a last tile of one token
    (3, 5, 7, 1, 40),  # seven heads do not fill eight places
    (1, 1, 2, 2, 128),
    (2, 70, 2, 1, 64),  # two tiles, two steps
]
AXES = ("rows", "tokens", "heads", "key_heads", "width")


def each(
    check: Any, quick: Iterable[tuple[Any, ...]], every: Iterable[tuple[Any, ...]] = (), **more: Any
) -> Iterator[Any]:
    """A case per tuple of arguments. The cases that are not in `quick` run with the full tests only."""
    quick = list(quick)
    for args in (*quick, *(args for args in every if args not in quick)):
        name = f"{check.__name__} {args} {more or ''}"
        yield pytest.param(check, args, more, id=name, marks=[full] * (args not in quick))


@pytest.mark.parametrize("check, args, more", [
    *each(cases.check_statistics, [(7, 37, BRAIN), (7, 5000, SINGLE)], product([7], (37, 5000), DTYPES)),
    *each(cases.check_bad_rows, [(4100,)]),
    *each(cases.check_draws, [(6, 4500, HALF, 0.3)], product([6], [4500], DTYPES[:2], (0.3, 1.0))),
    *each(cases.check_gram, [(2, 20, 4, 40, HALF)], product([2], (5, 20), [4], [40], DTYPES[:2])),
    *each(cases.check_solver, [(3, 2, 1, "additive", 10.0)], starts="n", local_search=False),
    *(
        one
        for starts, search in product(("one", "k", "n"), (False, True))
        for one in each(cases.check_solver, [], [(3, 2, 1, "additive", 10.0)], starts=starts, local_search=search)
    ),
    *each(cases.check_hard_problems, [(2, 2, 1, "cpu", False)], [(2, 2, 1), (4, 4, 1)]),
    *each(cases.check_permutation, [(3, 2, 2, "additive")], product([3], [2], [2], BETAS)),
    *each(cases.check_equal_rows, [(3, 3, 2, "multiplicative")], product([3], [3], [2], BETAS)),
    *each(cases.check_solver, [], [(k, w, p, "additive", 10.0) for k, w, p in ((4, 4, 4), (6, 10, 1), (8, 4, 2))]),
    *each(cases.check_rng, [(600,)]),
    *each(
        cases.check_norm,
        [((2, 5, 384), BRAIN), ((3, 1, 96), HALF), ((7, 1), SINGLE)],
        product([(1, 33), (3, 1, 96), (2, 5, 384), (7, 1)], DTYPES),
    ),
    *each(
        cases.check_rotation,
        [(7, 3, 6, 3, SINGLE), (5, 33, 128, 1, BRAIN)],
        ((*shape, *more) for shape in ((1, 4, 2), (7, 3, 6), (5, 33, 128)) for more in product((1, 3), DTYPES)),
    ),
    *each(
        cases.check_norm_rotate,
        [(7, 3, 6, 6, SINGLE), (5, 4, 22, 16, BRAIN), (7, 3, 22, 6, HALF)],
        ((*shape, dtype) for shape in ((7, 3, 16, 6), (5, 4, 16, 16), (5, 4, 22, 16)) for dtype in DTYPES),
    ),
    *each(
        cases.check_gate,
        [((2, 3, 384), BRAIN), ((2, 2500), HALF), ((1, 33), SINGLE)],
        product([(1, 33), (3, 1, 96), (2, 3, 384), (2, 2500)], DTYPES),
    ),
    *(
        one
        for number, shape in enumerate(SHAPES)
        for dtype in DTYPES
        for one in each(
            cases.check_attention,
            [(dtype,)] if (number, dtype) in ((0, BRAIN), (1, SINGLE), (2, BRAIN)) else [],
            [(dtype,)],
            **dict(zip(AXES, shape, strict=True)),
        )
    ),
    *each(cases.check_attention_alone, [(BRAIN,), (SINGLE,)], **dict(zip(AXES, (5, 4, 4, 2, 16), strict=True))),
])  # fmt: skip
def test_kernel(check, args, more):
    check(*args, **more)


@pytest.mark.parametrize("check, args, more", [
    *each(cases.check_solver, [(3, 3, 2, "multiplicative", 1.0)], [(3, 3, 2, "additive", 100.0)]),
    *each(cases.check_full_search, [(3, 4, 2, 300.0, 0.9)], [(3, 4, 2, 300.0, 0.2)]),
])  # fmt: skip
@pytest.mark.parametrize("exact", [0, pytest.param(256, marks=full)])
def test_solver_in_both_precisions(monkeypatch, check, args, more, exact):
    """Up to `exact` rows in float64, more in float32; and with scratch memory for five starts, so that the starts of a
    problem are divided among several launches."""
    monkeypatch.setattr(partition_map, "EXACT", exact)
    monkeypatch.setattr(partition_map, "_SCRATCH", 5 * 3 * 12 * 4)
    check(*args, **more)


EVERYTHING = {"top_k": 5, "top_p": 0.5, "min_p": 0.4, "temperature": 0.4}
OPTIONS = [EVERYTHING, {}, {"temperature": 0.4}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}]


@pytest.mark.parametrize("options", [pytest.param(one, marks=[full] * (one != EVERYTHING)) for one in OPTIONS], ids=str)
def test_draws_with_every_option(monkeypatch, options):
    """What `ops.sample` makes of the kernels, in chunks of two rows, against its plain version."""
    monkeypatch.setattr(sample, "KERNEL_CHUNK", 16 * 600)
    g = torch.Generator().manual_seed(0)
    logits, u = torch.randn(5, 300, generator=g), torch.rand(5, 3, generator=g, dtype=torch.float64)
    banned = torch.arange(300) == 4
    given = {"temperature": 1.0, "top_k": None, "top_p": None, "min_p": None} | options
    offset = vocab.offset_of(None, banned)
    temperature, *filters = given.values()
    tokens, stats = sample.kernel_draw(logits, offset, u, (temperature, tuple(filters), ("entropy",)))
    plain, plain_stats = draw_logits(logits, banned, u, **given, want=("entropy",))
    assert torch.equal(tokens, plain)
    for name, values in plain_stats.items():
        torch.testing.assert_close(stats[name], values, atol=3e-6, rtol=0)


def test_norm_of_views_and_mixed_dtypes():
    [x, delta], [weight] = (normals(n, *shape, dtype=SINGLE) for n, shape in ((2, (3, 5, 40)), (1, (40,))))
    given = [(x[..., :33], delta[..., 7:], weight[:33]), (x, delta.half(), weight), (x.half(), delta, weight)]
    for args in (*given, (x.half(), delta.half(), weight)):
        for got, want in zip(body.add_rms_norm(*args, 1e-5), add_rms_norm(*args, 1e-5), strict=True):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
    assert body.add_rms_norm(x[:0], delta[:0], weight, 1e-5)[1].shape == (0, 5, 40)
