"""Finding a model, choosing device and dtype, refusing what is not supported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch

from d5p4.cli.info import describe
from d5p4.models import (
    MDLM,
    SDAR,
    Dream,
    FastDLLM,
    FastDLLMLlama,
    ILLaDA,
    LLaDA,
    LLaDA2,
    LLaDAMoE,
    SDARMoE,
    StableDiffCoder,
    Tokenizer,
    load,
)
from d5p4.models.load import ARCHITECTURES, choose_device, choose_dtype, find, shipped_models
from tests import checkpoints
from tests.checkpoints import write_fast_dllm, write_llada, write_mdlm, write_sdar
from tests.refusals import refusal

SHIPPED = "books, countdown, programs, smol"
WRITERS = {ARCHITECTURES[name]: write for name, write in checkpoints.WRITERS.items()}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A stand-in for the hub: names to folders."""
    folders: dict[str, Path] = {}

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in allow_patterns)
        if name not in folders:
            raise OSError(f"404 for {name}\nmore lines")
        return str(folders[name])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return folders


def test_hub_ids(tmp_path: Path, hub: dict[str, Path]) -> None:
    hub["someone/tiny"] = write_llada(tmp_path)
    assert load("someone/tiny", "cpu").name == "someone/tiny"
    assert refusal(load, "someone/else", "cpu").endswith("404 for someone/else)")


def test_unknown_names(tmp_path: Path) -> None:
    for name in ("nothing-here", "./nothing/here", "/nothing", "a/b/c", "no such", Path("a/b")):
        message = refusal(load, name, "cpu")
        assert "is neither a folder nor a hub id" in message and f"shipped models are {SHIPPED}" in message
    assert "config.json does not exist" in refusal(load, tmp_path, "cpu")
    assert "give the folder" in refusal(load, write_llada(tmp_path) / "config.json", "cpu")
    assert refusal(load, "countdwn").endswith(f"{SHIPPED}; did you mean countdown?")


def test_keywords_of_transformers(tmp_path: Path) -> None:
    folder = write_llada(tmp_path, dtype=torch.float64)
    assert load(folder, "cpu", torch_dtype=torch.bfloat16).dtype == torch.bfloat16
    assert load(folder, "cpu", "auto").dtype == torch.float64
    assert describe(str(folder), "cpu", "auto")["dtype"] == "float64"
    off = {"load_in_4bit": False, "quantization_config": None, "trust_remote_code": False}
    assert load(folder, "cpu", **off).dtype == torch.float32
    for device_map, device in (("auto", choose_device(None)), ("cpu", "cpu")):
        assert load(folder, device_map=device_map).device == torch.device(device)
    with pytest.warns(UserWarning, match="never runs a checkpoint's own code"):
        load(folder, "cpu", trust_remote_code=True)
    for options, message in (
        ({"device_map": "balanced"}, "is not one device for the whole model"),
        ({"device_map": {"a": 0, "b": 1}}, "is not one device for the whole model"),
        ({"load_in_4bit": True}, "load_in_4bit: is not known here; type quantize='int8' or 'int4'"),
        ({"quantization_config": {"bits": 8}}, "or call d5p4.wrap"),
        ({"dtype": "float32", "quantize": "int8"}, "quantize='int8' cannot be combined with dtype=float32"),
        ({"divice": "cpu"}, "divice: did you mean device?"),
        ({"revision": "main"}, "revision: load takes device, dtype, "),
    ):
        assert message in refusal(load, folder, **options), options


def test_unknown_architectures(tmp_path: Path) -> None:
    supported = "d5p4 loads MDLM"
    for model_type, classes, word in (
        ("llama", ["LlamaForCausalLM"], supported),
        ("llada_moe", ["LLaDAModelLM"], supported),
        ("llada", ["LLaDA2MoeModelLM"], supported),
        ("diffusion_gemma", ["DiffusionGemmaForBlockDiffusion"], "DiffusionGemma, which has no mask token"),
        ("mistral", ["StableDiffcoderForCausalLM"], supported),
        (None, [], supported),
        ("dreamer", None, supported),
    ):
        folder = write_llada(tmp_path, model_type=model_type, architectures=classes)
        assert word in refusal(load, folder, "cpu"), (model_type, classes)


