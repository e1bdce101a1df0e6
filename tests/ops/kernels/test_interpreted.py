"""The kernels through Triton's interpreter: small shapes, on the CPU. tests/gpu repeats them on CUDA."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with the dev extra on Linux")
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs these on CUDA", allow_module_level=True)

from d5p4.ops import sample, vocab  # noqa: E402
from d5p4.ops.kernels import partition_map  # noqa: E402
from d5p4_lab.baseline import draw_logits  # noqa: E402
from tests.interpreter import bfloat16_products  # noqa: E402, F401
from tests.ops.kernels import cases  # noqa: E402

full = pytest.mark.full
DTYPES = (torch.float16, torch.float32, torch.bfloat16)
BETAS = {"additive": 100.0, "multiplicative": 1.0}


def cases_of(quick, *axes):
    """All combinations; those that are not in `quick` run with the full tests only."""
    return [pytest.param(*case, marks=[full] * (case not in quick), id=str(case)) for case in product(*axes)]


@pytest.mark.parametrize(
    "vocabulary, dtype", cases_of([(37, torch.bfloat16), (5000, torch.float32)], (37, 5000), DTYPES)
)
def test_statistics(vocabulary, dtype):
    cases.check_statistics(7, vocabulary, dtype)


def test_rows_that_are_not_finite():
    cases.check_bad_rows(4100)


@pytest.mark.parametrize("dtype, temperature", cases_of([(torch.float16, 0.3)], DTYPES[:2], (0.3, 1.0)))
def test_draws(dtype, temperature):
    cases.check_draws(6, 4500, dtype, temperature)


def test_the_tail_keeps_its_mass():
    cases.check_tail(20_000, 40)


def test_log_probabilities():
    cases.check_logprob(300)


# bfloat16 products are wrong in the interpreter; tests/gpu has them.
@pytest.mark.parametrize("size, dtype", cases_of([(20, torch.float16)], (5, 20), DTYPES[:2]))
def test_gram(size, dtype):
    cases.check_gram(2, size, 4, 40, dtype)


@pytest.mark.parametrize("kind, exact", cases_of([("additive", 256), ("multiplicative", 0)], BETAS, (0, 256)))
def test_solver(monkeypatch, kind, exact):
    """Up to `exact` rows in float64, more in float32."""
    monkeypatch.setattr(partition_map, "EXACT", exact)
    cases.check_solver(3, 3, 2, kind, BETAS[kind])


@pytest.mark.parametrize("starts, search", cases_of([("n", False)], ("one", "k", "n"), (False, True)))
def test_solver_options(starts, search):
    cases.check_solver(3, 2, 1, "additive", 10.0, starts=starts, local_search=search)


@pytest.mark.parametrize("exact, shared", cases_of([(0, 0.9)], (0, 256), (0.2, 0.9)))
def test_solver_against_greedy_from_all_starts(monkeypatch, exact, shared):
    """With scratch memory for five starts, so that the starts of a problem are divided among several launches."""
    monkeypatch.setattr(partition_map, "EXACT", exact)
    monkeypatch.setattr(partition_map, "_SCRATCH", 5 * 3 * 12 * 4)
    cases.check_full_search(3, 4, 2, 300.0, shared)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=full)])
def test_solver_on_hard_problems(every):
    cases.check_hard_problems(2, 2, 1, every=every)


@pytest.mark.parametrize("exact", [0, pytest.param(256, marks=full)])
def test_solver_with_gains_that_are_not_finite(monkeypatch, exact):
    monkeypatch.setattr(partition_map, "EXACT", exact)
    cases.check_bad_gains(2, 2)


def test_solver_at_any_scale():
    cases.check_scale(2, 3, 1)


def test_small_ties():
    cases.check_small_ties(3, 2)


@pytest.mark.parametrize("kind", ["additive", pytest.param("multiplicative", marks=full)])
def test_solver_permuted(kind):
    cases.check_permutation(3, 2, 2, kind)


@pytest.mark.parametrize("kind", ["multiplicative", pytest.param("additive", marks=full)])
def test_solver_among_equal_rows(kind):
    cases.check_equal_rows(3, 3, 2, kind)


def test_rng():
    cases.check_rng(600)


@full
@pytest.mark.parametrize("k, w, prompts", [(4, 4, 4), (6, 10, 1), (8, 4, 2)])
def test_solver_at_real_sizes(k, w, prompts):
    cases.check_solver(k, w, prompts, "additive", 10.0)
    if k * w < 32:  # with n starts, the interpreter takes minutes for larger pools
        cases.check_hard_problems(k, w, 1)


EVERYTHING = {"top_k": 5, "top_p": 0.5, "temperature": 0.4}
OPTIONS = [EVERYTHING, {}, {"temperature": 0.4}, {"top_k": 5}, {"top_p": 0.5}, {"temperature": 0.0}]


@pytest.mark.parametrize("options, rows", cases_of([(EVERYTHING, [4, 1, 1])], OPTIONS, (None, [4, 1, 1])))
def test_draws_with_every_option(monkeypatch, options, rows):
    """What `ops.sample` makes of the kernels, in chunks of two rows, against its plain version."""
    monkeypatch.setattr(sample, "KERNEL_CHUNK", 16 * 600)
    g = torch.Generator().manual_seed(0)
    logits, u = torch.randn(5, 300, generator=g), torch.rand(5, 3, generator=g, dtype=torch.float64)
    banned = torch.arange(300) == 4
    rows = None if rows is None else torch.tensor(rows)
    u = u if rows is None else u[:3]
    given = {"temperature": 1.0, "top_k": None, "top_p": None} | options
    offset = vocab.offset_of(None, banned)
    tokens, stats = sample.kernel_draw(logits, offset, u, (*given.values(), ("entropy",)), rows)
    plain, plain_stats = draw_logits(logits, banned, u, **given, want=("entropy",), rows=rows)
    assert torch.equal(tokens, plain)
    for name, values in plain_stats.items():
        torch.testing.assert_close(stats[name], values, atol=3e-6, rtol=0)


AXES = ("rows", "tokens", "heads", "key_heads", "width")
ATTENTION = [
    (3, 4, 4, 1, 16),  # four heads of four tokens fill a tile of 16
    (2, 33, 6, 2, 20),  # three heads per key head, and a last tile of one token
    (3, 5, 7, 1, 40),  # seven heads do not fill eight places
    (1, 1, 2, 2, 128),
    (2, 70, 2, 1, 64),  # two tiles, two steps
]


@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize(
    "shape, dtype",
    cases_of(
        [(ATTENTION[0], torch.bfloat16), (ATTENTION[1], torch.float32), (ATTENTION[2], torch.bfloat16)],
        ATTENTION,
        DTYPES,
    ),
)
def test_attention_over_stores(shape, dtype):
    cases.check_attention(dtype, **dict(zip(AXES, shape, strict=True)))


@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_of_a_row_does_not_depend_on_other_rows(dtype):
    cases.check_attention_alone(dtype, rows=5, tokens=4, heads=4, key_heads=2, width=16)
