"""Files of grouped answers, as their makers write them."""

import json
import re

import pytest

from d5p4.eval.groups import LISTS, SINGLES, Group, read_groups
from tests.refusals import refusal


@pytest.fixture
def file(tmp_path):
    def write(*entries):
        path = tmp_path / "answers.jsonl"
        lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
        path.write_text("\n".join(lines), encoding="utf-8")
        return path

    return write


TALK = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
ALONE = [{"prompt": "p", "text": "a"}, {"prompt": "q", "text": "b"}, {"prompt": "p", "text": "c", "reference": 4}]
CHAT = {"id": "c-1", "choices": [{"message": {"content": "a"}}, {"message": {"content": None, "refusal": "no"}}]}
PARTS = {"id": "c-2", "choices": [{"message": {"content": [{"type": "text", "text": "b"}, {"text": "c"}]}}]}
PLAIN = {"prompt": "p", "choices": [{"text": "d", "index": 0}, {"text": "e", "index": 1}]}
FILES = [  # the lines of a file, and its groups
    (
        [{"id": 7, "prompt": "two?", "answers": ["a", "b"], "reference": "b", "seed": 3}, "", {"answers": ["c"]}],
        [Group("two?", ("a", "b"), ("b",), 7), Group(None, ("c",))],
    ),
    *(
        ([{"question": "q", name: ["a", "b"], "correct_answers": ["x", "y"]}], [Group("q", ("a", "b"), ("x", "y"))])
        for name in LISTS
    ),
    (
        [{"messages": TALK, "answers": ["a"]}, {"prompt": TALK, "answers": ["b"]}],
        [Group("hi", ("a",)), Group("hi", ("b",))],
    ),
    *(
        (
            [{"id": i % 2, name: f"{i}", "target": "t", "place": i} for i in range(4)],
            [Group(None, ("0", "2"), ("t",), 0), Group(None, ("1", "3"), ("t",), 1)],
        )
        for name in SINGLES
    ),
    (ALONE, [Group("p", ("a", "c"), ("4",)), Group("q", ("b",))]),
    (  # ids of answers, not of prompts
        [{"id": i, **line} for i, line in enumerate(ALONE)],
        [Group("p", ("a", "c"), ("4",), 0), Group("q", ("b",), (), 1)],
    ),
    ([{"task_id": "x", "completions": text} for text in "ab"], [Group(None, ("a", "b"), (), "x")]),
    ([CHAT, PARTS], [Group(None, ("a", ""), (), "c-1"), Group(None, ("bc",), (), "c-2")]),
    ([{"custom_id": "q4", "response": {"status_code": 200, "body": CHAT}}], [Group(None, ("a", ""), (), "q4")]),
    (['[{"answers": ["a"]},\n {"answers": ["b", "c"]}]'], [Group(None, ("a",)), Group(None, ("b", "c"))]),
    ([["a cat", "a dog"], ["x"]], [Group(None, ("a cat", "a dog")), Group(None, ("x",))]),
    ([["a cat", "a dog"]], [Group(None, ("a cat", "a dog"))]),
    ([json.dumps(PLAIN, indent=1)], [Group("p", ("d", "e"))]),
    (['\ufeff{"answers": ["", "\\u2028", "\\ud800x", "日本"]}'], [Group(None, ("", "\u2028", "?x", "日本"))]),
]


def test_files_of_many_programs(file):
    for lines, groups in FILES:
        assert read_groups(file(*lines)) == groups, lines


def sample(doc, answers, target, name="none", asked="Question: q"):
    """A sample of the harness before it is written."""
    arguments = [(asked, {"until": ["\n"]})]
    document = {"doc_id": doc, "doc": {"question": "q"}, "target": target, "arguments": arguments}
    return document | {"resps": [answers], "filtered_resps": answers, "filter": name, "metrics": ["exact_match"]}


def test_the_harness_own_files(tmp_path):
    """Written by the harness itself, with its two filters of GSM8K and a list of targets."""
    loggers = pytest.importorskip("lm_eval.loggers")
    tracker = loggers.EvaluationTracker(output_path=str(tmp_path))
    tracker.general_config_tracker.model_name_sanitized = "model"
    tracker.date_id = "today"
    samples = [
        sample(doc, ["a #### 1", "b #### 2"], target, name)
        for name in ("strict-match", "flexible-extract")
        for doc, target in ((0, "x #### 1"), (1, ["one", "two"]))
    ]
    tracker.save_results_samples("gsm8k", samples)
    (written,) = tmp_path.rglob("samples_*.jsonl")
    answers = ("a #### 1", "b #### 2")
    wanted = [Group("Question: q", answers, ("x #### 1",), 0), Group("Question: q", answers, ("one", "two"), 1)]
    assert read_groups(written) == wanted


