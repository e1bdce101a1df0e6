"""Tasks from small files in every layout they come in; the real files are not needed."""

import csv
import gzip
import json
import lzma
import re

import pytest

from d5p4.eval.countdown import Problem
from d5p4.eval.graders import GRADERS
from d5p4_lab.paper.tasks import continuation, load_task, read_documents
from d5p4_lab.train import corpus
from tests.refusals import refusal

GSM8K = [
    {"question": f"What is {i} plus {{1}}?", "answer": f"{i}+1=<<{i}+1={i + 1}>>\n#### {i + 1}"} for i in range(30)
]
TRUTHFUL = [
    {
        **{"Type": "Adversarial", "Category": "Myths", "Question": "Do seeds grow?", "Best Answer": "No, they pass"},
        **{"Correct Answers": 'They pass; No, they pass;  ;Nothing, "really"', "Incorrect Answers": "Yes; Often"},
        "Source": "x",
    },
    {
        **{"Type": "Adversarial", "Category": "Law", "Question": "Is it so?\nReally?", "Best Answer": "It is not"},
        **{"Correct Answers": "It is not", "Incorrect Answers": "It is", "Source": ""},
    },
]
TRUTHFUL_REFERENCES = [("No, they pass", "They pass", 'Nothing, "really"'), ("It is not",)]
ARC = [("q1", "Which is red?", {"A": "grass", "B": "blood"}, "B"), ("q2", "Which is 2?", {"1": "one", "2": "two"}, "2")]
AI2 = [
    {"id": i, "question": {"stem": q, "choices": [{"label": a, "text": t} for a, t in c.items()]}, "answerKey": k}
    for i, q, c, k in ARC
]
HUB_CHOICES = [
    {"id": i, "question": q, "choices": {"label": list(c), "text": list(c.values())}, "answerKey": k}
    for i, q, c, k in ARC
]


def write_jsonl(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    openers = {".xz": lzma.open, ".gz": gzip.open}
    with openers.get(path.suffix, open)(path, "wt", encoding="utf-8") as file:
        file.write(text)
    return path


def write_csv(path, records):
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)
    return path


def write_parquet(path, records):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


@pytest.fixture
def gsm8k(tmp_path):
    return write_jsonl(tmp_path / "gsm8k" / "test.jsonl", GSM8K)


# ---- questions


def test_gsm8k(gsm8k):
    task = load_task("gsm8k", gsm8k)
    assert (task.name, task.grader, task.source, len(task)) == ("gsm8k", "gsm8k", str(gsm8k), 30)
    example = task.examples[3]
    assert example.prompt == "Question: What is 3 plus {1}?\nAnswer:"
    assert example.references == (example.gold,) == ("3+1=<<3+1=4>>\n#### 4",)
    assert [e.id for e in task.examples] == [str(i) for i in range(30)]
    assert GRADERS["gsm8k"].grade("", ["so 4.0."], example.gold) == [True]


def test_truthfulqa_has_the_best_answer_first_and_each_once(tmp_path):
    task = load_task("truthfulqa", write_csv(tmp_path / "TruthfulQA_v1_817.csv", TRUTHFUL))
    assert [e.prompt for e in task.examples] == ["Do seeds grow?", "Is it so?\nReally?"]
    assert [e.references for e in task.examples] == TRUTHFUL_REFERENCES
    assert task.grader is None
    meta = {"type": "Adversarial", "category": "Myths", "source": "x", "incorrect": ["Yes", "Often"]}
    assert task.examples[0].meta == meta


@pytest.mark.parametrize(
    ("name", "records"), [("arc-challenge", AI2), ("commonsenseqa", HUB_CHOICES)], ids=["ai2", "hub"]
)
def test_right_choices_are_references_in_both_layouts(tmp_path, name, records):
    task = load_task(name, write_jsonl(tmp_path / "any.jsonl", records))
    assert [(e.id, e.prompt, e.references, e.gold) for e in task.examples] == [
        ("q1", "Which is red?", ("blood",), ("blood",)),
        ("q2", "Which is 2?", ("two",), ("two",)),
    ]
    assert task.examples[0].meta["choices"] == {"A": "grass", "B": "blood"}
    assert GRADERS[task.grader].grade("", [" Blood\n"], task.examples[0].gold) == [True]


# ---- limits, seeds, shots


