import json
import math
import sys

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM

import d5p4
from d5p4.eval.perplexity import CausalJudge, Scored

CONTEXT = 24
TEXTS = ["the cat sat", "", "a", "then the other thing", "été — the end"]


def write_judge(folder, *, named=("bos_token", "eos_token"), flat=False):
    """A tiny random Llama over bytes, with `th` as the one merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    codec = Tokenizer(BPE({c: i for i, c in enumerate([*alphabet, "th"])}, [("t", "h")]))
    codec.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    codec.decoder = decoders.ByteLevel()
    codec.add_special_tokens([AddedToken(text, special=True) for text in ("<|endoftext|>", "<s>")])
    size = codec.get_vocab_size()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=CONTEXT, initializer_range=0.5, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if flat:
        torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(folder)
    codec.save(str(folder / "tokenizer.json"))
    strings = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **{name: strings[name] for name in named}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_judge(tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module")
def judge(folder):
    return CausalJudge(folder, device="cpu", dtype="float64")


def chain_rule(judge, row):
    """-log p of a row's tokens but the first, one forward of an unpadded prefix for each."""
    total = 0.0
    for i in range(1, len(row)):
        with torch.no_grad():
            logits = judge.model(input_ids=torch.tensor([row[:i]])).logits[0, -1]
        total -= logits.log_softmax(-1)[row[i]].item()
    return total


def test_a_score_is_the_chain_rule_from_the_start_token(judge):
    scored = judge.score(TEXTS)
    start = judge.tokenizer.convert_tokens_to_ids("<s>")
    rows = [[start, *judge.tokenizer(text, add_special_tokens=False)["input_ids"]] for text in TEXTS]
    np.testing.assert_allclose(scored.nats, [chain_rule(judge, row) for row in rows], rtol=0, atol=1e-10)
    assert scored.tokens.tolist() == [10, 0, 1, 16, 16]  # `th` is one token, `é` two, the dash three
    assert scored.bytes.tolist() == [len(text.encode()) for text in TEXTS]


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_the_batch_does_not_change_results(judge, batch_size):
    together, apart = judge.score(TEXTS), judge.score(TEXTS, batch_size=batch_size)
    np.testing.assert_allclose(apart.nats, together.nats, rtol=0, atol=1e-10)
    backwards = judge.score(TEXTS[::-1], batch_size=batch_size)
    np.testing.assert_allclose(backwards.nats[::-1], together.nats, rtol=0, atol=1e-10)
    assert (backwards.tokens[::-1] == together.tokens).all()


def test_corpus_figures_weigh_texts_by_their_length():
    scored = Scored(np.array([4.0, 2.0]), np.array([3, 1]), np.array([10, 2]))
    assert scored.perplexity == pytest.approx(math.exp(6 / 4))
    assert scored.bits_per_byte == pytest.approx(6 / math.log(2) / 12)


def test_a_judge_without_opinions_has_the_perplexity_of_its_vocabulary(tmp_path):
    scored = CausalJudge(write_judge(tmp_path, flat=True), device="cpu").score(["the cat"])
    assert scored.perplexity == pytest.approx(259, rel=1e-6)
    assert scored.bits_per_byte == pytest.approx(math.log2(259) * 6 / 7, rel=1e-6)


def test_nothing_to_score_is_no_number(judge):
    scored = judge.score(["", ""])
    assert scored.tokens.sum() == scored.bytes.sum() == scored.nats.sum() == 0
    assert math.isnan(scored.perplexity) and math.isnan(scored.bits_per_byte)
    assert judge.score([]).nats.shape == (0,)


@pytest.mark.parametrize(
    ("named", "start", "token"),
    [
        (("bos_token", "eos_token"), None, "<s>"),
        (("eos_token",), None, "<|endoftext|>"),
        (("bos_token", "eos_token"), "<|endoftext|>", "<|endoftext|>"),
        ((), None, None),
        (("bos_token", "eos_token"), "", None),
    ],
)
def test_what_the_first_token_is_predicted_from(tmp_path, named, start, token):
    judge = CausalJudge(write_judge(tmp_path, named=named), device="cpu", dtype="float64", start=start)
    ids = judge.tokenizer("then", add_special_tokens=False)["input_ids"]
    row = ids if token is None else [judge.tokenizer.convert_tokens_to_ids(token), *ids]
    scored = judge.score(["then", "th"])
    assert scored.nats[0] == pytest.approx(chain_rule(judge, row), abs=1e-10)
    # Without a start token `th` is not scored: neither the token nor its two bytes count.
    assert scored.tokens.tolist() == ([2, 0] if token is None else [3, 1])
    assert scored.bytes.tolist() == ([2, 0] if token is None else [4, 2])


def test_a_cut_text_scores_as_its_beginning(judge):
    cut, beginning = judge.score(["éé the cat"], max_tokens=6), judge.score(["éé th"])
    assert cut.tokens.tolist() == beginning.tokens.tolist() == [6]
    assert cut.bytes.tolist() == beginning.bytes.tolist() == [7]
    assert cut.nats[0] == pytest.approx(beginning.nats[0], abs=1e-10)


def test_a_text_may_fill_the_context_but_not_exceed_it(judge):
    assert judge.score(["a" * CONTEXT]).tokens.tolist() == [CONTEXT]
    with pytest.raises(d5p4.D5P4Error, match=f"text 1 has {CONTEXT + 1} tokens"):
        judge.score(["a", "a" * (CONTEXT + 1)])
    assert judge.score(["a" * 99], max_tokens=CONTEXT).tokens.tolist() == [CONTEXT]


def test_weights_that_are_not_finite_are_an_error(folder):
    judge = CausalJudge(folder, device="cpu")
    torch.nn.init.constant_(judge.model.lm_head.weight, float("nan"))
    with pytest.raises(d5p4.NonFiniteLogits, match="not finite"):
        judge.score(["a"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"texts": "one text"}, "list of strings"),
        ({"texts": ["a", 3]}, "list of strings"),
        ({"texts": ["a"], "batch_size": 0}, "batch_size=0"),
        ({"texts": ["a"], "max_tokens": 2.5}, "max_tokens=2.5"),
    ],
)
def test_bad_input(judge, arguments, message):
    with pytest.raises(d5p4.D5P4Error, match=message):
        judge.score(**arguments)


def test_a_judge_that_cannot_be_read_is_one_sentence(folder, tmp_path, monkeypatch):
    with pytest.raises(d5p4.D5P4Error, match="'nowhere' is no folder"):
        CausalJudge("nowhere")
    with pytest.raises(d5p4.D5P4Error, match="x.gguf"):
        CausalJudge(folder, gguf_file="x.gguf")
    with pytest.raises(d5p4.D5P4Error, match="'<none>' is no token"):
        CausalJudge(folder, device="cpu", start="<none>")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mdlm"}))
    with pytest.raises(d5p4.D5P4Error, match="cannot be read as a causal language model"):
        CausalJudge(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(d5p4.D5P4Error, match=r"d5p4\[eval\]"):
        CausalJudge(folder)


def test_the_shipped_judge_prefers_english_to_its_words_in_disorder():
    text = "She had gone down to the garden early in the morning, before anyone in the house was awake."
    disorder = " ".join(sorted(text.split()))
    judge = CausalJudge("judge", device="cpu")
    real, shuffled = judge.score([text]), judge.score([disorder])
    assert real.bits_per_byte < 0.8 * shuffled.bits_per_byte
    assert real.perplexity < shuffled.perplexity
