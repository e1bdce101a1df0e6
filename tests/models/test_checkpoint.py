"""Broken checkpoint folders are refused with one sentence that names the fault."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from d5p4.models import load
from tests.checkpoints import WRITERS, write_dream, write_llada, write_mdlm
from tests.refusals import refusal


def edit(folder: Path, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def test_all_faults_of_the_weights_come_in_one_error_of_limited_length(tmp_path: Path) -> None:
    folder = write_llada(tmp_path, n_layers=3)

    def change(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if "blocks.2" in name]:
            del weights[name]
        weights["model.transformer.extra"] = torch.zeros(2)
        weights["model.transformer.blocks.0.q_proj.weight"] = torch.zeros(3, 3)
        weights["model.transformer.blocks.1.q_proj.weight"] = torch.zeros(32, 32, dtype=torch.int8)

    edit(folder, change)
    message = refusal(load, folder, "cpu")
    for part in (
        "missing: model.transformer.blocks.2.q_proj.weight",
        "and 1 more",
        "unexpected: model.transformer.extra",
        "misshapen: model.transformer.blocks.0.q_proj.weight has shape [3, 3], expected [32, 32]",
        "blocks.1.q_proj.weight has dtype I8",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("write", "name"),
    [(write_dream, "tie_word_embeddings"), (write_llada, "weight_tying"), (write_mdlm, "tie_word_embeddings")],
)
def test_a_tied_head_may_be_stored_twice(tmp_path: Path, write, name: str) -> None:
    folder = write(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, name: True}))
    heads = {"lm_head.weight", "ff_out.weight", "output_layer.linear.weight"}
    assert not heads & set(load(folder, "cpu").state_dict())


def test_pickle_is_refused(tmp_path: Path) -> None:
    file = write_llada(tmp_path) / "model.safetensors"
    for name in ("pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"):
        file = file.rename(tmp_path / name)
        assert re.search(f"{name}.*convert", refusal(load, tmp_path, "cpu"))
    file.unlink()
    assert "neither model.safetensors nor" in refusal(load, tmp_path, "cpu")


def test_truncated_file(tmp_path: Path) -> None:
    file = write_llada(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    for keep in (0, 4, 500, -40):
        file.write_bytes(whole[:keep])
        assert "model.safetensors is not a complete" in refusal(load, tmp_path, "cpu"), keep


def test_shards_that_are_missing_or_outside_the_folder_are_refused(tmp_path: Path) -> None:
    folder = write_llada(tmp_path / "inner", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refusal(load, folder, "cpu")
    write_llada(tmp_path)
    for weight_map in ({"a": "../model.safetensors"}, {"a": [1]}, {}, 5):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        assert "model.safetensors.index.json" in refusal(load, folder, "cpu"), weight_map


JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")


def test_json_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Nested values exhaust Python's stack; a pipe would wait forever, and a device or a huge file fill the memory."""
    folder = write_llada(tmp_path, shards=2, generation={})
    contents = ["{broken", "[1, 2]", '{"a":' * 10**5 + "}" * 10**5, '{"a": ' + "9" * 10**4 + "}", "\ud800"]
    for name in (*JSON_FILES, "model.safetensors.index.json"):
        file, before = folder / name, (folder / name).read_text()
        for content in contents:
            file.write_bytes(content.encode(errors="surrogatepass"))
            assert name in refusal(load, folder, "cpu"), content[:20]
        file.unlink()
        if name not in ("tokenizer.json", "model.safetensors.index.json"):  # these two count as missing
            os.mkfifo(file)
            assert f"{name} should be a regular file" in refusal(load, folder, "cpu")
            file.unlink()
            file.symlink_to("/dev/zero")
            assert f"{name} should be a regular file" in refusal(load, folder, "cpu")
            file.unlink()
        with file.open("wb") as stream:
            stream.truncate(2**40)
        assert f"{name} should be a regular file" in refusal(load, folder, "cpu")
        file.unlink()
        file.write_text(before)
    os.mkfifo(folder / "chat_template.jinja")
    assert "chat_template.jinja should be a regular file" in refusal(load, folder, "cpu")


@pytest.mark.parametrize("kind", WRITERS)
def test_sizes_that_take_forever_to_build_are_refused_before_that(tmp_path: Path, kind: str) -> None:
    folder = WRITERS[kind](tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for key in ("n_layers", "num_hidden_layers", "n_blocks", "num_experts"):
        if key in config:
            (folder / "config.json").write_text(json.dumps(config | {key: 2**24}))
            assert f"{key}=16777216, which should be" in refusal(load, folder, "cpu")
    for key in {"d_model", "hidden_size", "hidden_dim"} & config.keys():
        (folder / "config.json").write_text(json.dumps(config | {key: 2**23}))
        assert "fit its config.json" in refusal(load, folder, "cpu"), key
