"""`check` passes on sound checkpoints and notices unsound ones."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from d5p4.models import check
from tests.checkpoints import WRITERS, write_llada, write_mdlm

CASES = [(kind, "float32") for kind in WRITERS] + [("llada", "bf16"), ("llada2_moe", "bf16")]


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_sound_checkpoints_pass(tmp_path: Path, kind: str, dtype: str) -> None:
    lines = check(WRITERS[kind](tmp_path), "cpu", dtype)
    names = "load, logits finite, knows something, padding changes nothing, stored tokens change nothing"
    assert [line.name for line in lines] == [*names.split(", "), "tokenizer round trip", "mask token"]
    assert all(line.passed for line in lines), lines
    assert "parameters" in lines[0].detail and "on cpu" in lines[0].detail


def failed(folder: Path) -> set[str]:
    return {line.name for line in check(folder, "cpu") if not line.passed}


def test_unsound_checkpoints_fail(tmp_path: Path) -> None:
    folder = write_llada(tmp_path)
    weights = load_file(folder / "model.safetensors")
    name = "model.transformer.ff_out.weight"
    save_file({**weights, name: weights[name] * 1e-4}, folder / "model.safetensors")
    assert failed(folder) == {"knows something"}
    save_file({**weights, name: weights[name] * torch.nan}, folder / "model.safetensors")
    assert {"logits finite", "padding changes nothing"} <= failed(folder)
    assert failed(write_mdlm(tmp_path / "mdlm", vocab_size=60)) == {"mask token"}, "its mask has no string"
