"""A finished run leaves weights in small shards that `d5p4.load` reads."""

import torch

import d5p4
from d5p4.models.llada import LLaDA
from d5p4_lab.train.countdown import Countdown
from d5p4_lab.train.folder import write_json, write_weights

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
    assert len(shards) == 3 and all(shard.stat().st_size <= 15 * MIB for shard in shards)
    assert all(shard.stat().st_mode & 0o044 for shard in shards), "others can read the files"
    loaded = dict(d5p4.load(tmp_path, device="cpu").named_parameters())
    assert loaded.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(loaded[name], p.bfloat16().float()) for name, p in model.named_parameters())
