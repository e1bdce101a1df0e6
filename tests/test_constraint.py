"""Masks, forced tokens, ends and errors of constraints, against enumeration and against a validator of JSON schemas."""

import itertools
import json
import random
import re

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

import d5p4
from d5p4 import constraint
from d5p4.constraint import Constraint, Matchers, Vocabulary, canonical
from d5p4.models.tokenizer import Tokenizer as Codec
from d5p4.ops.vocab import unpack
from tests.fake import FakeModel

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def letters():
    return Vocabulary.of(FakeModel())  # a to j; 10 ends a text, 11 is the mask


def byte_level(texts, size=400):
    """Return a model whose tokenizer is a byte-level BPE trained on texts, with two special tokens at the end."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet))
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<|endoftext|>", "<|mask|>")])
    model = FakeModel(vocabulary=backend.get_vocab_size())
    model.tokenizer = Codec(backend, mask_id=model.mask_id)
    return model


@pytest.fixture(scope="module")
def bpe():
    return byte_level(
        ['{"name":"Ann","tags":["red","blue"],"age":41,"ok":true,"none":null}', "the true trial of a tree"] * 40
    )


def allowed(matchers, prefix):
    size = matchers.constraint.vocabulary.size
    return unpack(matchers.masks([tuple(prefix)]), size)[0].nonzero().flatten().tolist()


FORMS = [
    ("regex", "(a|b)+c|dd", lambda text: re.fullmatch("(a|b)+c|dd", text)),
    ("regex", "a{2,3}b?", lambda text: re.fullmatch("a{2,3}b?", text)),
    ("regex", "(ab|a)(bc|c)?", lambda text: re.fullmatch("(ab|a)(bc|c)?", text)),
    ("regex", "", lambda text: not text),
    ("choices", ("ab", "abc", "b", "caa"), lambda text: text in ("ab", "abc", "b", "caa")),
    ("grammar", 'start: "a" start "b" | "c"', lambda text: re.fullmatch("c|acb|aacbb|aaacbbb", text)),
    ("grammar", 'start: word ("d" word)*\nword: "a" "b"? | "c"', lambda text: re.fullmatch("(ab?|c)(d(ab?|c))*", text)),
]


@pytest.mark.parametrize(("option", "form", "matches"), FORMS, ids=[str(form[1]) for form in FORMS])
def test_masks_agree_with_enumeration(letters, option, form, matches):
    """All texts of up to seven letters are enumerated; the masks of prefixes of up to two letters depend on these."""
    texts = ["".join(text) for n in range(8) for text in itertools.product("abcd", repeat=n)]
    language = {text for text in texts if matches(text)}
    prefixes = {text[:n] for text in language for n in range(len(text) + 1)}
    matchers = Matchers(Constraint(letters, option, form))
    for prefix in (text for text in texts if len(text) <= 2 and text in prefixes):
        ids = [ord(letter) - 97 for letter in prefix]
        following = [i for i in range(4) if prefix + chr(97 + i) in prefixes]
        assert allowed(matchers, ids) == following + [10] * (prefix in language)
        assert matchers.accepts(tuple(ids)) == (prefix in language)


def test_every_spelling_of_a_text_is_allowed(bpe):
    """Tokens of several characters: a token is allowed if the text with it starts one of the choices."""
    choices = ("true", "trial", '{"name":"Ann"}', "é", "日本")
    matchers, vocabulary = Matchers(Constraint(Vocabulary.of(bpe), "choices", choices)), Vocabulary.of(bpe)
    written = [vocabulary.tokens.decode_bytes([i]) for i in range(vocabulary.size - 2)]
    seen, waiting = set(), [()]
    while waiting:
        prefix = waiting.pop()
        text = b"".join(written[i] for i in prefix)
        rest = [choice.encode()[len(text) :] for choice in choices if choice.encode().startswith(text)]
        wanted = [i for i, own in enumerate(written) if own and any(end.startswith(own) for end in rest)]
        assert allowed(matchers, prefix) == wanted + [vocabulary.size - 2] * (b"" in rest)
        seen |= {text} if b"" in rest else set()
        waiting += [(*prefix, i) for i in wanted]
    assert seen == {choice.encode() for choice in choices}
    assert len({len(ids) for ids in matchers.states}) > 3  # some choices have spellings of several tokens


def test_hostile_choices_are_taken_literally(bpe):
    choices = (
        "a/b|c",
        ".*",
        "\\",
        '"',
        "\x00\n",
        "😀",
        "[a]",
        "{1}",
        "  ",
        "start: /x/",
        "%llguidance {}",
        "$^",
        "\u2028",
    )
    vocabulary = Vocabulary.of(bpe)
    matchers = Matchers(Constraint(vocabulary, "choices", choices))
    for text in (*choices, "a", "aa", "\\x", "x"):
        ids = tuple(vocabulary.tokens.greedy_tokenize(text))
        assert matchers.accepts(ids) == (text in choices)


def test_a_dead_prefix_has_an_empty_mask(letters):
    """The engine knows bytes: that no token writes z shows only after the a."""
    matchers = Matchers(Constraint(letters, "regex", "az|c"))
    assert allowed(matchers, []) == [0, 2]
    assert allowed(matchers, [0]) == [] and not matchers.accepts((0,)) and matchers.forced((0,), 5) == []
    assert not matchers.closes((0,), 5) and matchers.closes((2,), 0)
    assert allowed(matchers, [3]) == [] and not matchers.accepts((3,))  # not a prefix of the form


def test_only_a_single_bit_is_forced(letters, bpe):
    matchers = Matchers(Constraint(letters, "regex", "abc(d|e)fg"))
    assert matchers.forced((), 9) == [0, 1, 2] and matchers.forced((), 2) == [0, 1]
    assert matchers.forced((0, 1, 2, 3), 9) == [5, 6, 10] and matchers.forced((0, 1, 2, 3, 5, 6), 0) == []
    spelled = Matchers(Constraint(Vocabulary.of(bpe), "choices", ["true"]))
    assert spelled.forced((), 9) == []  # "true" has several spellings, although its bytes are forced
    whole = tuple(Vocabulary.of(bpe).tokens.greedy_tokenize("true"))
    assert spelled.forced(whole, 9) == list(bpe.eos_ids)


def test_all_ends_are_allowed_and_the_first_is_forced():
    model = FakeModel()
    model.eos_ids = (9, 7)
    matchers = Matchers(Constraint(Vocabulary.of(model), "regex", "ab?"))
    assert allowed(matchers, [0]) == [1, 7, 9] and matchers.forced((0,), 4) == []
    assert matchers.forced((0, 1), 4) == [7]


@pytest.mark.parametrize(("regex", "counts"), [("[a-h]*fedcba[a-h]*", (6, 4)), ("[a-h]*cafe[a-h]*", (4, 2))])
def test_a_text_that_must_occur_somewhere_can_be_completed(letters, regex, counts):
    """From the start, and from a prefix: by the characters of the pattern, one after the other."""
    matchers = Matchers(Constraint(letters, "regex", regex))
    prefixes = [(), tuple(ord(letter) - 97 for letter in regex.replace("[a-h]*", "")[:2])]
    assert [matchers.closing(prefix) for prefix in prefixes] == list(counts)


@pytest.mark.parametrize(
    ("name", "form", "text", "most"),
    [
        ("countdown", "[1-9][0-9]*[-+*/][1-9][0-9]*=[0-9]+(,[1-9][0-9]*[-+*/][1-9][0-9]*=[0-9]+){2}", "86-3", 15),
        ("countdown", "([1-9][0-9]*-){4}[0-9]+=[0-9]+", "", 12),
    ],
)
def test_a_closing_probe_ends_numbers(name, form, text, most):
    """The shortest completions: =1 and two more equations of five letters and a comma; 1-1-1-1-1=1."""
    model = d5p4.load(name)
    matchers = Matchers(Constraint(Vocabulary.of(model), "regex", form))
    assert matchers.closing(tuple(model.tokenizer.encode(text))) <= most


def test_closing_knows_the_room(letters, bpe):
    matchers = Matchers(Constraint(letters, "regex", "a(dcb)*b{5}"))
    assert [matchers.closes((0,), room) for room in (0, 4, 5, 64)] == [False, False, True, True]
    assert [matchers.closes((0, 3), room) for room in (6, 7)] == [False, True]
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["age"],
    }
    vocabulary = Vocabulary.of(bpe)
    matchers = Matchers(Constraint(vocabulary, "json_schema", schema))
    for text in ("", '{"', '{"name', '{"name":"A', '{"name":"Ann"', '{"age":-', '{"age":0,"other":[[1,{"a":"'):
        prefix = tuple(vocabulary.tokens.greedy_tokenize(text))
        assert 0 < matchers.closing(prefix, 64) < 24


def test_forgotten_matchers_are_made_again(bpe):
    """A table that holds three matchers gives the masks of one that holds all."""
    schema = {"type": "array", "items": {"type": "string"}}
    made = Constraint(Vocabulary.of(bpe), "json_schema", schema)
    small, large, generator = Matchers(made, most=3), Matchers(made), random.Random(0)
    rows = [()] * 5
    for _ in range(30):
        for n, row in enumerate(rows):
            options = [i for i in allowed(large, row) if i not in bpe.eos_ids]
            rows[n] = (*row, generator.choice(options)) if options else row
        assert small.masks(rows).equal(large.masks(rows)) and len(small.states) <= 3
    assert len(small.states) == 3 < len(large.states)


def test_too_many_states_are_an_error_that_no_other_row_causes(letters, monkeypatch):
    """The automaton is shared by the copies of a matcher. When it is full, a row gets an automaton of its own."""
    form, generator = "(.{0,9}a.{0,9}|.{3,9}b){3,9}c", random.Random(0)
    monkeypatch.setattr(constraint, "MOST_STATES", 120)
    matchers = Matchers(Constraint(letters, "regex", form))
    rows = [tuple(generator.randrange(10) for _ in range(7)) for _ in range(60)]
    shared = matchers.constraint.matcher()
    copies = [shared.deep_copy() for _ in rows]
    for copy, row in zip(copies, rows, strict=True):
        copy.consume_tokens(list(row))
        copy.compute_bitmask()
    assert sum(copy.is_error() for copy in copies) > 20
    alone = [Matchers(matchers.constraint).words(row) for row in rows]
    assert np.array_equal([matchers.words(row) for row in rows], alone) and np.all(alone)
    monkeypatch.setattr(constraint, "MOST_STATES", 20)
    with pytest.raises(d5p4.D5P4Error, match="too complex"):
        Matchers(matchers.constraint).words((0, 1) * 20)


REFUSED = [
    ("regex", "(a", "unclosed group"),
    ("regex", "(?=a)b", "look-around"),
    ("regex", "a\\", "backslash"),
    ("regex", "\ud800", "surrogate"),
    ("grammar", 'start: %json {"type": "integer", "multipleOf": 1000003}', "multipleOf"),
    ("regex", "a{100000}", "no end"),
    ("regex", "é", "matches no text"),
    ("regex", "a" * 300_000, "characters"),
    ("grammar", "", "no start rule"),
    ("grammar", "start: foo", "foo"),
    ("grammar", 'start: "a" start', "no end"),
    ("grammar", 'start: start "a"', "matches no text"),
    ("grammar", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(20_000)), "rules"),
    ("grammar", "start: " + "(" * 50_000, "nested"),
    ("choices", ["x"], "matches no text"),
    ("json_schema", "{", "not JSON"),
    ("json_schema", "[]", "object"),
    ("json_schema", {1, 2}, "set"),
    ("json_schema", {"type": "strin"}, "strin"),
    ("json_schema", {"enum": []}, "[Uu]nsatisfiable"),
    ("json_schema", {"type": "integer", "minimum": 5, "maximum": 1}, "minimum"),
    ("json_schema", {"$ref": "#/$defs/none"}, "none"),
    ("json_schema", {"$ref": "http://example.com/x"}, "http"),
    ("json_schema", {"$ref": "#"}, "matches no text"),
    ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
    ("json_schema", {"type": "integer", "multipleOf": 1_000_003}, "multipleOf"),
    ("json_schema", {"allOf": [{"type": "integer", "multipleOf": n} for n in (1009, 1013)]}, "multipleOf"),
    ("json_schema", '{"items":' * 100_000 + "{}" + "}" * 100_000, "nested"),
    (
        "json_schema",
        {"allOf": [{"anyOf": [{"$ref": f"#/{i}"}, {"$ref": f"#/{j}"}]} for i in "ab" for j in range(250)]},
        "ref",
    ),
]


@pytest.mark.parametrize(("option", "form", "reason"), REFUSED, ids=[f"{o}-{str(f)[:20]!r}" for o, f, _ in REFUSED])
def test_bad_forms_are_refused_in_one_sentence(letters, option, form, reason):
    with pytest.raises(d5p4.D5P4Error, match=reason) as raised:
        Constraint(letters, option, form)
    assert raised.value.option == option and "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_a_model_without_texts_or_ends_is_refused():
    model = FakeModel()
    model.tokenizer = None
    with pytest.raises(d5p4.D5P4Error, match="a tokenizer"):
        Vocabulary(model)
    model = FakeModel()
    model.eos_ids = ()
    with pytest.raises(d5p4.D5P4Error, match="end-of-text"):
        Vocabulary(model)

    class Words:
        def decode(self, ids):
            return " ".join("ab"[i % 2] for i in ids)

    model = FakeModel()
    model.tokenizer = Words()
    with pytest.raises(d5p4.D5P4Error, match="neighbours"):
        Vocabulary(model)


@pytest.mark.parametrize("name", ["countdown", "programs"])
def test_models_in_the_box_have_a_vocabulary(name):
    model = d5p4.load(name)
    form = {"countdown": "[0-9]+[+*/-][0-9]+=[0-9]+", "programs": "(sort|take [123])( (sort|take [123]))*"}[name]
    matchers = Matchers(Constraint(Vocabulary.of(model), "regex", form))
    answer = {"countdown": "12*3=36", "programs": "sort take 2 sort"}[name]
    ids = model.tokenizer.encode(answer)
    for n in range(len(ids)):
        assert ids[n] in allowed(matchers, ids[:n])
    assert model.eos_ids[0] in allowed(matchers, ids)


EQUAL = [
    ("1", "1.0"), ("1e2", "100"), ("-0", "0"), ("0.10", "1E-1"), ('{"a":1,"b":[2]}', '{ "b": [2.0], "a": 1 }'),
    ('"A"', '"\\u0041"'), ("[true, null]", "[true,null]"), 
]  # fmt: skip
UNEQUAL = [
    ("1", "true"), ("0", "false"), ("1", '"1"'), ("null", '"null"'), ("[1,2]", "[2,1]"), ("1e0", '"1e0"'),
    ("{", "{ "), ("NaN", "nan"), ("[]", "{}"), ("-1", "1"),
]  # fmt: skip


def test_equal_values_have_equal_texts():
    assert all(canonical(one) == canonical(other) for one, other in EQUAL)
    assert all(canonical(one) != canonical(other) for one, other in UNEQUAL)
    assert canonical("[" * 100_000) == "[" * 100_000  # no JSON: as it is


# ---- random schemas


def random_schema(pick, depth=0):
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    kind = pick.choice(kinds if depth > 2 else [*kinds, *["array", "object", "object", "anyOf"] * 2])
    if kind == "string":
        if pick.random() < 0.3:
            return {
                "type": kind,
                "pattern": pick.choice(["^[a-z]{2,4}$", "^(red|blue)+$", "[0-9]", "^\\d{3}-\\d{2}$", "^$|x"]),
            }
        low = pick.randrange(4)
        return {"type": kind} | pick.choice(
            [{}, {"minLength": low}, {"maxLength": low}, {"minLength": low, "maxLength": low + 2}]
        )
    if kind in ("integer", "number"):
        low = pick.randrange(-200, 200) / (1 if kind == "integer" else 4)
        low = int(low) if kind == "integer" else low
        least, most = pick.choice(["minimum", "exclusiveMinimum"]), pick.choice(["maximum", "exclusiveMaximum"])
        bounds = pick.choice([{}, {least: low}, {most: low}, {least: low, most: low + pick.choice([2, 50, 1000])}])
        return (
            {"type": kind}
            | bounds
            | ({"multipleOf": pick.choice([2, 5, 7])} if kind == "integer" and pick.random() < 0.2 else {})
        )
    values = [None, True, 0, -3, 2.5, "", "red", 'a"b\\c', "é", [1, "x"], {"a": None}]
    if kind == "enum":
        return {"enum": pick.sample(values, pick.randrange(1, 4))}
    if kind == "const":
        return {"const": pick.choice(values)}
    if kind == "array":
        low = pick.randrange(3)
        bounds = pick.choice([{}, {"minItems": low}, {"maxItems": low}, {"minItems": low, "maxItems": low + 1}])
        first = {"prefixItems": [random_schema(pick, depth + 1)]} if pick.random() < 0.2 else {}
        return {"type": kind, "items": random_schema(pick, depth + 1)} | bounds | first
    if kind == "object":
        names = pick.sample(["a", "name", "tags", "x y", 'q"', "é"], pick.randrange(4))
        more = pick.choice(
            [{}, {"additionalProperties": False}, {"additionalProperties": random_schema(pick, depth + 1)}]
        )
        properties = {name: random_schema(pick, depth + 1) for name in names}
        return {"type": kind, "properties": properties, "required": [n for n in names if pick.random() < 0.5]} | more
    if kind == "anyOf":
        return {kind: [random_schema(pick, depth + 1) for _ in range(2)]}
    return {"type": kind}


def walk(matchers, pick, room):
    """Return a text that follows the masks at random, and whether it is whole. Children that cannot end are dropped."""
    vocabulary, prefix = matchers.constraint.vocabulary, ()
    while len(prefix) < room:
        run = matchers.forced(prefix, room - len(prefix))
        if not run:
            bits = np.unpackbits(matchers.words(prefix).view(np.uint8), bitorder="little")
            tokens = np.flatnonzero(bits).tolist()
            ends = [i for i in tokens if i in vocabulary.ends]
            if ends and pick.random() < 0.3:
                tokens = ends
            pick.shuffle(tokens)
            left = room - len(prefix) - 1
            usable = (i for i in tokens if i in vocabulary.ends or matchers.closes((*prefix, i), left))
            run = [next(usable, None)]
        if run[0] is None:
            break
        if run[-1] in vocabulary.ends:
            prefix += tuple(run[:-1])
            break
        prefix += tuple(run)
    return vocabulary.tokens.decode_bytes(list(prefix)), matchers.accepts(prefix)


def check_random_schemas(model, seeds, room=64):
    counts = {"finished": 0, "unfinished": 0, "refused": 0}
    for seed in seeds:
        pick = random.Random(seed)
        schema = random_schema(pick)
        jsonschema.Draft202012Validator.check_schema(schema)
        try:
            matchers = Matchers(Constraint(Vocabulary.of(model), "json_schema", schema))
        except d5p4.D5P4Error:
            counts["refused"] += 1
            continue
        text, whole = walk(matchers, pick, room)
        counts["finished" if whole else "unfinished"] += 1
        if whole:
            value = json.loads(text.decode())
            reason = next(jsonschema.Draft202012Validator(schema).iter_errors(value), None)
            assert reason is None, (seed, schema, text, reason.message)
    return counts


def test_random_schemas_give_valid_values(bpe):
    counts = check_random_schemas(bpe, range(150))
    assert counts["finished"] > 100, counts


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ten_thousand_random_schemas_give_valid_values(bpe, capsys):
    counts = check_random_schemas(bpe, range(10_000))
    with capsys.disabled():
        print(f"\nrandom schemas: {counts}")
    assert counts["finished"] > 9_000, counts