def test_a_limit_takes_the_beginning_of_a_seeded_shuffle(gsm8k):
    whole = load_task("gsm8k", gsm8k).examples
    ids = {seed: [e.id for e in load_task("gsm8k", gsm8k, limit=30, seed=seed).examples] for seed in range(3)}
    assert len({tuple(order) for order in ids.values()}) == 3
    for seed, order in ids.items():
        assert sorted(order, key=int) == [e.id for e in whole] != order
        first = load_task("gsm8k", gsm8k, limit=8, seed=seed).examples
        assert [e.id for e in first] == order[:8]
        assert first == [whole[int(i)] for i in order[:8]]
    assert len(load_task("gsm8k", gsm8k, limit=1000)) == 30


def blocks(prompt):
    return [tuple(part.removeprefix("Question: ").split("\nAnswer:", 1)) for part in prompt.split("\n\nQuestion: ")]


def test_shots_are_solved_examples_and_never_the_question_itself(gsm8k):
    known = {r["question"]: f" {r['answer']}" for r in GSM8K}
    for seed in (0, 1):
        for example, record in zip(load_task("gsm8k", gsm8k, shots=5, seed=seed).examples, GSM8K, strict=True):
            *shown, asked = blocks(example.prompt)
            assert asked == (record["question"], "")
            assert len(shown) == len(set(shown)) == 5
            assert all(known[question] == answer and question != asked[0] for question, answer in shown)
    few = load_task("gsm8k", gsm8k, shots=2, limit=4).examples
    whole = {e.id: e for e in load_task("gsm8k", gsm8k, shots=2).examples}
    assert all(whole[e.id] == e for e in few)
    assert whole != {e.id: e for e in load_task("gsm8k", gsm8k, shots=2, seed=1).examples}


# ---- what is refused


BAD_RECORDS = [
    ("gsm8k", [], "no question"),
    ("gsm8k", [{"question": "q"}], "record 1 has no field 'answer'; its fields are question"),
    ("gsm8k", [GSM8K[0], {"question": "q", "answer": 3}], "record 2 cannot be read: .*not text"),
    ("gsm8k", [{"question": " ", "answer": "#### 1"}], "empty"),
    ("gsm8k", [{"question": "\ud800", "answer": "#### 1"}], "surrogates"),
    ("gsm8k", [[1]], "line 1 is not a JSON object"),
    ("arc-challenge", [{**AI2[0], "answerKey": "E"}], "answerKey is 'E', but the choices are A, B"),
    ("arc-challenge", [{**HUB_CHOICES[0], "choices": {"label": ["A"], "text": []}}], "cannot be read"),
    ("commonsenseqa", [{"id": "x", "question": {"stem": "q"}}], "no field 'choices'"),
    ("truthfulqa", [{"question": "q"}], "no field 'best_answer'"),
    ("truthfulqa", [{"question": "q", "best_answer": "", "correct_answers": []}], "empty"),
]


def test_records_laid_out_otherwise_are_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    for name, records, named in BAD_RECORDS:
        path.write_text("\n".join(map(json.dumps, records)))
        assert re.search(named, refusal(load_task, name, path)), records


BAD_ARGUMENTS = [
    (lambda path: load_task("squad"), "'squad': choose one of truthfulqa, arc-challenge"),
    (lambda path: load_task("gsm8k", path, limit=0), "limit=0"),
    (lambda path: load_task("gsm8k", path, limit=2.5), "limit=2.5"),
    (lambda path: load_task("gsm8k", path, shots=-1), "shots=-1"),
    (lambda path: load_task("gsm8k", path, seed=True), "seed=True"),
    (lambda path: load_task("gsm8k", path.parent / "none.jsonl"), "none.jsonl' does not exist"),
    (lambda path: load_task("gsm8k", "none/test.jsonl"), "'none/test.jsonl' does not exist"),
    (lambda path: load_task("gsm8k", path.parent.parent / "empty"), "does not exist"),
    (lambda path: load_task("countdown", path), "leave out the path"),
    (lambda path: load_task("countdown", split="6"), "split='6'"),
    (lambda path: load_task("countdown", shots=2), "countdown has no solved examples"),
    (lambda path: load_task("books"), "books needs the path"),
    (lambda path: load_task("books", path), "record 1 has no text in its field 'text'"),
]


def test_bad_arguments_are_named(gsm8k):
    for call, named in BAD_ARGUMENTS:
        assert named in refusal(call, gsm8k)


# ---- countdown


