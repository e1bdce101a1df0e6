"""BERT, RoBERTa, ESM and ALBERT give the logits of transformers, and fill holes in texts of letters and word pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.esm import modeling_esm

import d5p4
from d5p4.errors import D5P4Error
from d5p4.models import Tokenizer, check, load
from tests.checkpoints import write_json
from tests.models.references import WideRotary
from tests.refusals import refusal

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
EDGES = {"bert": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), "esm": ("<cls>", "<pad>", "<eos>", "<unk>", "<mask>")}
EDGES |= {"albert": EDGES["bert"], "roberta": ("<s>", "<pad>", "</s>", "<unk>", "<mask>")}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("bert", {}),
    ("bert", {"hidden_act": "gelu_new"}),
    ("roberta", {"type_vocab_size": 1}),
    ("esm", {"position_embedding_type": "rotary", "token_dropout": True}),
    ("esm", {"position_embedding_type": "absolute", "token_dropout": True, "emb_layer_norm_before": True}),
    ("esm", {"position_embedding_type": "rotary", "token_dropout": False}),
    ("albert", {"num_hidden_groups": 1}),
    ("albert", {"num_hidden_groups": 2, "inner_group_num": 2, "num_hidden_layers": 4}),
]


def write(folder: Path, kind: str, **given: Any) -> Any:
    """Write a tiny random checkpoint with transformers, as it writes public ones, and return its model in float64."""
    pad = EDGES[kind].index("<pad>" if kind in ("esm", "roberta") else "[PAD]")
    config: dict[str, Any] = dict(vocab_size=25, hidden_size=32, num_attention_heads=4, intermediate_size=48)
    config |= dict(num_hidden_layers=3, max_position_embeddings=64, pad_token_id=pad, mask_token_id=4)
    config |= dict(embedding_size=16) if kind == "albert" else {}
    names = {"bert": "Bert", "esm": "Esm", "roberta": "Roberta", "albert": "Albert"}
    settings = getattr(transformers, f"{names[kind]}Config")(**{**config, **given})
    settings._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{names[kind]}ForMaskedLM")(settings).eval()
    for name, parameter in model.named_parameters():
        near_one = name.endswith("weight") and "norm" in name.lower()
        torch.nn.init.normal_(parameter, float(near_one), 0.2 if parameter.ndim == 1 else parameter.shape[1] ** -0.5)
        parameter.data *= 1.5 if "query" in name or "key" in name else 1
    model.double().save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join([*EDGES[kind], *LETTERS]) + "\n")
    return model


def wanted(model: Any, tokens: Tensor, real: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Return the logits of transformers. Its ESM rotates in float32, so its rotation is widened."""
    config = model.config
    if getattr(config, "position_embedding_type", "") == "rotary":
        model.esm.rotary_embeddings = WideRotary(8, 10000.0)
        rotate = modeling_esm.rotate_half

        def wide(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> tuple[Tensor, ...]:
            cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
            return tuple(x * cos + rotate(x) * sin for x in (q, k))

        for layer in model.esm.encoder.layer:
            attention = layer.attention.self
            for name in ("apply_rotary_pos_emb", "rotary_fn"):
                if hasattr(attention, name):
                    setattr(attention, name, wide)
        monkeypatch.setattr(modeling_esm, "apply_rotary_pos_emb", wide)
    after_padding = config.model_type in ("esm", "roberta")
    real = torch.ones_like(tokens, dtype=torch.bool) if real is None else real
    places = (real.long().cumsum(-1) - 1).clamp_min(0) + (config.pad_token_id + 1 if after_padding else 0)
    if getattr(config, "position_embedding_type", "") == "rotary":
        places = places - config.pad_token_id - 1
    with torch.no_grad():
        return model(input_ids=tokens, attention_mask=real.long(), position_ids=places).logits


def logits(model: Any, tokens: Tensor, real: Tensor | None = None) -> Tensor:
    head = model.head
    return torch.nn.functional.linear(model.body(tokens, real).states, head.weight, head.bias)


@pytest.mark.parametrize(("kind", "given"), CASES)
def test_same_logits_as_transformers(
    tmp_path: Path, kind: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for rows with different numbers of masks and with padding, which changes nothing."""
    theirs = write(tmp_path, kind, **given)
    model = load(tmp_path, "cpu", "float64")
    assert model.architecture == kind and model.mask_id == 4
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(5, 25, (4, 16), generator=generator)  # its mask shares are exact in float32, too
    for row, masks in enumerate((0, 1, 4, 16)):
        tokens[row, torch.randperm(16, generator=generator)[:masks]] = 4
    with_text = tokens[:3]  # for a row of masks alone, transformers' ESM divides by 0
    expected = wanted(theirs, with_text, None, monkeypatch)
    assert 0.5 < expected.std() < 3
    assert (logits(model, with_text) - expected).abs().max() <= 1e-10
    assert logits(model, tokens).isfinite().all()
    for pad in (1, 5):
        padded = torch.cat((torch.randint(5, 25, (4, pad), generator=generator), tokens), dim=1)
        real = torch.ones_like(padded, dtype=torch.bool)
        real[1:, :pad] = False
        ours = logits(model, padded, real)
        assert (ours[1:, pad:] - logits(model, tokens)[1:]).abs().max() <= 1e-12
        assert (ours[:3] - wanted(theirs, padded[:3], real[:3], monkeypatch))[real[:3]].abs().max() <= 1e-10
    assert (logits(load(tmp_path, "cpu", "float32"), with_text) - expected).abs().max() < 1e-4


def test_masks_of_esm_scale_the_other_tokens(tmp_path: Path) -> None:
    """The trap: without the scaling, a row with many masks has other logits."""
    write(tmp_path, "esm", position_embedding_type="rotary", token_dropout=True)
    model = load(tmp_path, "cpu", "float64")
    tokens = torch.tensor([[0, 5, 4, 4, 4, 8, 2]])
    scaled = logits(model, tokens)
    model.token_dropout = False
    assert (scaled - logits(model, tokens)).abs().max() > 0.1


def test_positions_of_roberta_begin_behind_the_padding(tmp_path: Path) -> None:
    write(tmp_path, "roberta")
    assert load(tmp_path, "cpu").max_length == 64 - 2
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", config | {"pad_token_id": 3})
    assert load(tmp_path, "cpu").max_length == 64 - 4


def test_layers_of_albert_are_stored_once(tmp_path: Path) -> None:
    write(tmp_path, "albert", num_hidden_groups=2, inner_group_num=2, num_hidden_layers=4)
    model = load(tmp_path, "cpu")
    assert len(model.layers) == 4 and model.order == [0, 1, 0, 1, 2, 3, 2, 3]


@pytest.mark.parametrize("kind", EDGES)
def test_check_passes_and_filling_keeps_the_text(tmp_path: Path, kind: str) -> None:
    given = {"position_embedding_type": "rotary", "token_dropout": True} if kind == "esm" else {}
    write(tmp_path, kind, **given)
    assert all(line.passed for line in check(tmp_path, "cpu")), check(tmp_path, "cpu")
    model = load(tmp_path, "cpu")
    assert set(model.head.banned.nonzero().flatten().tolist()) == set(range(5))
    mask = model.tokenizer.mask_token
    for method in ("tree", "d5p4", "independent"):
        prompts = [f"ACD{mask}{mask}FGH", f"{mask}K"]
        answers = d5p4.generate(model, prompts, k=3, method=method, temperature=3.0, seed=1)
        for before, after, texts in zip(("ACD", ""), ("FGH", "K"), answers.texts, strict=True):
            assert texts and all(text.startswith(before) and text.endswith(after) for text in texts)
            assert {len(text) for text in texts} == {len(before + after) + (2 if before else 1)}
    assert answers.sequences[0, 0].tolist()[0] == model.frame[0][0]  # the edges stay around the text
    for prompt, options in (("ACD", {}), (f"A{mask}", {"gen_length": 3})):
        assert "fills holes in a text" in refusal(d5p4.generate, model, prompt, **options)
    assert "not defined" in refusal(d5p4.loglikelihood, model, "ACD")
    assert "there is no token for 'B'" in refusal(model.tokenizer.encode, "ACB")


def test_word_pieces_and_symbols_of_a_vocab_txt(tmp_path: Path) -> None:
    """Word pieces are those of transformers; symbols of molecules are the longest that fit."""
    pieces = [*EDGES["bert"], "[unused1]", "play", "##ing", "##ed", "the", ",", "p", "##l", "un", "##play"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    ours = Tokenizer.read(tmp_path)
    theirs = transformers.BertTokenizer(vocab=str(tmp_path / "vocab.txt"))
    for text in ("The playing, unplayed", "played xyz", "[MASK] the pl"):
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.decode(ours.encode("the playing, unplayed")) == "the playing, unplayed"
    assert ours.textless() == [0, 1, 2, 3, 4, 5]
    symbols = [*EDGES["bert"], "C", "Cl", "c", "[nH]", "(", ")", "1", ">>", "O", "="]
    (tmp_path / "vocab.txt").write_text("\n".join(symbols) + "\n")
    ours = Tokenizer.read(tmp_path)
    text = "Clc1[nH]c1>>C(=O)Cl"
    assert [symbols[i] for i in ours.encode(text)][:4] == ["Cl", "c", "1", "[nH]"]
    assert ours.decode(ours.encode(text)) == text
    assert ours.encode("C[MASK] C") == [5, 4, 5]


def test_convert_reads_a_pickle_and_runs_no_code(tmp_path: Path) -> None:
    """A folder like rxnfp's: no model_type, old names of norms, further heads, and a bias of the head stored once."""
    model = write(tmp_path / "a", "bert")
    weights = load_file(tmp_path / "a" / "model.safetensors")
    wanted = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): weight for name, weight in weights.items()}
    wanted |= {"cls.seq_relationship.weight": torch.zeros(2, 32), "bert.pooler.dense.bias": torch.zeros(32)}
    wanted["cls.predictions.decoder.weight"] = wanted["bert.embeddings.word_embeddings.weight"]  # shared memory
    old = tmp_path / "old"
    old.mkdir()
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    write_json(old / "config.json", {k: v for k, v in config.items() if k not in ("model_type", "architectures")})
    torch.save(wanted, old / "pytorch_model.bin")
    (old / "vocab.txt").write_text((tmp_path / "a" / "vocab.txt").read_text())
    write_json(old / "config.json", config)
    assert "use d5p4 convert" in refusal(load, old)
    write_json(old / "config.json", {k: v for k, v in config.items() if k not in ("model_type", "architectures")})
    d5p4.models.convert(old, tmp_path / "new", tmp_path / "a" / "vocab.txt")
    ours = load(tmp_path / "new", "cpu", "float64")
    tokens = torch.tensor([[2, 5, 4, 7, 3]])
    assert weights["cls.predictions.bias"].abs().max() > 0.1  # a bias that is not read would be noticed
    with torch.no_grad():
        assert (logits(ours, tokens) - model(input_ids=tokens).logits).abs().max() <= 1e-10
    assert "is not empty" in refusal(d5p4.models.convert, old, tmp_path / "new")
    torch.save({"weight": Path("a")}, old / "pytorch_model.bin")  # an object that is not a tensor
    with pytest.raises(D5P4Error, match="not a file of plain tensors"):
        d5p4.models.convert(old, tmp_path / "other")
