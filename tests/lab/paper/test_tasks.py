"""Tasks from small files in every layout they come in; the real files are not needed."""

import gzip
import json
import lzma
import re

import pytest

from d5p4.eval.countdown import Problem
from d5p4.eval.graders import GRADERS
from d5p4_lab.paper.tasks import continuation, load_task, read_documents
from d5p4_lab.puzzles import is_heldout
from d5p4_lab.train import corpus
from tests.refusals import refusal

GSM8K = [{"question": f"What is {i} plus {{1}}?", "answer": f"{i}+1=<<{i}+1={i + 1}>>\n#### {i + 1}"} for i in range(9)]
TRUTHFUL = [
    {"question": "Do seeds grow?", "best_answer": "No, they pass", "correct_answers": ["They pass", "No, they pass"]},
    {"question": "Is it so?\nReally?", "best_answer": "It is not", "correct_answers": [" "]},
]
CHOICES = [
    {"id": "q1", "question": "Which is red?", "choices": {"label": ["A", "B"], "text": ["grass", "blood"]}},
    {"id": "q2", "question": "Which is 2?", "choices": {"label": ["1", "2"], "text": ["one", "two"]}},
]
CHOICES = [record | {"answerKey": record["choices"]["label"][1]} for record in CHOICES]
AI2 = [
    {
        "id": record["id"],
        "answerKey": record["answerKey"],
        "question": {
            "stem": record["question"],
            "choices": [{"label": a, "text": b} for a, b in zip(*record["choices"].values(), strict=True)],
        },
    }
    for record in CHOICES
]


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def gsm8k(tmp_path):
    return write_jsonl(tmp_path / "test.jsonl", GSM8K)


def test_questions_of_every_layout(tmp_path, gsm8k):
    task = load_task("gsm8k", gsm8k)
    example = task.examples[3]
    assert (len(task), [e.id for e in task.examples]) == (9, [str(i) for i in range(9)])
    assert example.prompt == "Question: What is 3 plus {1}?\nAnswer:"
    assert example.references == (example.gold,) == ("3+1=<<3+1=4>>\n#### 4",)
    assert GRADERS[task.grader].grade("", ["so 4.0."], example.gold) == [True]
    task = load_task("truthfulqa", write_jsonl(tmp_path / "validation.jsonl", TRUTHFUL))
    wanted = [("Do seeds grow?", ("No, they pass", "They pass")), ("Is it so?\nReally?", ("It is not",))]
    assert [(e.prompt, e.references) for e in task.examples] == wanted and task.grader is None
    csv = 'Question,Best Answer,Correct Answers\nDo seeds grow?,"No, they pass","They pass; No, they pass; "\n'
    (tmp_path / "authors.csv").write_text(csv, encoding="utf-8-sig")
    assert [e.references for e in load_task("truthfulqa", tmp_path / "authors.csv").examples] == [wanted[0][1]]
    for name, records in (("arc-challenge", CHOICES), ("commonsenseqa", AI2)):
        task = load_task(name, write_jsonl(tmp_path / "any.jsonl", records))
        assert [(e.id, e.prompt, e.references, e.gold) for e in task.examples] == [
            ("q1", "Which is red?", ("blood",), ("blood",)),
            ("q2", "Which is 2?", ("two",), ("two",)),
        ]
        assert GRADERS[task.grader].grade("", [" Blood\n"], task.examples[0].gold) == [True]


def test_a_limit_takes_the_beginning_of_a_seeded_shuffle(gsm8k):
    whole, order = load_task("gsm8k", gsm8k).examples, [e.id for e in load_task("gsm8k", gsm8k, limit=9).examples]
    assert sorted(order, key=int) == [e.id for e in whole] != order
    assert load_task("gsm8k", gsm8k, limit=5).examples == [whole[int(i)] for i in order[:5]]