@pytest.mark.parametrize(
    ("kind", "model_type", "classes"),
    [
        (Dream, "Dream", ["DreamModel"]),  # also Dream-Coder and DiffuCoder
        (Dream, "dream-coder", ["DreamCoderModel"]),
        (Dream, "diffucoder", ["DiffuCoderModel"]),
        (LLaDA, None, ["LLaDAModelLM"]),
        (SDAR, None, ["SDARForCausalLM"]),
        (SDARMoE, "sdar_moe", ["SDARMoeForCausalLM"]),
        (LLaDAMoE, "llada", ["LLaDAMoEModelLM"]),
        (LLaDAMoE, "llada_moe", ["LLaDAMoEModel"]),
        (LLaDAMoE, "lladamoe", []),
        (ILLaDA, "llada", ["iLLaDAModelLM"]),
        (LLaDA2, "llada2_moe", []),
        (LLaDA2, "llada21_moe", ["LLaDA2MoeModelLM"]),
        (LLaDA2, "llada2_moe_veomni", ["LLaDA2MoeModelLM"]),
        (FastDLLM, "Fast_dLLM_Qwen", ["Fast_dLLM_QwenForCausalLM"]),
        (FastDLLMLlama, "Fast_dLLM_Llama", ["Fast_dLLM_LlamaForCausalLM"]),
        (StableDiffCoder, "llama", ["StableDiffcoderForCausalLM"]),
        (StableDiffCoder, "stable_diffcoder", []),
    ],
)
def test_names_of_architectures(tmp_path: Path, kind: type, model_type: str, classes: list[str]) -> None:
    file = WRITERS[kind](tmp_path) / "config.json"
    names = {"model_type": model_type, "architectures": classes}
    file.write_text(json.dumps({**json.loads(file.read_text()), **names}))
    assert type(load(tmp_path, "cpu")) is kind


def test_block_lengths(tmp_path: Path, hub: dict[str, Path]) -> None:
    """An option is stronger than config.json, config.json than the name, and the name than the default."""
    plain, named = write_sdar(tmp_path / "plain"), write_sdar(tmp_path / "tiny-b16")
    assert load(plain, "cpu").block == 4 and load(f"{named}/", "cpu").block == 16
    assert describe(str(named), "cpu")["block_length"] == 16
    hub["someone/SDAR-Chat-b32"] = plain
    assert load("someone/SDAR-Chat-b32", "cpu").block == 32
    for key in ("block_size", "block_length"):
        assert load(write_sdar(tmp_path / f"{key}-b16", **{key: 8}), "cpu").block == 8
    assert load(write_fast_dllm(tmp_path / "fast", bd_size=None), "cpu").block == 32
    model = load(named, "cpu", block_length=2)
    assert model.block == 2 and model.config["block_length"] == 2
    for folder, wrong, message in (
        (named, 0, "block_length=0 should be a whole number"),
        (named, "4", "block_length='4'"),
        (write_llada(tmp_path / "llada"), 4, "block_length=4 has no meaning here, because llada models have no blocks"),
    ):
        assert message in refusal(load, folder, "cpu", block_length=wrong)


def test_mask_ids(tmp_path: Path) -> None:
    """SDAR's mask is the one in config.json, or else the tokenizer's <|MASK|>, or else 151669."""
    folder = write_sdar(tmp_path)
    assert load(folder, "cpu").mask_id == 49
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mask_token_id": 50}))
    assert load(folder, "cpu").mask_id == 50
    without = load(write_llada(tmp_path / "llada"), "cpu").tokenizer
    big = SDAR({**config, "vocab_size": 151936, "hidden_size": 4, "num_hidden_layers": 1})
    assert big.mask_id == 151669
    (folder / "config.json").write_text(json.dumps(config))
    assert "has no 'mask_token_id'" in refusal(load, folder, "cpu", tokenizer=without)


