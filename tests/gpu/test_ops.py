"""The kernels on CUDA at real sizes; the promises are those of tests/ops/kernels."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from d5p4.ops.kernels import partition_map  # noqa: E402
from d5p4.ops.vocab import vocab_stats  # noqa: E402
from d5p4.types import Head
from tests.ops.kernels import cases  # noqa: E402
from tests.search.cases import inputs  # noqa: E402

pytestmark = pytest.mark.gpu
HALF = torch.bfloat16
DTYPES = (torch.float32, torch.float16, HALF)
BETAS = [("additive", 10.0), ("additive", 100.0), ("multiplicative", 1.0)]
POOLS = [(1, 5, 3), (5, 1, 3), (4, 4, 64), (6, 10, 16), (8, 4, 16), (16, 16, 4), (20, 32, 2)]
LOW_RANK = [(5, 4, 64), (6, 10, 16), (20, 16, 4), (32, 32, 2), (64, 32, 1)]  # k, w, prompts
HEADS = [(32, 128), (28, 128), (4, 128), (12, 64), (3, 6)]
TURNED = [(32, 128, 128), (8, 128, 128), (28, 128, 64), (3, 22, 6)]
CASES = [
    *((cases.check_statistics, (9, size, dtype)) for size in (37, 8192, 50258, 126464) for dtype in DTYPES),
    (cases.check_bad_rows, (126464,)),
    *((cases.check_draws, (64, *how)) for how in itertools.product((37, 126464), (DTYPES[0], HALF), (1.0, 0.3, 1.7))),
    *((cases.check_gram, (*pool, 32, 768, d)) for pool in ((1, 60), (3, 16), (2, 32), (1, 200)) for d in DTYPES),
    *((cases.check_solver, (*pool, *beta)) for pool in POOLS for beta in BETAS),
    *(
        (cases.check_full_search, (*pool, *how))
        for pool in LOW_RANK
        for how in itertools.product((1.0, 30.0, 300.0), (0.2, 0.9))
    ),
    *((cases.check_hard_problems, pool) for pool in ((6, 10, 3), (20, 16, 1))),
    *(
        (cases.check_permutation, (*pool, kind))
        for pool in ((6, 10, 8), (20, 16, 2))
        for kind in ("additive", "multiplicative")
    ),
    *((cases.check_equal_rows, (4, 4, 64, kind)) for kind in ("additive", "multiplicative")),
    (cases.check_rng, (100_000,)),
    *((cases.check_norm, ((7, 331, width), dtype)) for width in (33, 384, 3584, 4096, 8192) for dtype in DTYPES),
    *((cases.check_rotation, (383, *shape, n, dtype)) for shape in HEADS for n in (1, 3) for dtype in DTYPES),
    *((cases.check_norm_rotate, (83, *shape, dtype)) for shape in TURNED for dtype in DTYPES),
    *((cases.check_gate, ((3, 301, width), dtype)) for width in (33, 1536, 12288, 18944) for dtype in DTYPES),
]


@pytest.mark.parametrize("check, args", CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_kernel(check, args):
    check(*args, device="cuda")


def test_solver_in_single_precision(monkeypatch):
    monkeypatch.setattr(partition_map, "EXACT", 0)
    cases.check_solver(6, 10, 64, "additive", 10.0, "cuda")


def test_solver_in_several_launches_and_many_times_over(monkeypatch):
    """The starts of one problem may be divided among launches, and finish in any order. The choice is the same."""
    for k, w in ((6, 10), (20, 16)):
        quality, similarity, tie = (x.cuda() for x in inputs(3, k, w, 0))
        given = (similarity * 10 + torch.diag_embed(quality)).float(), k, None, quality, tie
        whole = partition_map.partition_map(*given)
        assert all(torch.equal(partition_map.partition_map(*given), whole) for _ in range(200))
        with monkeypatch.context() as patch:
            patch.setattr(partition_map, "_SCRATCH", 7 * k * k * w * 8)
            assert torch.equal(partition_map.partition_map(*given), whole)


def head(vocabulary, width):
    g = torch.Generator(device="cuda").manual_seed(0)
    weight = (torch.randn(vocabulary, width, generator=g, device="cuda") * 3 / width**0.5).to(HALF)
    banned = torch.zeros(vocabulary, dtype=torch.bool, device="cuda")
    banned[5] = True
    return weight, banned


def test_streamed_head_stays_within_its_memory():
    """15,360 rows of 126,464 logits would be 7.8 GB in float32."""
    weight, banned = head(126464, 1024)
    states = torch.randn(15360, 1024, device="cuda").to(HALF)
    vocab_stats(states[:300], Head(weight, None, banned), ("entropy",))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    vocab_stats(states, Head(weight, None, banned), ("entropy",))
    assert torch.cuda.max_memory_allocated() - before < 1.5e9