BAD_RECORDS = [
    ("gsm8k", [], "no question"),
    ("gsm8k", [{"question": "q"}], "record 1 has no field 'answer'; its fields are question"),
    ("gsm8k", [GSM8K[0], {"question": "q", "answer": 3}], "record 2 cannot be read: .*not text"),
    ("gsm8k", [{"question": "\ud800", "answer": "#### 1"}], "surrogates"),
    ("arc-challenge", [{**CHOICES[0], "answerKey": "E"}], "answerKey is 'E', but the choices are A, B"),
    ("truthfulqa", [{"question": "q", "best_answer": "", "correct_answers": []}], "empty"),
]
BAD_ARGUMENTS = [
    (lambda path: load_task("squad"), "'squad': choose one of truthfulqa, arc-challenge"),
    (lambda path: load_task("gsm8k", path.parent / "none.jsonl"), "none.jsonl' does not exist"),
    (lambda path: load_task("countdown", path), "leave out the path"),
    (lambda path: load_task("countdown", split="6"), "split='6'"),
    (lambda path: load_task("books"), "books needs the path"),
    (lambda path: load_task("books", path), "record 1 has no text in its field 'text'"),
]


def test_bad_files_and_arguments_are_named(tmp_path, gsm8k):
    path = tmp_path / "bad.jsonl"
    for name, records, named in BAD_RECORDS:
        path.write_text("\n".join(map(json.dumps, records)))
        assert re.search(named, refusal(load_task, name, path)), records
    for call, named in BAD_ARGUMENTS:
        assert named in refusal(call, gsm8k)


def test_countdown_is_held_out_and_needs_no_file():
    task = load_task("countdown", limit=50)
    puzzles = [Problem.parse(e.prompt) for e in task.examples]
    assert task.grader == "countdown" and all(is_heldout(p) and len(p.numbers) == 4 for p in puzzles)
    assert all(e.id == e.prompt == e.gold and e.references == () for e in task.examples)
    assert load_task("countdown", limit=20).examples == task.examples[:20]
    assert {len(Problem.parse(e.prompt).numbers) for e in load_task("countdown", limit=5, split="3").examples} == {3}


def paragraph(first, rest, start="He"):
    return " ".join([start, *["saw"] * (first - 2), "it.", "Then", *["went"] * (rest - 2), "home."])


PARAGRAPHS = [
    (paragraph(10, 50), True),
    (paragraph(10, 49), False),  # 59 words
    (paragraph(10, 190), True),
    (paragraph(10, 191), False),  # 201 words
    (paragraph(40, 60), True),
    (paragraph(41, 60), False),  # a beginning of 41 words
    (paragraph(40, 30), True),
    (paragraph(40, 29), False),  # leaves 29
    ("Go. Go. " + paragraph(10, 60), False),  # two sentences of one word
    (" ".join(["word"] * 80), False),
]


def test_paragraphs_that_can_be_continued():
    for text, fits in PARAGRAPHS:
        assert (continuation(text) is not None) == fits, text


def test_books_and_text_come_in_every_kind_of_file(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    names = (("Ann", 30), ("Bob", 5), ("Cid", 12))
    books = [[paragraph(10, 55 + i, name) for i in range(count)] for name, count in names]
    documents = ["CHAPTER I\n" + "\n".join(book) for book in books]
    raw = f"\n{corpus.END_TEXT}\n".join(documents).replace("\n", "\r\n").encode("utf-8-sig")
    records = [{"text": text, "url": "x"} for text in documents]
    (tmp_path / "val.txt").write_bytes(raw)
    (tmp_path / "val.txt.gz").write_bytes(gzip.compress(raw))
    (tmp_path / "val.txt.xz").write_bytes(lzma.compress(raw))
    write_jsonl(tmp_path / "val.jsonl", records)
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "val.parquet")
    for file in sorted(tmp_path.iterdir()):
        assert read_documents(file) == documents, file
        task = load_task("books", file)
        assert len(task) == 47, file
        for example in task.examples:
            book, line = map(int, example.id.split("."))
            assert f"{example.prompt} {example.references[0]}" == books[book][line - 1]  # line 0 is the heading
