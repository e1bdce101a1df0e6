"""A finished run leaves weights in small shards that `d5p4.load` reads, and a card that says how they were made."""

import json
import sys

import torch
from safetensors import safe_open
from safetensors.torch import load_file

import d5p4
from d5p4.models.llada import LLaDA
from d5p4_lab.provenance import command
from d5p4_lab.train.countdown import Countdown
from d5p4_lab.train.folder import hardware, write_card, write_json, write_weights

MIB = 2**20


class Wide(Countdown):
    """Over 30 MiB in bfloat16."""

    small = {"d_model": 512, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 2048}


def test_large_models_come_in_shards_that_load_puts_together(tmp_path):
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


def test_small_models_are_one_file_rounded_to_bfloat16_views_too(tmp_path):
    learned = torch.nn.Parameter(torch.randn(6, 4))
    tensors = {"layer": torch.randn(10, 7), "turned": learned.T, "half": learned[:3]}
    assert write_weights(tmp_path, tensors) == 2 * (70 + 24 + 12)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor.detach().bfloat16()) for name, tensor in tensors.items())


def test_the_card_has_its_words_and_the_facts_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["__main__.py", "train", "tiny", "--out", "/home/me/a b", "--seed", "7"])
    facts = {"seed": "7", "hardware": hardware(torch.device("cpu")), "command": f"`{command()}`"}
    write_card(tmp_path, "books", "From dice.", facts, {"share solved": 0.123456, "perplexity": 45678.9})
    text = (tmp_path / "README.md").read_text()
    for line in ("# books", "Data: From dice.", "## Licence", "| seed | 7 |"):
        assert line in text.splitlines()
    assert "| command | `python -m d5p4_lab train tiny --out 'a b' --seed 7` |" in text, "it does not say where a b is"
    assert f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__} |" in text
    assert "| share solved | 0.1235 |" in text and "| perplexity | 4.568e+04 |" in text
