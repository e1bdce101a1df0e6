import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import BertConfig, BertModel

from d5p4_lab.scoring.encoder import DEFAULT, Encoder, alibi_slopes
from tests.lab.judges import write_jina
from tests.refusals import refusal

TEXTS = ["A man is eating food.", "Été — 中文 😀", "", "many sentences. " * 200, "Shorter."]


@pytest.fixture(scope="module")
def package():
    pytest.importorskip(DEFAULT.replace("-", "_"))
    (place,) = importlib.util.find_spec(DEFAULT.replace("-", "_")).submodule_search_locations
    return Path(place) / "model"


def test_the_default_is_minilm_and_does_not_depend_on_the_batch(package):
    """The mean of all token states of transformers' own BERT, one text at a time, to length 1."""
    encoder, codec = Encoder(device="cpu"), Tokenizer.from_file(str(package / "tokenizer.json"))
    codec.no_padding()
    codec.enable_truncation(256)
    model = BertModel.from_pretrained(package)
    for text, vector in zip(TEXTS, encoder.encode(TEXTS), strict=True):
        with torch.no_grad():
            mean = model(input_ids=torch.tensor([codec.encode(text).ids])).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), rtol=0, atol=1e-5)
    np.testing.assert_allclose(encoder.encode(TEXTS[::-1])[::-1], encoder.encode(TEXTS), rtol=0, atol=1e-5)
    first, second, other = encoder.encode([TEXTS[0], "A man eats something.", "The stock market fell on Tuesday."])
    assert first @ second > 0.6 > 0.3 > first @ other
    assert "list of strings" in refusal(encoder.encode, "one text") and len(encoder.encode([])) == 0


def test_encoders_that_cannot_be_read(tmp_path, monkeypatch):
    assert "'nowhere' is neither a folder" in refusal(Encoder, "nowhere")
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    BertModel(BertConfig(vocab_size=9, **shape)).save_pretrained(tmp_path)
    assert "has no tokenizer.json" in refusal(Encoder, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "cannot be read as a sentence encoder" in refusal(Encoder, tmp_path, device="cpu")
    _set_config(tmp_path, auto_map={"AutoModel": "own.Own"})
    assert "needs Python code of its own" in refusal(Encoder, tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install -e '.[lab]'" in refusal(Encoder)


# the paper's encoder


def jina_by_hand(folder: Path, ids: list[int], slopes: list[float]) -> np.ndarray:
    """The vector of one text, unpadded, written out in float64: the mean of its token states, to length 1."""
    weights = {name: value.double() for name, value in load_file(folder / "model.safetensors").items()}
    heads = len(slopes)

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    x = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "embeddings.LayerNorm")
    size = x.shape[1] // heads
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        q, k, v = (linear(x, f"{layer}.attention.self.{name}") for name in ("query", "key", "value"))
        mixed = torch.zeros_like(x)
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            for i in range(len(ids)):
                scores = [float(q[i, part] @ k[j, part]) / size**0.5 - slopes[h] * abs(i - j) for j in range(len(ids))]
                share = torch.tensor(scores, dtype=torch.float64).softmax(0)
                mixed[i, part] = (share[:, None] * v[:, part]).sum(0)
        x = norm(x + linear(mixed, f"{layer}.attention.output.dense"), f"{layer}.attention.output.LayerNorm")
        inner = linear(x, f"{layer}.mlp.gated_layers")
        gate, value = inner[:, : inner.shape[1] // 2], inner[:, inner.shape[1] // 2 :]
        gelu = gate * 0.5 * (1 + torch.erf(gate / 2**0.5))
        x = norm(x + linear(gelu * value, f"{layer}.mlp.wo"), f"{layer}.mlp.layernorm")
    mean = x.mean(0).numpy()
    return mean / np.linalg.norm(mean)


def test_jina_v2_is_read_without_its_own_code(tmp_path, monkeypatch):
    """The English layout: ALiBi, gated units, mean pooling. Its code cannot run under transformers 5."""
    texts = ["the cat sat on the mat", "", "cats!", "a b c d e f g h i j k l m n o p q r s t", "dog"]
    folder = write_jina(tmp_path / "jina")
    encoder, codec = Encoder(folder, device="cpu"), Tokenizer.from_file(str(folder / "tokenizer.json"))
    codec.no_truncation()
    slopes = [2**-4, 2**-8, 2**-2]
    expected = [jina_by_hand(folder, codec.encode(text).ids, slopes) for text in texts]
    np.testing.assert_allclose(encoder.encode(texts), expected, rtol=0, atol=2e-6)
    for tokens in (1, 30):  # the batch does not change vectors
        monkeypatch.setattr("d5p4_lab.scoring.encoder.TOKENS", tokens)
        np.testing.assert_allclose(encoder.encode(texts[::-1])[::-1], expected, rtol=0, atol=2e-6)
    long = codec.encode("ab " * 99).ids  # 64 tokens are read, the last one too
    np.testing.assert_allclose(
        encoder.encode(["ab " * 99])[0], jina_by_hand(folder, [*long[:63], long[-1]], slopes), rtol=0, atol=2e-6
    )
    assert alibi_slopes(12)[8:] == [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5] and alibi_slopes(8)[0] == 0.5
    assert Encoder.check(folder) == folder
    lacks = write_jina(tmp_path / "lacks", num_hidden_layers=2)
    _set_config(lacks, num_hidden_layers=3)
    assert "encoder.layer.2.attention.self.query." in refusal(Encoder, lacks, device="cpu")
    _set_config(lacks, feed_forward_type="original")  # another layout needs its own code
    assert "needs Python code of its own" in refusal(Encoder, lacks, device="cpu")


def _set_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
