"""`check` passes on sound checkpoints and notices unsound ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from d5p4.errors import D5P4Error
from d5p4.models import check
from tests.checkpoints import write_dream, write_llada, write_mdlm
from tests.models.references import PlainMDLM, causal_logits, llama_of, qwen2_of


@pytest.mark.parametrize("write, dtype", [
    (write_llada, "bf16"), (write_dream, "float32"), (write_mdlm, "float32"),
    pytest.param(write_llada, "float32", marks=pytest.mark.full),
    *[pytest.param(write, "bf16", marks=pytest.mark.full) for write in (write_dream, write_mdlm)],
])  # fmt: skip
def test_sound_checkpoints_pass(tmp_path: Path, write, dtype: str) -> None:
    lines = check(write(tmp_path), "cpu", dtype)
    assert [line.name for line in lines] == [
        "load",
        "logits finite",
        "knows something",
        "padding changes nothing",
        "tokenizer round trip",
        "mask token",
    ]
    assert all(line.passed for line in lines), lines
    assert "parameters" in lines[0].detail and "on cpu" in lines[0].detail


def failed(lines: list) -> set[str]:
    return {line.name for line in lines if not line.passed}


def test_unsound_checkpoints_fail(tmp_path: Path) -> None:
    folder = write_llada(tmp_path)
    weights = load_file(folder / "model.safetensors")
    name = "model.transformer.ff_out.weight"
    save_file({**weights, name: weights[name] * 1e-4}, folder / "model.safetensors")
    assert failed(check(folder, "cpu")) == {"knows something"}
    save_file({**weights, name: weights[name] * torch.nan}, folder / "model.safetensors")
    assert {"logits finite", "padding changes nothing"} <= failed(check(folder, "cpu"))


def test_a_mask_without_a_string_is_reported(tmp_path: Path) -> None:
    folder = write_mdlm(tmp_path, vocab_size=60)
    assert failed(check(folder, "cpu")) == {"mask token"}


class Remote:
    """What AutoModel would give: a module with `.logits`, perhaps off by a constant factor."""

    def __init__(self, run, factor: float) -> None:
        self.run, self.factor = run, factor

    def from_pretrained(self, name: str, trust_remote_code: bool, torch_dtype: torch.dtype) -> Remote:
        assert trust_remote_code
        return self

    def to(self, device: torch.device, dtype: torch.dtype) -> Remote:
        return self

    def eval(self) -> Remote:
        return self

    def __call__(self, input_ids: torch.Tensor, **extra: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.run(input_ids) * self.factor)


@pytest.mark.parametrize("kind", ["llada", "dream", "mdlm"])
def test_compare_remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    write = {"llada": write_llada, "dream": write_dream, "mdlm": write_mdlm}[kind]
    folder = write(tmp_path)
    if kind == "mdlm":
        plain = PlainMDLM(folder, torch.float32)
        remote = Remote(lambda ids: plain(ids[0])[0][None], 1.0)
    else:
        module = {"llada": llama_of, "dream": qwen2_of}[kind](folder, torch.float32)
        remote = Remote(lambda ids: causal_logits(module, ids), 1.0)
    monkeypatch.setattr(f"transformers.{'AutoModelForMaskedLM' if kind == 'mdlm' else 'AutoModel'}", remote)
    for remote.factor, passes in ((1.0, True), (1.5, False), (-1.0, False)):
        last = check(folder, "cpu", compare_remote=True)[-1]
        assert last.name == "same as its own code"
        assert last.passed == passes, last


def test_remote_code_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no flash attention")

    monkeypatch.setattr("transformers.AutoModel", Remote(broken, 1.0))
    with pytest.raises(D5P4Error, match="no flash attention"):
        check(write_llada(tmp_path), "cpu", compare_remote=True)
