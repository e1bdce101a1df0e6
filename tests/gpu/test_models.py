"""Experts on CUDA equal the plain loop, and bodies with experts and stores are recorded in a CUDA graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from d5p4.models import load
from d5p4.models.experts import Experts
from d5p4.types import Context, Store
from tests.checkpoints import WRITERS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
WIDE = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
EXPERTS = {"moe_intermediate_size": 32, "expert_intermediate_size": 32}
OWN = {"llada_moe": {"dense_intermediate_size": 64}, "llada2_moe": {"rotary_dim": 8}}


def test_grouped_experts_equal_the_loop() -> None:
    torch.manual_seed(0)
    module = Experts(16, 128, 64).to("cuda", torch.bfloat16).requires_grad_(False)
    if not module.recordable:
        pytest.skip("this GPU or torch has no grouped matrix product without a wait")
    h = torch.randn(37, 128, device="cuda", dtype=torch.bfloat16)
    numbers = torch.randint(0, 11, (37 * 4,), device="cuda").sort().values  # five experts have no tokens
    rows = h.repeat_interleave(4, dim=0)
    grouped, looped = module._grouped(rows, numbers), module._loop(rows, numbers)
    assert looped.float().std() > 0.01 and (grouped - looped).float().abs().max() < 0.02 * looped.float().abs().max()
    h.requires_grad_()
    experts = torch.randint(0, 16, (37, 4), device="cuda")
    module(h, experts, torch.ones(37, 4, device="cuda")).float().sum().backward()
    assert h.grad is not None and h.grad.isfinite().all()


@pytest.mark.parametrize("kind", [kind for kind in WRITERS if kind != "mdlm"])
def test_bodies_with_stores_are_recorded(tmp_path: Path, kind: str) -> None:
    sizes = {} if "llada" in kind and "moe" not in kind else {**WIDE, **EXPERTS, **OWN.get(kind, {})}
    model = load(WRITERS[kind](tmp_path, **sizes), "cuda", "bf16")
    assert model.recordable
    tokens = torch.randint(0, 45, (3, 12), device="cuda")
    whole = model.body(tokens, None, Context(keep=True))
    kv = torch.stack([torch.stack(pair) for pair in whole.kept])
    first = torch.full((3,), 8, device="cuda")
    edge = whole.states[:, 8] if whole.edge is not None else None
    context = Context(first, (Store(kv, torch.arange(3, device="cuda"), first),), edge, keep=True)
    valid = torch.ones(3, 4, dtype=torch.bool, device="cuda")
    part = tokens[:, 8:].clone()
    with torch.inference_mode():
        for _ in range(2):
            wanted = model.body(part, valid, context)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = model.body(part, valid, context)
        graph.replay()
    assert torch.equal(recorded.states, wanted.states) and recorded.states.isfinite().all()
    if model.block:
        difference = (recorded.states - whole.states[:, 8:]).float().abs()
        assert difference.mean() < 0.05
