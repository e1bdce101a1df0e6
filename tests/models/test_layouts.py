"""Each native model gives the logits of an independent implementation of its architecture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from d5p4.models import MDLM, load
from d5p4.models.base import NativeModel
from d5p4.models.checkpoint import fill, read_json
from d5p4.models.experts import Experts, Router, SparseMLP
from tests.checkpoints import WRITERS, write_dream, write_llada, write_mdlm
from tests.models.references import PlainLLaDA2, PlainMDLM, causal_logits, llama_of, qwen_of

# float32 against a float64 reference, on logits with a spread of 1.5
FLOAT32_BOUND = 5e-5
SHIFTED = ("dream", "fast_dllm", "fast_dllm_llama")
BLOCKS = ("sdar", "sdar_moe", "fast_dllm", "fast_dllm_llama", "stable_diffcoder")


def rows(model: NativeModel, count: int = 3, length: int = 17) -> Tensor:
    """Random rows with about a third of masks."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 45, (count, length), generator=generator)
    return tokens.masked_fill(torch.rand(count, length, generator=generator) < 0.3, model.mask_id)


def logits(model: NativeModel, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    head = model.head
    return torch.nn.functional.linear(model.body(tokens, attention_mask).states, head.weight, head.bias)


def reference(folder: Path, kind: str, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        if kind == "mdlm":
            plain = PlainMDLM(folder, torch.float64)
            return torch.stack([plain(row)[0] for row in tokens])
        if kind == "llada2_moe":
            return torch.stack([PlainLLaDA2(folder, torch.float64)(row) for row in tokens])
        build = llama_of if kind in ("llada", "illada") else qwen_of
        block = 4 if kind in BLOCKS else None
        config = json.loads((folder / "config.json").read_text())
        mask = config["mask_token_id"] if config.get("causal_context") else None
        wanted = causal_logits(build(folder, torch.float64), tokens, block, mask)
        return torch.cat((wanted[:, :1], wanted[:, :-1]), dim=1) if kind in SHIFTED else wanted


CASES = [
    ("llada", {}),
    ("llada", {"n_kv_heads": 2, "weight_tying": True, "rope_theta": 500000.0}),
    ("dream", {}),
    ("dream", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("mdlm", {}),
    ("mdlm", {"tie_word_embeddings": True}),
    ("illada", {}),
    ("sdar", {}),
    ("sdar", {"tie_word_embeddings": True, "num_key_value_heads": 4, "block_length": 4}),
    ("sdar_moe", {}),
    ("sdar_moe", {"norm_topk_prob": False, "mlp_only_layers": [0]}),
    ("fast_dllm", {}),
    ("fast_dllm_llama", {"tie_word_embeddings": True}),
    ("stable_diffcoder", {}),
    ("llada_moe", {}),
    ("llada_moe", {"norm_topk_prob": True}),
    ("llada2_moe", {}),
    (
        "llada2_moe",
        {"n_group": 1, "topk_group": 1, "num_key_value_heads": 1, "partial_rotary_factor": 1.0, "rotary_dim": 8},
    ),
    ("llada", {"n_kv_heads": 1}),
    ("llada", {"include_qkv_bias": True}),
]


@pytest.mark.parametrize(("kind", "overrides"), CASES)
def test_same_logits_as_an_independent_model(tmp_path: Path, kind: str, overrides: dict) -> None:
    """In float64 to the last bits, in float32 to rounding, and nearly in bfloat16."""
    folder = WRITERS[kind](tmp_path, dtype=torch.float64, **overrides)
    model = load(folder, "cpu", "float64")
    tokens = rows(model)
    wanted = reference(folder, kind, tokens)
    assert 0.8 < wanted.std() < 3
    assert (logits(model, tokens) - wanted).abs().max() <= 1e-12
    narrow = load(folder, "cpu", "float32")
    assert narrow.dtype == torch.float32
    assert (logits(narrow, tokens) - wanted).abs().max() <= FLOAT32_BOUND
    half = load(folder, "cpu", "bf16")
    dtypes = {p.dtype: name for name, p in half.named_parameters()}
    assert dtypes.pop(torch.bfloat16) and list(dtypes.values()) in ([], ["model.layers.1.mlp.gate.expert_bias"])
    assert (logits(half, tokens) - wanted).abs().mean() < 0.05


@pytest.mark.parametrize("normalised", [False, True])
def test_experts_equal_those_of_transformers(normalised: bool) -> None:
    """transformers takes the softmax of its router in float32."""
    config = transformers.Qwen3MoeConfig(hidden_size=16, num_experts=6, num_experts_per_tok=3)
    config.moe_intermediate_size, config.norm_topk_prob = 12, normalised
    theirs = Qwen3MoeSparseMoeBlock(config).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = SparseMLP(Router(16, 6, 3, normalised), 6, 16, 12).double()
    ours.gate.weight.data = theirs.gate.weight.data
    ours.experts.gate_proj.data, ours.experts.up_proj.data = theirs.experts.gate_up_proj.data.chunk(2, dim=1)
    ours.experts.down_proj.data = theirs.experts.down_proj.data
    h = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = theirs(h)
    assert wanted.abs().max() > 0.1 and (ours(h) - wanted).abs().max() < 1e-6
    assert ours(h[:, :0]).shape == (2, 0, 16) and not ours.experts.recordable


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="needs a torch with a grouped matrix product")
def test_the_grouped_product_equals_the_loop() -> None:
    """On CPU, torch runs the grouped product by a loop of its own; its contract is the same as on CUDA."""
    torch.manual_seed(0)
    experts = Experts(8, 16, 24).requires_grad_(False)
    numbers = torch.tensor([0, 0, 2, 3, 3, 3, 6, 6])  # no tokens for the first, some and the last experts
    rows = torch.randn(len(numbers), 16)
    for shift in (0, 1):
        grouped, looped = experts._grouped(rows, numbers + shift), experts._loop(rows, numbers + shift)
        assert looped.std() > 0.01 and (grouped - looped).abs().max() < 1e-6


@pytest.mark.parametrize("kind", WRITERS)
def test_contract(tmp_path: Path, kind: str) -> None:
    defaults = {"order": "random", "steps": 4}
    model = load(WRITERS[kind](tmp_path, generation={"d5p4": defaults}), "cpu")
    states, features = model.body(rows(model))[:2]
    assert (states is features) == (kind != "mdlm") == (not model.carry_over)
    assert model.default_order == ("ancestral" if kind == "mdlm" else "confidence")
    assert model.head.banned[model.mask_id] and model.generation_defaults == defaults
    assert model.architecture == kind and model.name == str(tmp_path) and not model.training
    assert not any(p.requires_grad for p in model.parameters())


def test_end_ids_come_from_configs_then_tokenizer(tmp_path: Path) -> None:
    model = load(write_llada(tmp_path / "a", generation={"eos_token_id": [3, 47]}), "cpu")
    name = model.tokenizer.token_id
    assert model.eos_ids == (name("<|endoftext|>"), 3, name("<|eot_id|>"))
    assert load(write_mdlm(tmp_path / "b"), "cpu").eos_ids == ()
    dream = load(write_dream(tmp_path / "c"), "cpu")
    name = dream.tokenizer.token_id
    assert dream.eos_ids == (name("<|endoftext|>"), name("<|im_end|>")) and dream.pad_id == dream.eos_ids[0]
    file = tmp_path / "c" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    for extra, ends in (({}, True), ({"unk_token": "<|im_start|>"}, False)):  # as DiffuCoder's <|dlm_pad|> does
        file.write_text(json.dumps(settings | {"pad_token": "<|im_start|>"} | extra))
        assert (name("<|im_start|>") in load(tmp_path / "c", "cpu").eos_ids) == ends


def test_ids_without_a_token_and_rows_past_the_vocabulary_are_banned(tmp_path: Path) -> None:
    model = load(write_llada(tmp_path, embedding_size=60), "cpu")
    size = model.config["vocab_size"]
    assert model.head.banned.nonzero().flatten().tolist() == [model.mask_id, *range(size - 2, 60)]


def test_mdlm_trains_unfolded_and_folds_to_the_same_numbers(tmp_path: Path) -> None:
    folder = write_mdlm(tmp_path, dtype=torch.float64)
    with torch.device("meta"):
        model = MDLM(read_json(folder / "config.json"))
    fill(model.eval(), folder, torch.device("cpu"), torch.float64)
    tokens = rows(model)
    before = logits(model, tokens)
    assert (model.body(tokens[:1]).features[0] - PlainMDLM(folder, torch.float64)(tokens[0])[1]).abs().max() < 1e-10
    before.square().mean().backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert silent == []
    model.fold()
    model.fold()
    names = {name for name, _ in model.named_parameters()}
    assert not any("adaLN" in name or "sigma_map" in name for name in names)
    assert (logits(model, tokens) - before).abs().max() < 1e-12