UNSUPPORTED: list[tuple[type, dict[str, object]]] = [
    (LLaDA, dict(block_type="sequential", layer_norm_type="default", alibi=True, rope=False, input_emb_norm=True)),
    (LLaDA, dict(activation_type="swiglu", scale_logits=True, include_bias=True, clip_qkv=8.0, block_group_size=4)),
    (LLaDA, dict(attention_layer_norm=True, mask_token_id=999, rms_norm_eps="small", max_sequence_length=0, n_heads=5)),
    (LLaDA, dict(mask_token_id=None)),
    (Dream, dict(num_key_value_heads=3, rope_parameters="default", rope_theta=1e999, use_sliding_window=True)),
    (Dream, dict(rope_scaling={"rope_type": "yarn", "factor": 4.0}, hidden_act="gelu", partial_rotary_factor=0.4)),
    (Dream, dict(head_dim=5)),
    (SDAR, dict(attention_bias=True, block_size=0, block_length="four", mask_token_id=999)),
    (SDARMoE, dict(num_experts_per_tok=7, norm_topk_prob=1, moe_intermediate_size=None, mlp_only_layers=5)),
    (FastDLLM, dict(bd_size=-4, mask_token_id=None)),
    (FastDLLMLlama, dict(attention_bias=True, mask_token_id=None)),
    (StableDiffCoder, dict(mlp_bias=True)),
    (LLaDAMoE, dict(clip_qkv=8.0, shared_expert_intermediate_size=64, moe_layer_freq=[1])),
    (LLaDAMoE, dict(expert_intermediate_size=None)),
    (LLaDA2, dict(score_function="softmax", n_group=3, topk_group=5, num_experts_per_tok=5, rotary_dim=8)),
    (LLaDA2, dict(use_qkv_bias=True, moe_shared_expert_intermediate_size=7)),
    (ILLaDA, dict(num_key_value_heads=3, hidden_act="gelu")),
    (MDLM, dict(time_conditioning=True, dropout="much", mask_token_id=-1)),
]


def test_unsupported_values_are_named(tmp_path: Path) -> None:
    folders = {kind: write(tmp_path / kind.__name__) for kind, write in WRITERS.items()}
    configs = {kind: json.loads((folder / "config.json").read_text()) for kind, folder in folders.items()}
    for kind, values in UNSUPPORTED:
        for key, value in values.items():
            (folders[kind] / "config.json").write_text(json.dumps({**configs[kind], key: value}))
            assert key in refusal(load, folders[kind], "cpu"), (kind, key, value)


def test_dtypes_and_devices() -> None:
    cpu = torch.device("cpu")
    names = {
        "bf16": torch.bfloat16,
        "fp64": torch.float64,
        "torch.float32": torch.float32,
        torch.float64: torch.float64,
    }
    assert {name: choose_dtype(name, cpu) for name in names} == names
    assert choose_dtype(None, torch.device("cuda")) == torch.bfloat16
    for wrong in ("float7", torch.int64, 3):
        assert "dtype=" in refusal(choose_dtype, wrong, cpu)
    assert "MPS" in refusal(choose_dtype, "float64", torch.device("mps"))
    for wrong in ("gpu", "cuda:99", "meta"):
        assert "device=" in refusal(choose_device, wrong)


def test_tokenizer_argument(tmp_path: Path) -> None:
    folder = write_llada(tmp_path / "a", chat=True)
    other = load(folder, "cpu").tokenizer
    bare = write_llada(tmp_path / "b")
    (bare / "tokenizer.json").unlink()
    assert "has no tokenizer" in refusal(load, bare, "cpu")
    assert load(bare, "cpu", tokenizer=folder).tokenizer.has_chat
    assert load(bare, "cpu", tokenizer=other).tokenizer is other


def test_mdlm_fetches_the_tokenizer_of_gpt2(tmp_path: Path, hub: dict[str, Path]) -> None:
    folder = write_mdlm(tmp_path / "a", vocab_size=50258, hidden_dim=8, n_heads=1)
    files = write_mdlm(tmp_path / "b")
    (folder / "tokenizer.json").unlink()
    assert "put GPT-2's tokenizer.json" in refusal(load, folder, "cpu")
    hub["gpt2"] = files
    assert isinstance(load(folder, "cpu").tokenizer, Tokenizer)
    (files / "tokenizer.json").unlink()
    assert "no tokenizer" in refusal(load, files, "cpu")  # 48 tokens are not GPT-2's


def test_import_stays_light_and_brings_what_the_readme_calls() -> None:
    heavy = {"transformers", "huggingface_hub", "jinja2", "torch._dynamo"}
    code = (
        f"import sys, d5p4, d5p4.models; d5p4.load('countdown', 'cpu'); print(sorted({heavy} & set(sys.modules)));"
        "d5p4.distributed.connect, d5p4.run_file, d5p4.ops.partition_map.partition_map, d5p4.loglikelihood"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_folder_hides_a_shipped_model_only_when_it_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "countdown").mkdir()
    assert find("countdown") == shipped_models()["countdown"]
    write_llada(tmp_path / "countdown")
    with pytest.warns(UserWarning, match="'countdown' is read from the folder of that name"):
        assert find("countdown") == Path("countdown")
