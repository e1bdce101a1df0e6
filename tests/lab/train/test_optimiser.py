"""Muon updates matrices and AdamW the rest; the rate warms up, falls along a cosine and ends at zero."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from d5p4.models.llada import LLaDA
from d5p4.models.mdlm import MDLM
from d5p4_lab.train.loop import Budget
from d5p4_lab.train.optimiser import WARMUP_STEPS, Muon, Optimiser, is_block_matrix, orthogonalised, rate_scale

LLADA = {"d_model": 8, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "mlp_hidden_size": 12, "vocab_size": 7}
LLADA |= {"embedding_size": 7, "mask_token_id": 6, "max_sequence_length": 16, "rope_theta": 10000.0}
LLADA |= {"rms_norm_eps": 1e-5, "weight_tying": False}
DIT = {"hidden_dim": 8, "n_blocks": 2, "n_heads": 2, "cond_dim": 4, "vocab_size": 7, "model_length": 16}


def test_singular_values_come_near_one_and_singular_vectors_stay() -> None:
    draw = torch.Generator().manual_seed(0)
    for shape in ((32, 32), (96, 32), (8, 64)):
        matrices = torch.randn(4, *shape, generator=draw) * torch.tensor([1e-3, 1.0, 10.0, 1e3])[:, None, None]
        result = orthogonalised(matrices)
        values = torch.linalg.svdvals(result)
        # A square matrix has singular values near zero, which five rounds cannot bring up.
        least = 0.6 if shape[0] != shape[1] else 0.0
        assert result.shape == matrices.shape
        assert values.max() < 1.3 and values.min() > least, shape
        assert (values > 0.6).float().mean() > 0.9, shape
    left, _, right = torch.linalg.svd(torch.randn(12, 30, generator=draw), False)
    inner = left.T @ orthogonalised((left * torch.linspace(0.2, 3.0, 12)) @ right) @ right.T
    assert (inner - torch.diag(inner.diagonal())).abs().max() < 1e-5
    assert inner.diagonal().min() > 0.6
    assert (orthogonalised(torch.zeros(2, 4, 6)) == 0).all()


def stepped(named: list[tuple[str, nn.Parameter]], gradients: list[Tensor]) -> list[Tensor]:
    for (_, parameter), gradient in zip(named, gradients, strict=True):
        parameter.grad = gradient.clone()
    Muon(named, rate=0.1).step(1.0)
    return [parameter.detach() for _, parameter in named]


def test_stacked_queries_keys_and_values_are_orthogonalised_separately() -> None:
    draw = torch.Generator().manual_seed(2)
    width = 16
    # The maps have very different sizes: as one matrix, the small ones would hardly move.
    gradient = torch.randn(3, width, width, generator=draw) * torch.tensor([1.0, 1e-2, 1e-4])[:, None, None]

    def zeros(rows: int) -> nn.Parameter:
        return nn.Parameter(torch.zeros(rows, width))

    (stacked,) = stepped([("blocks.0.attn_qkv.weight", zeros(3 * width))], [gradient.flatten(0, 1)])
    alone = stepped([(f"blocks.0.{x}_proj.weight", zeros(width)) for x in "qkv"], list(gradient))
    torch.testing.assert_close(stacked, torch.cat(alone))
    (as_one,) = stepped([("blocks.0.up.weight", zeros(3 * width))], [gradient.flatten(0, 1)])
    assert as_one[2 * width :].abs().max() < 0.1 * stacked[2 * width :].abs().max()


def test_matrices_of_one_shape_do_not_mix() -> None:
    draw = torch.Generator().manual_seed(3)
    names = ["blocks.0.a.weight", "blocks.0.b.weight", "blocks.1.a.weight"]
    shapes = [(6, 4), (4, 6), (6, 4)]
    weights = [torch.randn(shape, generator=draw) for shape in shapes]
    gradients = [torch.randn(shape, generator=draw) for shape in shapes]
    together = stepped([(n, nn.Parameter(w.clone())) for n, w in zip(names, weights, strict=True)], gradients)
    for name, weight, gradient, updated in zip(names, weights, gradients, together, strict=True):
        torch.testing.assert_close(updated, stepped([(name, nn.Parameter(weight.clone()))], [gradient])[0])


def block_matrices(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if is_block_matrix(name, parameter)}


def test_block_matrices_of_every_layout() -> None:
    parts = ("q_proj", "k_proj", "v_proj", "attn_out", "ff_proj", "up_proj", "ff_out")
    assert block_matrices(LLaDA(LLADA)) == {f"blocks.{i}.{part}.weight" for i in range(2) for part in parts}
    parts = ("attn_qkv", "attn_out", "mlp.0", "mlp.2")
    assert block_matrices(MDLM(DIT)) == {f"blocks.{i}.{part}.weight" for i in range(2) for part in parts}
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12, vocab_size=7
    )
    parts = (*(f"self_attn.{x}_proj" for x in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    expected = {f"model.layers.{i}.{part}.weight" for i in range(2) for part in parts}
    assert block_matrices(transformers.LlamaForCausalLM(config)) == expected


def test_every_parameter_learns_once_unless_the_rate_is_zero_and_gradients_are_gone() -> None:
    torch.manual_seed(4)
    model = MDLM(DIT)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimiser = Optimiser(model.named_parameters(), 0.02, 3e-3)
    optimised = [p for group in optimiser.muon.groups for p in group]
    optimised += [p for group in optimiser.adam.param_groups for p in group["params"]]
    assert sorted(map(id, optimised)) == sorted(map(id, model.parameters()))
    for scale, changed in ((0.0, False), (1.0, True)):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimiser.step(scale)
        for name, parameter in model.named_parameters():
            assert torch.equal(before[name], parameter) != changed, (name, scale)
    assert all(parameter.grad is None for parameter in model.parameters())


def small() -> tuple[nn.Module, Optimiser]:
    torch.manual_seed(5)
    model = LLaDA(LLADA)
    return model, Optimiser(model.named_parameters(), 0.02, 3e-3)


def move(model: nn.Module, optimiser: Optimiser, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draw)
    optimiser.step(0.5)


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_state_continues_exactly() -> None:
    (model, straight), (second, resumed), (third, forgetful) = small(), small(), small()
    for seed in range(3):
        move(model, straight, seed)
    second.load_state_dict(model.state_dict())
    third.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    for one, optimiser in ((model, straight), (second, resumed), (third, forgetful)):
        move(one, optimiser, 3)
    assert equal(model, second)
    assert not equal(model, third), "the state makes no difference"


def test_the_rate_warms_up_and_follows_half_a_cosine_down_to_nothing() -> None:
    start = [rate_scale(step, step / 1e6) for step in range(WARMUP_STEPS)]
    assert start == pytest.approx([(step + 1) / WARMUP_STEPS for step in range(WARMUP_STEPS)], rel=1e-4)
    assert rate_scale(1, 0.02) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.02))), "over at two percent too"
    assert rate_scale(5000, 0.5) == pytest.approx(0.5)
    assert rate_scale(5000, 0.25) == pytest.approx(0.5 + 0.5 * math.sqrt(0.5))
    assert rate_scale(10_000, 1.0) == 0
    scales = [rate_scale(step, step / 1000) for step in range(100, 1001)]
    assert all(a > b for a, b in zip(scales, scales[1:], strict=False))


def test_progress_goes_by_steps_or_by_seconds() -> None:
    steps, seconds = Budget(steps=8), Budget(seconds=60.0)
    assert [steps.progress(step, 1e9) for step in (0, 2, 8, 9)] == [0, 0.25, 1, 1]
    assert [seconds.progress(10**9, spent) for spent in (0.0, 15.0, 60.0, 61.0)] == [0, 0.25, 1, 1]
