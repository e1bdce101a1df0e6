"""Forwards divided among ranks on CUDA: NCCL with one rank, and two ranks on one GPU that exchange through the host."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import d5p4
from d5p4.distributed import ConnectedRanks
from tests.distributed import work
from tests.distributed.ranks import free_port, results

pytestmark = pytest.mark.gpu
CASES = [
    {"method": "tree"},
    {"method": "d5p4"},
    {"method": "d5p4x", "guidance": 1.5},
    {"method": "diverse-beam", "features": "mean"},
    {"method": "d5p3", "distinct": True},
    {"method": "e-smc", "interval": 2},
    {"method": "k-dpp"},
    {"method": "best-of-n", "rank": "logprob"},
]


def test_two_ranks_on_one_gpu_give_the_bits_of_one(folder, tmp_path):
    function, given = "tests.distributed.work:on_one_gpu", {"model_folder": str(folder), "cases": CASES}
    (alone,) = results(function, 1, tmp_path / "one", beam=1, **given)
    for answers in results(function, 2, tmp_path / "two", beam=2, **given):
        for case, one, two in zip(CASES, alone, answers, strict=True):
            assert two == one, case


@pytest.fixture(scope="module")
def nccl():
    """A group of one rank: every call goes through NCCL."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo")
    torch.cuda.set_device(0)
    yield ConnectedRanks([0], 0, dist.new_group([0], backend="gloo"), dist.new_group([0], backend="nccl"))
    dist.destroy_process_group()
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        del os.environ[name]


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_nccl_gives_the_bits_of_no_group(folder, nccl, options, dtype):
    model = d5p4.load(folder, "cuda", dtype)
    common = dict(k=4, w=4, gen_length=12, seed=3, temperature=1.2, logprobs=True)
    alone = d5p4.generate(model, work.GPU_PROMPTS, **common | options)
    spread = d5p4.generate(model, work.GPU_PROMPTS, ranks=nccl, **common | options)
    assert work.answers(spread) == work.answers(alone)
    assert torch.equal(spread.similarity, alone.similarity)
