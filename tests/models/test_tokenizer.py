"""Tokenizers from files agree with transformers; chat templates run in a sandbox with limits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import transformers
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from d5p4.errors import D5P4Error
from d5p4.models import Tokenizer, load
from d5p4.models.wrap import adapt_tokenizer
from d5p4.prompts import encode
from tests.checkpoints import TINY_TEXT, write_dream, write_llada, write_mdlm
from tests.refusals import refusal

CORPUS = [
    "The quick brown fox can't jump; it won't, they're told. I'll see: 1234567 times, 3.14!",
    "naïve café, Ærø, 北京欢迎你, привет мир — emoji 🙂🙃 and e\u0301 decomposed",
    "def f(x):\n    return x+1\n\n\n\tif True:\r\n  pass   \n",
]
AWKWARD = [
    "",
    " ",
    "   leading and trailing   ",
    "tabs\t\tand\n\n\nlines\r\n\r\n  x",
    "don't DON'T they'RE we'Ve I'm it'd he'll 's",
    "0 12 1234567 3.14159 1,000,000 ½ ² ٣",
    "cafe\u0301 café Å Å ﬁ",
    "北京 привет 🙂‍↔️ 👩‍👩‍👧 \u200b zero\u00a0width \ufeff",
    "x+=1;y!==z //comment---- ....",
    "a<|endoftext|>b <|endoftext|> c",
    "<|im_start|>user\nhi<|im_end|>\n",
]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vocab.json and merges.txt of a small byte-level BPE."""
    folder = tmp_path_factory.mktemp("bpe")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.model.save(str(folder))
    return folder


def copy(source: Path, target: Path, **files: object) -> Path:
    for name in ("vocab.json", "merges.txt"):
        (target / name).write_bytes((source / name).read_bytes())
    for name, content in files.items():
        (target / f"{name}.json").write_text(json.dumps(content))
    return target


def check_agreement(ours: Tokenizer, theirs: transformers.PreTrainedTokenizerFast) -> None:
    for text in AWKWARD:
        ids = theirs.encode(text, add_special_tokens=False)
        read = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.encode(text) == ids and ours.decode(ids) == read, text


def test_gpt2_files(bpe: Path, tmp_path: Path) -> None:
    folder = copy(bpe, tmp_path)
    check_agreement(Tokenizer.read(folder), transformers.GPT2TokenizerFast.from_pretrained(str(folder)))


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "DreamTokenizer"])
def test_qwen2_files(bpe: Path, tmp_path: Path, kind: str) -> None:
    size = len(json.loads((bpe / "vocab.json").read_text()))
    names = ["<|im_start|>", "<|im_end|>", "<|mask|>"]
    ids = {name: size + i for i, name in enumerate(names)}
    decoder = {str(i): {"content": name, "special": True, "normalized": False} for name, i in ids.items()}
    settings = {"tokenizer_class": kind, "added_tokens_decoder": decoder}
    folder = copy(bpe, tmp_path, added_tokens=ids, tokenizer_config=settings)
    ours = Tokenizer.read(folder, mask_id=ids["<|mask|>"])
    check_agreement(ours, transformers.Qwen2TokenizerFast.from_pretrained(str(folder)))
    assert {name: ours.token_id(name) for name in names} == ids


def test_added_ids_may_have_gaps(bpe: Path, tmp_path: Path) -> None:
    named = {"mask_token": {"content": "<|far|>"}}
    folder = copy(bpe, tmp_path, added_tokens={"<|far|>": 1000}, special_tokens_map=named)
    ours = Tokenizer.read(folder, mask_id=1000)
    assert ours.encode("a<|far|>b")[1] == 1000 and ours.mask_token == "<|far|>"
    assert ours.decode([1000, 999, 5000, -3]) == ""
    assert 999 not in ours.ids()


def test_mask_token_is_given_to_the_next_free_id(tmp_path: Path) -> None:
    tokenizer = load(write_mdlm(tmp_path), "cpu").tokenizer
    mask = len(TINY_TEXT) + 1
    assert tokenizer.mask_token == "<|mask|>"
    assert tokenizer.encode("ab<|mask|><|mask|> c") == [0, 1, mask, mask, 36, 2]
    assert tokenizer.decode([0, mask, 1]) == "ab"
    plain = Tokenizer.read(tmp_path)
    assert plain.mask_token is None
    assert plain.for_model(mask + 5).mask_token is None
    assert plain.for_model(mask).mask_token == "<|mask|>" and mask not in plain.ids()