def test_named_fields(file):
    """The field of the references never holds the answers."""
    path = file({"question": "q", "answer": "gold", "preds": ["a", "b"]})
    assert read_groups(path, answers="preds", references="answer") == [Group("q", ("a", "b"), ("gold",))]
    path = file({"question": "q", "answer": "gold #### 3", "response": "my answer is 4"})
    assert read_groups(path, references="answer") == [Group("q", ("my answer is 4",), ("gold #### 3",))]
    assert read_groups(path, answers="response") == [Group("q", ("my answer is 4",))]
    path = file({"question": "q", "answers": ["gold"], "outputs": ["a", "b"]})
    assert read_groups(path, references="answers") == [Group("q", ("a", "b"), ("gold",))]


HARNESS = {"doc_id": 0, "target": "0", "arguments": {"gen_args_0": {"arg_0": "q", "arg_1": " yes"}}}
BAD = [  # a bad line, options, and a part of the message
    ("{", {}, "line 2: not valid JSON"),
    ("[1]", {}, "line 2: expected an object such as"),
    ('{"answers": [3]}', {}, "line 2: 'answers' holds 3 where text is expected"),
    ('{"answers": [{"score": 1}]}', {}, "where text is expected"),
    ('{"answers": []}', {}, "line 2: the field 'answers' holds no answer"),
    ('{"prompt": "p"}', {}, "there are no answers: expected one of the fields answers, .* got prompt; .*--answers"),
    ('{"text": "a"}', {}, "line 2: this line has a single answer, but no id or prompt"),
    ('{"id": 1.5, "answers": ["a"]}', {}, "line 2: 'id' must be text or a whole number, not 1.5"),
    ('{"answers": ["a"], "reference": {"x": 1}}', {}, "line 2: 'reference' holds"),
    ('{"answer": "a", "response": "b"}', {}, "'answer' and 'response' may each be .*--answers.*--references"),
    ('{"response": {"status_code": 500, "body": {}}}', {}, r"'response' holds no choices \(status 500\)"),
    (HARNESS | {"resps": [[["-3.2", "False"]]], "filter": "none"}, {}, "line 2: 'resps' holds log-likelihoods"),
    ('{"prompt": "q"}', {"answers": "answers"}, "line 2: there is no field 'answers'; the fields are prompt"),
    ('{"prompt": "q"}', {"references": "gold"}, "line 1: there is no field 'gold'"),
    ("", {"answers": "x", "references": "x"}, "'x' cannot be both"),
]


def test_bad_lines_are_named(file):
    for line, options, expected in BAD:
        assert re.search(expected, refusal(read_groups, file({"answers": ["fine"]}, line), **options)), line


def test_bad_files_are_named(tmp_path):
    path = tmp_path / "f.jsonl"
    assert "f.jsonl cannot be read: No such file" in refusal(read_groups, path)
    assert "is a folder without .jsonl files" in refusal(read_groups, tmp_path)
    for content, expected in ((b'{"answers": ["\xff"]}', "not UTF-8 text: byte 14"), (b"\n \n", "every line is blank")):
        path.write_bytes(content)
        assert expected in refusal(read_groups, path)


def test_lines_with_an_error_are_skipped_and_counted(file):
    """Of d5p4 run (whose input may have had an `answer`, a `response` or `resps`), and of a batch file of OpenAI."""
    ours = {"prompt": "q", "answer": "gold", "response": {"status_code": 200}, "resps": [["x"]]}
    groups = read_groups(
        file(
            ours | {"line": 1, "answers": ["a", "b"]},
            ours | {"line": 2, "error": "too long", "answers": []},
            {"custom_id": "x", "response": None, "error": {"message": "failed"}},
            {"custom_id": "y", "response": {"body": {"choices": [{"text": "c"}]}}, "error": None},
            {"answers": ["d"], "error": "a warning"},
        )
    )
    assert [group.answers for group in groups] == [("a", "b"), ("c",), ("d",)] and groups.skipped == 2
    message = refusal(read_groups, file({"line": 1, "error": "too long", "answers": []}))
    assert re.search("all 1 lines are errors, the first is .*line 1: .*too long", message)


def test_the_parts_of_a_run_are_read_as_one(tmp_path):
    folder = tmp_path / "a.jsonl.parts"
    folder.mkdir()
    (folder / "part-0001-0000.jsonl").write_text('{"line": 1, "prompt": "a", "answers": ["x", "y"]}\n')
    (folder / "part-0001-0001.jsonl").write_text('{"line": 2, "prompt": "b", "answers": ["z"]}\n{"line": 3, "ans')
    (folder / "lock").touch()
    assert [group.answers for group in read_groups(folder)] == [("x", "y"), ("z",)]
