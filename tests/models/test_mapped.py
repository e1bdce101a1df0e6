"""`load(mapped=True)`: processes of one host hold a checkpoint's weights once."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from d5p4 import load
from d5p4.models.base import NativeModel
from tests.checkpoints import write_dream, write_llada, write_mdlm

LARGE = {"d_model": 512, "n_heads": 8, "n_kv_heads": 8, "mlp_hidden_size": 1024, "n_layers": 6}
ROOT = Path(__file__).resolve().parents[2]
ROLLUP = Path("/proc/self/smaps_rollup")


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


CASES = [(write_llada, torch.float32), (write_mdlm, torch.float64)]
FULL = [pytest.param(write_dream, dtype, marks=pytest.mark.full) for dtype in (torch.float32, torch.float64)]


@pytest.mark.parametrize(("write", "dtype"), CASES + FULL)
def test_nothing_else_changes(tmp_path: Path, write, dtype: torch.dtype) -> None:
    folder = write(tmp_path, shards=2)
    plain, mapped = load(folder, "cpu", dtype), load(folder, "cpu", dtype, mapped=True)
    for (name, one), (_, other) in zip(plain.named_parameters(), mapped.named_parameters(), strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype == dtype, name
        assert not other.requires_grad
    assert torch.allclose(logits(plain), logits(mapped), rtol=1e-5)


@pytest.mark.skipif(not ROLLUP.is_file(), reason="needs Linux's /proc")
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


def test_the_file_keeps_what_it_has(tmp_path: Path) -> None:
    folder = write_llada(tmp_path)
    before = (folder / "model.safetensors").read_bytes()
    model = load(folder, "cpu", mapped=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0)
    assert float(model.unembedding[0].sum()) == 3.0 * model.unembedding[0].numel()
    assert (folder / "model.safetensors").read_bytes() == before
    assert not torch.equal(load(folder, "cpu", mapped=True).unembedding[0], model.unembedding[0])


def footprint(folder: Path, mapped: bool) -> tuple[int, NativeModel]:
    """Bytes that a model adds to this process, where pages held by several processes count by their share."""
    load(folder, "cpu", mapped=mapped)  # what is needed once
    gc.collect()
    before = _share()
    model = load(folder, "cpu", mapped=mapped)
    assert all(bool(parameter.sum().isfinite()) for parameter in model.parameters())  # every page is there
    return _share() - before, model


def _share() -> int:
    return next(1024 * int(line.split()[1]) for line in ROLLUP.read_text().splitlines() if line.startswith("Pss:"))


@pytest.mark.full  # that parameters lie in a private map of the file says the same of one process
@pytest.mark.skipif(not ROLLUP.is_file(), reason="needs Linux's /proc")
def test_two_processes_hold_the_pages_once(tmp_path: Path) -> None:
    folder = write_llada(tmp_path, **LARGE)
    size = (folder / "model.safetensors").stat().st_size
    assert size > 60e6
    _, model = footprint(folder, mapped=True)
    command = [sys.executable, "-m", "tests.models.test_mapped", str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    output = subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, timeout=100).stdout
    figures = json.loads(output)
    del model  # the pages were in use here all the time
    assert 0.4 * size < figures["mapped"] < 0.6 * size
    assert 0.9 * size < figures["copied"] < 1.1 * size
    assert figures["compiler"] is False  # which takes torch longer to import than all the rest


if __name__ == "__main__":
    sizes = {name: footprint(Path(sys.argv[1]), name == "mapped")[0] for name in ("mapped", "copied")}
    print(json.dumps(sizes | {"compiler": "torch._dynamo" in sys.modules}))