def test_countdown_is_held_out_and_needs_no_file():
    task = load_task("countdown", limit=50)
    assert (task.grader, len(task)) == ("countdown", 50)
    puzzles = [Problem.parse(e.prompt) for e in task.examples]
    assert all(p.heldout and len(p.numbers) == 4 for p in puzzles)
    assert all(e.id == e.prompt == e.gold and e.references == () for e in task.examples)
    assert load_task("countdown", limit=20).examples == task.examples[:20]
    assert load_task("countdown", limit=20, seed=1).examples != task.examples[:20]
    assert {len(Problem.parse(e.prompt).numbers) for e in load_task("countdown", limit=5, split="3").examples} == {3}
    assert len({e.id for e in load_task("countdown").examples}) == 500


# ---- prose


def paragraph(first, rest, start="He"):
    return " ".join([start, *["saw"] * (first - 2), "it.", "Then", *["went"] * (rest - 2), "home."])


PARAGRAPHS = [
    (paragraph(10, 50), True),
    (paragraph(10, 49), False),  # 59 words
    (paragraph(10, 190), True),
    (paragraph(10, 191), False),  # 201 words
    (paragraph(8, 60), True),
    (paragraph(40, 60), True),
    (paragraph(41, 60), False),  # a beginning of 41 words
    (paragraph(40, 30), True),
    (paragraph(40, 29), False),  # leaves 29
    ("Go. Go. " + paragraph(10, 60), False),  # two sentences of one word
    (" ".join(["word"] * 80), False),
    ("", False),
]


def test_paragraphs_that_do_not_lend_themselves():
    for text, fits in PARAGRAPHS:
        assert (continuation(text) is not None) == fits, text


BOOKS = [[paragraph(10, 55 + i, name) for i in range(count)] for name, count in (("Ann", 30), ("Bob", 5), ("Cid", 12))]
TEXT = f"\n{corpus.END_TEXT}\n".join("CHAPTER I\n" + "\n".join(book) for book in BOOKS)


@pytest.fixture
def val(tmp_path):
    path = tmp_path / "books" / "val.txt.xz"
    path.parent.mkdir()
    path.write_bytes(lzma.compress(TEXT.encode()))
    (path.parent / "train.txt").write_text("no")
    return path


def test_books_give_beginnings_and_continuations(val):
    task = load_task("books", val)
    assert (task.grader, len(task)) == (None, 47)
    for example in task.examples:
        book, line = example.meta["book"], example.meta["paragraph"]
        assert f"{example.prompt} {example.references[0]}" == BOOKS[book][line - 1]  # line 0 is the heading
        assert example.id == f"{book}.{line}"
    assert len({e.id for e in task.examples}) == 47
    assert load_task("books", val.parent).examples == task.examples
    assert load_task("books", val).examples == task.examples


def test_books_and_text_come_in_every_kind_of_file(tmp_path, val):
    texts, raw = TEXT.split(corpus.END_TEXT), TEXT.replace("\n", "\r\n").encode("utf-8-sig")
    (tmp_path / "val.txt").write_bytes(raw)
    (tmp_path / "val.txt.gz").write_bytes(gzip.compress(raw))
    write_jsonl(tmp_path / "val.jsonl", [{"text": text, "url": "x"} for text in texts])
    write_parquet(tmp_path / "val.parquet", [{"text": text, "url": "x"} for text in texts])
    books, documents = load_task("books", val).examples, ["CHAPTER I\n" + "\n".join(book) for book in BOOKS]
    for name in ("val.txt", "val.txt.gz", "val.jsonl", "val.parquet"):
        assert load_task("books", tmp_path / name).examples == books, name
        assert read_documents(tmp_path / name) == documents, name


def test_a_prepared_corpus_gives_its_held_out_books(tmp_path, val):
    """Not the one that is in the training text too."""
    alien = "\n".join(" ".join(f"W{i}x{j}" for j in range(40)) + "." for i in range(20))
    leaked = "\n".join(BOOKS[1])
    (val.parent / "train.txt").write_text(alien + f"\n{corpus.END_TEXT}\n" + leaked)
    held_out = ["\n".join(book) for book in (BOOKS[0], BOOKS[2])]
    unlike = [
        text.replace("saw", f"{name} found").replace("went", "ran") for text, name in zip(held_out, "pq", strict=True)
    ]
    val.unlink()
    (val.parent / "val.txt").write_text(f"\n{corpus.END_TEXT}\n".join([unlike[0], leaked, unlike[1]]))
    assert corpus.prepare(val.parent, tmp_path / "made", vocabulary=300).left_out == 1
    task = load_task("books", tmp_path / "made")
    assert {e.meta["book"] for e in task.examples} == {0, 1}
    for example in task.examples:
        line = unlike[example.meta["book"]].split("\n")[example.meta["paragraph"]]
        assert f"{example.prompt} {example.references[0]}" == line
