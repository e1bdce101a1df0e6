"""Weights in 8 and 4 bits: how far they are from the stored ones, what decodes with them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import d5p4
from d5p4.jobs.output import configuration
from d5p4.models import LLaDA, load
from d5p4.models.quant import BITS, QuantisedLinear, plan, weight_count
from d5p4.prompts import prepare
from tests.checkpoints import write_dream, write_llada, write_llada_moe, write_mdlm, write_sdar
from tests.models.test_public_shapes import LLADA_8B
from tests.refusals import refusal

DENSE = {"llada": (write_llada, {"mlp_hidden_size": 64})}
DENSE |= {"dream": (write_dream, {"intermediate_size": 64}), "sdar": (write_sdar, {"intermediate_size": 64})}
DENSE["sdar"][1]["head_dim"] = 16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", BITS.values())
def test_a_weight_moves_by_half_a_step_at_most(bits: int, dtype: torch.dtype) -> None:
    """A step is a part of the range of a group of 32; a group of one sign and one of zeros are in it, too."""
    weight = torch.randn(6, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight[0, :32], weight[1, 32:64], weight[2, :32] = weight[0, :32].abs() + 1, 0, -1e4
    weight = weight.to(dtype)
    linear = nn.Linear(96, 6, dtype=dtype)
    linear.weight.data, linear.group = weight, 32
    layer = QuantisedLinear(linear, bits)
    groups = weight.double().unflatten(-1, (-1, 32))
    step = (groups.amax(-1).clamp_min(0) - groups.amin(-1).clamp_max(0)) / (2**bits - 1)
    rounding = 2 * torch.finfo(dtype).eps * groups.abs().amax(-1) * 1.01
    moved = (layer.weight.double() - weight.double()).unflatten(-1, (-1, 32)).abs().amax(-1)
    assert (moved <= step * (0.5 + 2**bits * torch.finfo(dtype).eps) + rounding).all()
    assert layer.weight[1, 32:64].eq(0).all() and layer.packed.dtype == torch.uint8
    assert layer.packed.numel() == 6 * 96 * bits // 8


@pytest.mark.parametrize("kind", DENSE)
def test_a_quantised_model_is_the_model_of_its_weights(tmp_path: Path, kind: str) -> None:
    """All linear layers but the head are quantised when they are read, and answers do not depend on the batch."""
    write, given = DENSE[kind]
    folder = write(tmp_path, dtype=torch.float64, **given)
    plain = load(folder, "cpu", "float64")
    tokens = torch.randint(0, 45, (3, 12), generator=torch.Generator().manual_seed(1))
    wanted = plain.body(tokens).states
    errors = {}
    for name in BITS:
        model = load(folder, "cpu", quantize=name) if name == "int4" else load(folder, "cpu", name)
        assert model.bits == name and model.dtype == torch.float32 and weight_count(model) == weight_count(plain)
        linear = {n for n, part in model.named_modules() if isinstance(part, nn.Linear)}
        packed = {n for n, part in model.named_modules() if isinstance(part, QuantisedLinear)}
        assert linear == {"lm_head"} and len(packed) == 2 * 7
        copy = load(folder, "cpu", "float32")
        for layer in packed:
            copy.get_submodule(layer).weight = nn.Parameter(model.get_submodule(layer).weight)
        assert torch.equal(copy.body(tokens).states, model.body(tokens).states)
        errors[name] = float((model.body(tokens).states - wanted).abs().mean() / wanted.abs().mean())
    assert errors["int8"] < 0.02 < errors["int4"] < 0.5
    prompts = ["one two", "a", "three"]
    together = d5p4.generate(model, prompts, k=2, gen_length=8, seed=3, deterministic=True)
    for prompt, texts in zip(prompts, together.texts, strict=True):
        assert d5p4.generate(model, prompt, k=2, gen_length=8, seed=3, deterministic=True).texts[0] == texts
    assert model.recordable, "a CUDA graph can record it"


def test_llada_8b_in_4_bits_leaves_room_in_7_gigabytes() -> None:
    """Its weights alone, by their shapes: linear layers in 4 bits, embedding and head in bfloat16."""
    with torch.device("meta"):
        model = LLaDA(LLADA_8B)
    plan(model.to(torch.bfloat16), "int4")
    small = sum(part.weight.numel() for part in model.modules() if hasattr(part, "group"))
    rest = sum(parameter.numel() for parameter in model.parameters()) - small
    assert small // 2 + small // 128 * 3 + 2 * rest == 5_725_757_440


def test_what_cannot_be_quantised_is_named(tmp_path: Path) -> None:
    for folder, words in (
        (write_llada_moe(tmp_path / "a"), "LLaDA-MoE, which has experts"),
        (write_mdlm(tmp_path / "b"), "MDLM, which has folded weights"),
        (write_llada(tmp_path / "c"), "multiples of 32, but LLaDA has [32, 48]"),
    ):
        assert words in refusal(load, folder, "cpu", "int4")
    assert "type quantize='int8' or 'int4'" in refusal(load, folder, "cpu", load_in_4bit=True)


def test_a_run_does_not_continue_with_other_bits(tmp_path: Path) -> None:
    folder = write_llada(tmp_path, mlp_hidden_size=64)
    kinds = ("float32", "int8", "int4")
    headers = [configuration(prepare(load(folder, "cpu", kind), "a", {}), "", 0) for kind in kinds]
    assert [header["dtype"] for header in headers] == [*kinds]


@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs Apple's MPS")
def test_mps_is_chosen_and_decodes(tmp_path: Path) -> None:
    model = load(write_llada(tmp_path))
    assert model.device.type == "mps" and model.dtype == torch.float32
    there, here = (d5p4.generate(m, "abc", k=2, gen_length=6, seed=1) for m in (model, load(tmp_path, "cpu")))
    assert there.texts == here.texts