def test_tokens_listed_only_in_the_config(tmp_path: Path) -> None:
    folder = write_mdlm(tmp_path)
    size = len(TINY_TEXT) + 1

    def listed(i: int) -> None:
        entry = {"content": "<|sep|>", "special": True}
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {str(i): entry}}))

    listed(size)
    assert Tokenizer.read(folder).token_id("<|sep|>") == size
    listed(size + 3)
    with pytest.raises(D5P4Error, match="disagree.*<|sep|>"):
        Tokenizer.read(folder)


def test_chat_templates(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": " hi "}]
    tokenizer = load(write_llada(tmp_path / "a", chat=True), "cpu").tokenizer
    wanted = "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
    assert tokenizer.chat(messages) == wanted + "<|start_header_id|>assistant<|end_header_id|>\n\n"
    for wrong in ("hi", {"role": "user"}, [{"content": "x"}], ["x"]):
        assert "role" in refusal(tokenizer.chat, wrong), wrong
    silent = load(write_dream(tmp_path / "b"), "cpu").tokenizer
    assert silent.chat(messages) is None and not silent.has_chat and tokenizer.has_chat


TEMPLATES = {
    "loops": (
        "{%- for m in messages %}\n    {%- if m.role == 'system' %}{% continue %}{% endif %}\n"
        "    {{- m | tojson }}\n{% endfor %}\n  {%- if add_generation_prompt %}go{% endif %}"
    ),
    "tools": "{% if tools is not none %}{{ tools | length }}{% elif documents is none %}none{% endif %}",
    "generation": (
        "{% for m in messages %}\n  {% generation %}\n  {{ m.content }}{% set x = 1 %}\n  {% endgeneration %}\n"
        "{% endfor %}{{ x is defined }}"
    ),
    "json": "{{ messages | tojson(ensure_ascii=true, sort_keys=true) }}{{ messages[1] | tojson(indent=2) }}",
    "date": "{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_chat_template_same_as_transformers(tmp_path: Path, kind: str) -> None:
    folder, template = write_llada(tmp_path), TEMPLATES[kind]
    (folder / "chat_template.jinja").write_text(template)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "é <b> 'q'"}]
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), chat_template=template)
    wanted = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert Tokenizer.read(folder).chat(messages) == wanted


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    """From the last of these places that exists."""
    folder = write_llada(tmp_path)
    several = [{"name": name, "template": name} for name in ("tool", "rag")]
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "legacy"}))
    assert Tokenizer.read(folder).chat([]) == "legacy"
    default = [*several, {"name": "default", "template": "default"}]
    for templates, text in ((several[:1], "tool"), (default, "default")):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
        assert Tokenizer.read(folder).chat([]) == text
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert "none of the templates tool, rag is called default" in refusal(Tokenizer.read(folder).chat, [])
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.read(folder).chat([]) == "file"


MEMORY = "MemoryError" if sys.platform == "linux" else ""  # macOS has no such limit
HOSTILE = {
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{{ messages.append(1) }}": "unsafe",
    "{{ raise_exception('only users may speak') }}": "only users may speak",
    "{% for m in messages %}": "TemplateSyntaxError",
    "{{ undefined_thing.attribute }}": "undefined_thing",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ messages | tojson(default=raise_exception) }}": "default",
    "{{ messages | tojson(cls=raise_exception) }}": "cls",
    "{{ range(10 ** 9) | list }}": "OverflowError",
    "{{ lipsum(10 ** 9) }}": "lipsum",
    "{{ 'a' * 10 ** 10 }}": MEMORY,
    "{{ 'a' * 2 ** 22 }}": "4,194,304 characters",
    "{{ '%10000000000d' % 1 }}": MEMORY,
    "{{ strftime_now('%Y' * 10 ** 9) }}": MEMORY,
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "RecursionError",
    "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}": "2 s of processor time",
    "{% set n = namespace(a=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% endfor %}{{ n.a }}": "2 s of",
}


