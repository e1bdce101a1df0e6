"""`load(mapped=True)`: processes of one host hold a checkpoint's weights once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from d5p4 import load
from d5p4.models.base import NativeModel
from tests.checkpoints import WRITERS, write_llada, write_mdlm


def logits(model: NativeModel) -> torch.Tensor:
    with torch.no_grad():
        states = model.body(torch.arange(24).view(2, 12) % 7).states
        weight, bias = model.unembedding
        return torch.nn.functional.linear(states, weight, bias)


def mapped_parameters(model: NativeModel, file: Path) -> list[str]:
    """Names of the parameters that lie in the map of a file."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    spans = [[int(end, 16) for end in line[0].split("-")] for line in lines]
    assert all("p" in line[1] for line in lines)  # private: what is written stays in the process
    return [
        name
        for name, parameter in model.named_parameters()
        if any(start <= parameter.data_ptr() < stop for start, stop in spans)
    ]


@pytest.mark.parametrize("kind", WRITERS)
def test_mapped_shards_equal_the_copy_of_a_single_file(tmp_path: Path, kind: str) -> None:
    plain = load(WRITERS[kind](tmp_path / "single"), "cpu")
    mapped = load(WRITERS[kind](tmp_path / "shards", shards=3), "cpu", mapped=True)
    for (name, one), (_, other) in zip(plain.named_parameters(), mapped.named_parameters(), strict=True):
        bound = 1e-5 if kind == "mdlm" else 0.0  # products of folding depend on how the memory is aligned
        assert (one - other).abs().max() <= bound and one.dtype == other.dtype, name
        assert not other.requires_grad
    assert torch.allclose(logits(plain), logits(mapped), atol=1e-4)


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="needs Linux's /proc")
def test_what_is_mapped(tmp_path: Path) -> None:
    file = write_llada(tmp_path / "llada") / "model.safetensors"
    assert mapped_parameters(load(file.parent, "cpu"), file) == []
    model = load(file.parent, "cpu", mapped=True)
    assert mapped_parameters(model, file) == [name for name, _ in model.named_parameters()]
    assert mapped_parameters(load(file.parent, "cpu", "bfloat16", mapped=True), file) == []  # of another dtype
    file = write_mdlm(tmp_path / "mdlm") / "model.safetensors"
    names = mapped_parameters(load(file.parent, "cpu", mapped=True), file)
    assert {"vocab_embed.embedding", "output_layer.linear.weight"} <= set(names)
    assert not [name for name in names if name.startswith("blocks.")]  # folded into new ones
