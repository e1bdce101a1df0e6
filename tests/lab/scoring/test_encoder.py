import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel

from d5p4 import D5P4Error
from d5p4.eval.similarity import average_cosine
from d5p4_lab.scoring.encoder import DEFAULT, Encoder, alibi_slopes
from tests.checkpoints import write_jina
from tests.refusals import refusal

LONGEST = 12
WORDS = ["the", "cat", "sat", "on", "mat", "dog", "ran", "##s", "été", "中"]
TEXTS = [
    "the cat sat on the mat",
    "",
    "cats",
    "  Été 中 \n",
    "unknown 😀 words",
    "the dog ran " * 9,  # longer than the model reads
    "dog",
]
KINDS = {
    "mean": {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True},
    "cls": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
}


def write_encoder(folder, pooling=None, changes=None):
    """A tiny random BERT; with `pooling` also the files of sentence-transformers."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    codec = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    codec.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    codec.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    codec.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = BertConfig(vocab_size=len(tokens), max_position_embeddings=20, initializer_range=0.5, **shape)
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    codec.save(str(folder / "tokenizer.json"))
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 20, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if pooling is not None:
        kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        modules = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LONGEST}))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16, **pooling}))
    if changes is not None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Encoder(write_encoder(tmp_path_factory.mktemp("encoder"), KINDS["mean"]), device="cpu")


@pytest.mark.parametrize("kind", ["cls", pytest.param("mean", marks=pytest.mark.full)])  # the default takes the mean
def test_vectors_are_those_of_sentence_transformers(tmp_path, kind):
    library = pytest.importorskip("sentence_transformers")
    folder = write_encoder(tmp_path, KINDS[kind])
    encoder = Encoder(folder, device="cpu")
    assert (encoder.pooling, encoder.max_tokens) == (kind, LONGEST)
    theirs = library.SentenceTransformer(str(folder), device="cpu").encode(TEXTS, batch_size=3)
    np.testing.assert_allclose(encoder.encode(TEXTS), theirs, rtol=0, atol=1e-5)


def test_vectors_by_hand(tiny):
    """One text at a time, unpadded: the mean of all token states, [CLS] and [SEP] too, to length 1."""
    for text, vector in zip(TEXTS, tiny.encode(TEXTS), strict=True):
        ids = tiny.tokenizer(text)["input_ids"]
        ids = ids if len(ids) <= LONGEST else [*ids[: LONGEST - 1], ids[-1]]  # [SEP] stays
        with torch.no_grad():
            mean = tiny.model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), rtol=0, atol=1e-5)


def test_the_batch_does_not_change_vectors(tiny):
    for most in (1, 25, 10_000):
        vectors = tiny.encode(TEXTS, max_tokens_per_batch=most)
        assert vectors.dtype == np.float32 and vectors.shape == (len(TEXTS), 16)
        np.testing.assert_allclose(vectors, tiny.encode(TEXTS), rtol=0, atol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
        backwards = tiny.encode(TEXTS[::-1], max_tokens_per_batch=most)
        np.testing.assert_allclose(backwards[::-1], vectors, rtol=0, atol=1e-5)


def test_a_folder_of_transformers_alone_is_pooled_by_the_mean(tmp_path, tiny):
    plain = Encoder(write_encoder(tmp_path), device="cpu")
    assert (plain.pooling, plain.max_tokens) == ("mean", 20)
    np.testing.assert_allclose(plain.encode(TEXTS[:5]), tiny.encode(TEXTS[:5]), rtol=0, atol=1e-5)
    assert not np.allclose(plain.encode(TEXTS[5:6]), tiny.encode(TEXTS[5:6]), atol=1e-3)  # it reads more of it


def test_no_texts_and_bad_texts(tiny):
    assert tiny.encode([]).shape == (0, 16)
    for texts in ("one text", ["a", None]):
        with pytest.raises(D5P4Error, match="list of strings"):
            tiny.encode(texts)
    with pytest.raises(D5P4Error, match="max_tokens_per_batch=0"):
        tiny.encode(["a"], max_tokens_per_batch=0)


def test_models_with_their_own_code_run_it_only_when_asked(tmp_path, monkeypatch):
    from transformers import dynamic_module_utils

    folder = tmp_path / "own"
    folder.mkdir()
    write_encoder(folder, KINDS["mean"], {"auto_map": {"AutoModel": "own.Own"}})
    (folder / "own.py").write_text(
        "from transformers import BertModel\n"
        "class Own(BertModel):\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config, add_pooling_layer=False)\n"
        "    def forward(self, **inputs):\n"
        "        out = super().forward(**inputs)\n"
        "        out.last_hidden_state = -out.last_hidden_state\n"
        "        return out\n"
    )
    with pytest.raises(D5P4Error, match="remote_code=True"):
        Encoder(folder, device="cpu")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    own = Encoder(folder, device="cpu", remote_code=True).encode(TEXTS)
    plain = write_encoder(tmp_path, KINDS["mean"])
    np.testing.assert_allclose(own, -Encoder(plain, device="cpu").encode(TEXTS), rtol=0, atol=1e-5)


def test_pooling_that_is_not_done_here_and_the_newer_spelling(tmp_path):
    for name, pooling, message in (
        ("a", {"pooling_mode_max_tokens": True}, "pools by max"),
        ("b", {"pooling_mode_lasttoken": True}, "pools by lasttoken"),
        ("c", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "pools by mean, cls"),
        ("d", {"pooling_mode": "weightedmean"}, "pools by weightedmean"),
    ):
        (tmp_path / name).mkdir()
        assert message in refusal(Encoder, write_encoder(tmp_path / name, pooling), device="cpu")
    (tmp_path / "new").mkdir()
    assert Encoder(write_encoder(tmp_path / "new", {"pooling_mode": "cls"}), device="cpu").pooling == "cls"


def test_modules_that_are_not_read_here(tmp_path):
    folder = write_encoder(tmp_path, KINDS["mean"])
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(D5P4Error, match="a Dense module"):
        Encoder(folder, device="cpu")


def test_encoders_that_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(D5P4Error, match="'nowhere' is neither a folder"):
        Encoder("nowhere")
    deeper = write_encoder(tmp_path, changes={"num_hidden_layers": 3})
    with pytest.raises(D5P4Error, match=r"lack \d+ weights .*layer\.2"):
        Encoder(deeper, device="cpu")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mdlm"}))
    with pytest.raises(D5P4Error, match="cannot be read as an encoder"):
        Encoder(tmp_path, device="cpu")
    with monkeypatch.context() as without:
        without.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(D5P4Error, match=r"pip install 'd5p4\[eval\]'"):
            Encoder(device="cpu")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(D5P4Error, match=r"pip install 'd5p4\[eval\]'"):
        Encoder(tmp_path, device="cpu")


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


def test_jina_v2_is_read_without_its_own_code(tmp_path):
    """The English layout: ALiBi, gated units, mean pooling. Its code cannot run under transformers 5."""
    texts = ["the cat sat on the mat", "", "cats!", "a b c d e f g h i j k l m n o p q r s t", "dog"]
    folder = write_jina(tmp_path / "jina")
    encoder = Encoder(folder, device="cpu")
    assert (encoder.pooling, encoder.max_tokens) == ("mean", 64)
    expected = [jina_by_hand(folder, encoder.tokenizer(text)["input_ids"], [2**-4, 2**-8, 2**-2]) for text in texts]
    np.testing.assert_allclose(encoder.encode(texts), expected, rtol=0, atol=2e-6)
    np.testing.assert_allclose(encoder.encode(texts, max_tokens_per_batch=1), expected, rtol=0, atol=2e-6)
    assert len(encoder.tokenizer("ab " * 99, truncation=True, max_length=encoder.max_tokens)["input_ids"]) == 64
    whole = Encoder(write_jina(tmp_path / "whole", prefix="bert."), device="cpu")  # as stored with the head it had
    np.testing.assert_array_equal(whole.encode(texts), encoder.encode(texts))
    assert alibi_slopes(12)[8:] == [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5] and alibi_slopes(8)[0] == 0.5
    assert Encoder.check(folder) == folder
    lacks = write_jina(tmp_path / "lacks", num_hidden_layers=2)
    _set_config(lacks, num_hidden_layers=3)
    assert "encoder.layer.2.attention.self.query.weight is missing" in refusal(Encoder, lacks, device="cpu")
    _set_config(lacks, feed_forward_type="original")  # another layout needs its own code
    assert "remote_code=True" in refusal(Encoder, lacks, device="cpu")
    assert "remote_code=True" in refusal(Encoder.check, lacks)
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refusal(Encoder.check, folder)


def _set_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# the model in the box


needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec(DEFAULT.replace("-", "_")) is None, reason=f"{DEFAULT} is not installed"
)


@pytest.fixture(scope="module")
def minilm():
    return Encoder(device="cpu")


@needs_minilm
def test_the_default_says_what_sentence_transformers_says(minilm):
    library = pytest.importorskip("sentence_transformers")
    texts = [
        "A man is eating food.",
        "Été — 中文 😀",
        "",
        " ".join(f"sentence number {i}." for i in range(120)),  # more than 256 tokens
        "Shorter.",
    ]
    folder = importlib.util.find_spec(DEFAULT.replace("-", "_")).submodule_search_locations[0]
    theirs = library.SentenceTransformer(f"{folder}/model", device="cpu").encode(texts, batch_size=2)
    assert minilm.max_tokens == 256
    np.testing.assert_allclose(minilm.encode(texts), theirs, rtol=0, atol=1e-5)
    np.testing.assert_allclose(minilm.encode(texts, max_tokens_per_batch=1), theirs, rtol=0, atol=1e-5)


@needs_minilm
def test_the_default_knows_what_is_alike(minilm):
    alike = ["A man is eating food.", "A man eats something."]
    first, second, other = minilm.encode([*alike, "The stock market fell on Tuesday."])
    assert first @ second > 0.6 > 0.3 > first @ other


def test_average_cosine_is_the_mean_over_pairs():
    rows = np.random.default_rng(0).normal(size=(7, 5)) + 0.5
    pairs = [
        rows[i] @ rows[j] / (np.linalg.norm(rows[i]) * np.linalg.norm(rows[j]))
        for i in range(7)
        for j in range(7)
        if i != j
    ]
    assert average_cosine(rows) == pytest.approx(np.mean(pairs), abs=1e-12)


def test_average_cosine_by_hand():
    assert average_cosine([[2.0, 0.0], [5.0, 0.0]]) == pytest.approx(1)
    assert average_cosine([[2.0, 0.0], [-5.0, 0.0]]) == pytest.approx(-1)
    assert average_cosine([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]) == pytest.approx(2 * 0.5**0.5 / 3)
    assert average_cosine([[1.0, 0.0], [0.0, 0.0]]) == 0  # nothing has no direction
    assert average_cosine([[1.0, 2.0]]) == average_cosine(np.zeros((0, 4))) == 0


def test_vectors_of_another_shape_have_no_cosine():
    assert "NaN or infinite" in refusal(average_cosine, [[1.0, np.inf]])
    assert "shape" in refusal(average_cosine, [1.0, 2.0])
