"""A finished run leaves weights in small shards that `d5p4.load` reads, and a card that says how they were made."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import d5p4
from d5p4.models.llada import LLaDA
from d5p4_lab.provenance import command
from d5p4_lab.train import folder as folder_module
from d5p4_lab.train.countdown import Countdown
from d5p4_lab.train.folder import hardware, write_card, write_json, write_weights
from d5p4_lab.train.recipe import Card

MIB = 2**20


class Wide(Countdown):
    """Over 30 MiB in bfloat16."""

    @property
    def config(self):
        return super().config | {"d_model": 512, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 2048}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {f"layer.{i}": torch.randn(10, 7, generator=draw) for i in range(5)}


def test_large_models_come_in_shards_that_load_puts_together(tmp_path: Path) -> None:
    recipe = Wide(torch.device("cpu"), 0, True)
    with torch.device("meta"):
        model = LLaDA(recipe.config)
    model.to_empty(device="cpu")
    for i, parameter in enumerate(model.parameters()):
        torch.nn.init.constant_(parameter, 1 + i / 7)
    total = write_weights(tmp_path, recipe.tensors(model))
    write_json(tmp_path / "config.json", recipe.config)
    recipe.write_tokenizer(tmp_path)

    shards = sorted(tmp_path.glob("*.safetensors"))
    assert total == 2 * sum(p.numel() for p in model.parameters()) > 30 * MIB
    assert [shard.name for shard in shards] == [f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)]
    assert all(shard.stat().st_size <= 15 * MIB for shard in shards)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total
    for shard in shards:
        with safe_open(shard, "pt") as file:
            assert {name for name, place in index["weight_map"].items() if place == shard.name} == set(file.keys())
            assert file.metadata() == {"format": "pt"}

    loaded = dict(d5p4.load(tmp_path, device="cpu").named_parameters())
    assert loaded.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(loaded[name], p.bfloat16().float()) for name, p in model.named_parameters())


def test_small_models_are_one_file_rounded_to_bfloat16_views_too(tmp_path: Path, tensors) -> None:
    learned = torch.nn.Parameter(torch.randn(6, 4))
    tensors |= {"turned": learned.T, "half": learned[:3]}
    assert write_weights(tmp_path, tensors) == 2 * (5 * 70 + 24 + 12)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(written[name].dtype == torch.bfloat16 for name in written)
    assert all(torch.equal(written[name], tensor.detach().bfloat16()) for name, tensor in tensors.items())


def test_a_shard_is_filled_to_the_limit_and_no_further(tmp_path: Path, tensors, monkeypatch) -> None:
    monkeypatch.setattr(folder_module, "SHARD", 2 * 140)  # two tensors of 140 bytes
    write_weights(tmp_path, tensors)
    shards = [list(load_file(path)) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert shards == [["layer.0", "layer.1"], ["layer.2", "layer.3"], ["layer.4"]]


def test_a_command_names_its_folder_and_not_where_that_is(monkeypatch) -> None:
    for options in (["--out", "/home/me/mine"], ["--out", "/home/me/mine/"], ["--out=/home/me/mine"]):
        monkeypatch.setattr(sys, "argv", ["/home/me/src/d5p4_lab/__main__.py", "train", "tiny", *options])
        assert command().startswith("python -m d5p4_lab train tiny --out"), options
        assert command().endswith("mine") and "home" not in command(), options


def test_the_card_has_its_words_and_the_facts_of_the_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["__main__.py", "train", "tiny", "--out", "/home/me/a b", "--seed", "7"])
    card = Card("tiny", "About it.", "From dice.", "Free.", "Everything.")
    facts = {"seed": "7", "hardware": hardware(torch.device("cpu")), "command": f"`{command()}`"}
    write_card(tmp_path, card, facts, {"share solved": 0.123456, "perplexity": 45678.9})
    text = (tmp_path / "README.md").read_text()
    for line in ("# tiny", "About it.", "Data: From dice.", "Free.", "Everything.", "| seed | 7 |"):
        assert line in text.splitlines()
    assert "| command | `python -m d5p4_lab train tiny --out 'a b' --seed 7` |" in text
    assert f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__} |" in text
    assert "| share solved | 0.1235 |" in text and "| perplexity | 4.568e+04 |" in text