@pytest.mark.parametrize("template", HOSTILE)
def test_bad_templates_are_refused_and_good_ones_follow(template: str) -> None:
    """Whatever the template does, its process ends; the next text comes from a new one."""
    backend, messages = Backend(models.BPE()), [{"role": "user", "content": "hi"}]
    message = refusal(Tokenizer(backend, chat_template=template).chat, messages)
    assert "the chat template" in message and HOSTILE[template] in message and "\n" not in message
    assert Tokenizer(backend, chat_template="{{ messages[0].content }}").chat(messages) == "hi"


def test_half_of_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    folder = write_llada(tmp_path, chat=True)
    model = load(folder, "cpu")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    for codec in (model.tokenizer, adapt_tokenizer(fast, 51)):
        assert "'\\udcff' at character 4, in 'the \\udcff cat'" in refusal(codec.encode, "the \udcff cat")
    for prompt in ("a \udcff", [{"role": "user", "content": "a \ud800"}]):
        assert "half of a surrogate pair" in refusal(encode, model, prompt, None), prompt


def replace(content: str, **pattern: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern, "content": content}


LETTERS = [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}] * 40


def test_tokenizers_that_would_fill_the_memory_are_refused(tmp_path: Path) -> None:
    file = write_llada(tmp_path) / "tokenizer.json"
    plain = json.loads(file.read_text())
    changes = [(part, replace("a" * 1000, String="a")) for part in ("normalizer", "decoder")]
    changes += [("normalizer", replace("a" * 64, String="")), ("normalizer", replace("a" * 64, Regex="x*"))]
    changes += [("normalizer", {"type": "Sequence", "normalizers": [replace("aa", String="a")] * 40})]
    changes += [("normalizer", {"type": "Replace"}), ("pre_tokenizer", {"type": "Sequence", "pretokenizers": LETTERS})]
    for part, content in changes:
        file.write_text(json.dumps(plain | {part: content}))
        assert str(file) in refusal(Tokenizer.read, tmp_path), content
    file.write_text(json.dumps(plain | {"normalizer": replace("▁", String=" ")}))
    assert Tokenizer.read(tmp_path).token_id("a") == 0
    plain["model"]["vocab"]["a" * 5000] = 500
    file.write_text(json.dumps(plain))
    assert "more than 4096 characters" in refusal(Tokenizer.read, tmp_path)


def test_a_panic_of_the_tokenizers_library_is_refused() -> None:
    """Oniguruma gives up on this pattern; Rust then panics, which Python sees as a BaseException."""
    backend = Backend(models.BPE({"a": 0, "!": 1}, []))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    assert "cannot be written in this model's tokens" in refusal(Tokenizer(backend).encode, "a" * 40 + "!")


def test_broken_files(bpe: Path, tmp_path: Path) -> None:
    folder = copy(bpe, tmp_path)
    for name, contents in {
        "tokenizer_config.json": [
            {"added_tokens_decoder": [1]},
            {"added_tokens_decoder": {"x": {"content": "a"}}},
            {"added_tokens_decoder": {"700": {"content": "\ud800"}}},
            {"additional_special_tokens": 5},
            {"pad_token": "\ud800"},
        ],
        "added_tokens.json": [{"a": "b"}, {"a": [1]}],
        "special_tokens_map.json": [{"additional_special_tokens": True}],
        "chat_template.jinja": [b"\xff\xfe"],
        "merges.txt": [b"#version: 0.2\nnope nada\n", b"\xff"],
        "tokenizer.json": [{}, {"model": {"type": "BPE", "vocab": 5}}, b"\xff"],
    }.items():
        for content in contents:
            (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
            assert "cannot be read" in refusal(Tokenizer.read, folder), (name, content)
        if name != "merges.txt":
            (folder / name).unlink()


def test_a_word_without_a_token_is_named_as_it_was_written() -> None:
    backend = Backend(models.WordLevel({"the": 0, "Ġcat": 1}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert "there is no token for ' dog'" in refusal(Tokenizer(backend).encode, "the cat dog")
