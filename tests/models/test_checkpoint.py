"""Broken checkpoint folders are refused with one sentence that names the fault."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from d5p4.errors import D5P4Error
from d5p4.models import checkpoint, load
from tests.checkpoints import WRITERS, write_dream, write_llada, write_mdlm
from tests.refusals import refusal


def edit(folder: Path, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def test_all_key_faults_come_in_one_error(tmp_path: Path) -> None:
    folder = write_llada(tmp_path)

    def change(weights: dict[str, torch.Tensor]) -> None:
        del weights["model.transformer.ln_f.weight"]
        weights["model.transformer.extra"] = torch.zeros(2)
        weights["model.transformer.blocks.0.q_proj.weight"] = torch.zeros(3, 3)
        weights["model.transformer.blocks.1.q_proj.weight"] = torch.zeros(32, 32, dtype=torch.int8)

    edit(folder, change)
    with pytest.raises(D5P4Error) as caught:
        load(folder, "cpu")
    message = str(caught.value)
    for part in ("missing: model.transformer.ln_f.weight", "unexpected: model.transformer.extra", "misshapen:"):
        assert part in message
    assert "blocks.0.q_proj.weight has shape [3, 3], expected [32, 32]" in message
    assert "blocks.1.q_proj.weight has dtype I8" in message


def test_long_lists_are_cut(tmp_path: Path) -> None:
    folder = write_llada(tmp_path, n_layers=2)
    edit(folder, lambda weights: [weights.pop(name) for name in list(weights) if "blocks" in name])
    with pytest.raises(D5P4Error, match="and 10 more"):
        load(folder, "cpu")


def test_nothing_is_read_before_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_llada(tmp_path)
    edit(folder, lambda weights: weights.pop("model.transformer.ln_f.weight"))
    reads = watch_files(monkeypatch)[1]
    with pytest.raises(D5P4Error):
        load(folder, "cpu")
    assert reads == []


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


def test_no_weights(tmp_path: Path) -> None:
    folder = write_llada(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(D5P4Error, match="neither model.safetensors nor"):
        load(folder, "cpu")


def test_truncated_file(tmp_path: Path) -> None:
    file = write_llada(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    for keep in (0, 4, 500, -40):
        file.write_bytes(whole[:keep])
        assert "model.safetensors is not a complete" in refusal(load, tmp_path, "cpu"), keep


def test_missing_shard(tmp_path: Path) -> None:
    folder = write_llada(tmp_path, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(D5P4Error, match="model-00002-of-00003.safetensors"):
        load(folder, "cpu")


def test_shards_outside_the_folder_are_refused(tmp_path: Path) -> None:
    folder = write_llada(tmp_path / "inner", shards=2)
    index = folder / "model.safetensors.index.json"
    write_llada(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(D5P4Error, match="names files that the folder lacks"):
        load(folder, "cpu")


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


def watch_files(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[str]]:
    """Count how many weight files are open at once, and list the tensors read."""
    real = checkpoint.safe_open
    now, most, reads = [0], [0], []

    class Watched:
        def __init__(self, *args, **kwargs) -> None:
            self.inner = real(*args, **kwargs)

        def __enter__(self):
            now[0] += 1
            most[0] = max(most[0], now[0])
            self.file = self.inner.__enter__()
            return self

        def __exit__(self, *reason):
            now[0] -= 1
            return self.inner.__exit__(*reason)

        def keys(self):
            return self.file.keys()

        def get_slice(self, name):
            return self.file.get_slice(name)

        def get_tensor(self, name):
            reads.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr(checkpoint, "safe_open", Watched)
    return most, reads


def test_one_shard_is_open_at_a_time_and_each_tensor_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_llada(tmp_path, shards=4)
    most, reads = watch_files(monkeypatch)
    model = load(folder, "cpu")
    assert most == [1]
    assert len(reads) == len(set(reads)) == len(list(model.parameters()))


def test_weights_do_not_depend_on_the_file_afterwards(tmp_path: Path) -> None:
    folder = write_llada(tmp_path)
    model = load(folder, "cpu")
    before = model.head.weight.clone()
    file = folder / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.seek(size // 2)
        stream.write(bytes(size - size // 2))
    assert torch.equal(model.head.weight, before)
