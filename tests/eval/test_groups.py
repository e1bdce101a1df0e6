"""Files of grouped answers, as their makers write them."""

import json
import re

import pytest

from d5p4.errors import D5P4Error
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


def test_lines_of_our_own(file):
    named = {"id": 7, "prompt": "two?", "answers": ["a", "b"], "reference": "b", "seed": 3}
    groups = read_groups(file(named, "", {"prompt": None, "answers": ["c"]}))
    assert groups == [Group("two?", ("a", "b"), ("b",), 7), Group(None, ("c",))]


def test_lists_by_other_names(file):
    for name in LISTS:
        (group,) = read_groups(file({"question": "q", name: ["a", "b"], "correct_answers": ["x", "y"]}))
        assert (group.prompt, group.answers, group.references) == ("q", ("a", "b"), ("x", "y")), name


def test_a_conversation_is_known_by_its_last_message(file):
    talk = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    first, second = read_groups(file({"messages": talk, "answers": ["a"]}, {"prompt": talk, "answers": ["b"]}))
    assert first.prompt == second.prompt == "hi"


def test_one_answer_a_line_by_id(file):
    for name in SINGLES:
        lines = [{"id": i % 2, name: f"{i}", "target": "t", "place": i} for i in range(4)]
        even, odd = read_groups(file(*lines))
        assert (even.answers, odd.answers) == (("0", "2"), ("1", "3")), name
        assert even.references == ("t",), name


def test_one_answer_a_line_by_prompt(file):
    lines = [{"prompt": "p", "text": "a"}, {"prompt": "q", "text": "b"}, {"prompt": "p", "text": "c", "reference": 4}]
    first, second = read_groups(file(*lines))
    assert (first.answers, first.references, second.answers) == (("a", "c"), ("4",), ("b",))
    numbered = [{"id": i, **line} for i, line in enumerate(lines)]  # ids of answers, not of prompts
    assert [group.answers for group in read_groups(file(*numbered))] == [("a", "c"), ("b",)]


def test_a_single_answer_under_a_list_name(file):
    (group,) = read_groups(file({"task_id": "x", "completions": "a"}, {"task_id": "x", "completions": "b"}))
    assert group.answers == ("a", "b") and group.id == "x"


def test_openai(file):
    chat = {"id": "c-1", "choices": [{"message": {"content": "a"}}, {"message": {"content": None, "refusal": "no"}}]}
    parts = {"id": "c-2", "choices": [{"message": {"content": [{"type": "text", "text": "b"}, {"text": "c"}]}}]}
    plain = {"id": "c-3", "choices": [{"text": "d", "index": 0}, {"text": "e", "index": 1}]}
    batch = {"id": "r-4", "custom_id": "q4", "response": {"status_code": 200, "body": chat}}
    groups = read_groups(file(chat, parts, plain, batch))
    assert [group.answers for group in groups] == [("a", ""), ("bc",), ("d", "e"), ("a", "")]
    with pytest.raises(D5P4Error, match=r"line 1: 'response' holds no choices \(status 500\)"):
        read_groups(file({"response": {"status_code": 500, "body": {"error": "x"}}}))


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
    first, second = read_groups(written)
    assert first.answers == second.answers == ("a #### 1", "b #### 2")
    assert (first.id, first.prompt, first.references) == (0, "Question: q", ("x #### 1",))
    assert second.references == ("one", "two")


def test_the_harness_without_generation(file):
    asked = {"gen_args_0": {"arg_0": "q", "arg_1": " yes"}}
    line = {"doc_id": 0, "target": "0", "arguments": asked, "resps": [[["-3.2", "False"]]], "filter": "none"}
    with pytest.raises(D5P4Error, match="line 1: 'resps' holds log-likelihoods"):
        read_groups(file(line))


def test_named_fields(file):
    path = file({"question": "q", "answer": "gold", "preds": ["a", "b"]})
    assert read_groups(path, answers="preds", references="answer") == [Group("q", ("a", "b"), ("gold",))]
    with pytest.raises(D5P4Error, match="line 1: there is no field 'pred'; the fields are question, answer, preds"):
        read_groups(path, answers="pred")
    with pytest.raises(D5P4Error, match="line 1: there is no field 'gold'"):
        read_groups(path, references="gold")


def test_the_references_are_never_the_answers(file):
    path = file({"question": "q", "answer": "gold #### 3", "response": "my answer is 4"})
    assert read_groups(path, references="answer") == [Group("q", ("my answer is 4",), ("gold #### 3",))]
    assert read_groups(path, answers="response") == [Group("q", ("my answer is 4",))]
    with pytest.raises(D5P4Error, match="line 1: 'answer' and 'response' may each be .*--answers.*--references"):
        read_groups(path)
    with pytest.raises(D5P4Error, match="'answer' cannot be both"):
        read_groups(path, answers="answer", references="answer")
    listed = file({"question": "q", "answers": ["gold"], "outputs": ["a", "b"]})
    assert read_groups(listed, references="answers") == [Group("q", ("a", "b"), ("gold",))]
    with pytest.raises(D5P4Error, match="line 1: there are no answers"):
        read_groups(file({"question": "q", "answer": "gold"}), references="answer")


def test_a_list_of_objects(file):
    path = file('[{"answers": ["a"]},\n {"answers": ["b", "c"]}]')
    assert [group.answers for group in read_groups(path)] == [("a",), ("b", "c")]
    with pytest.raises(D5P4Error, match="entry 2: the field 'answers' holds no answer"):
        read_groups(file('[{"answers": ["a"]}, {"answers": []}]'))


def test_any_text(file):
    (group,) = read_groups(file('\ufeff{"answers": ["", "\\u2028", "\\ud800x", "日本"]}'))
    assert group.answers == ("", "\u2028", "?x", "日本")


BAD_LINES = [
    ("{", "line 2: not valid JSON"),
    ("[1]", "line 2: expected an object"),
    ('{"answers": [3]}', "line 2: 'answers' holds 3 where text is expected"),
    ('{"answers": [{"score": 1}]}', "where text is expected"),
    ('{"prompt": "p"}', "line 2: there are no answers: expected one of the fields answers, .* got prompt; .*--answers"),
    ('{"text": "a"}', "line 2: this line has a single answer, but no id or prompt"),
    ('{"id": 1.5, "answers": ["a"]}', "line 2: 'id' must be text or a whole number, not 1.5"),
    ('{"answers": ["a"], "reference": {"x": 1}}', "line 2: 'reference' holds"),
]


def test_bad_lines_are_named(file):
    for line, expected in BAD_LINES:
        assert re.search(expected, refusal(read_groups, file({"answers": ["fine"]}, line))), line


def test_bad_files_are_named(tmp_path):
    path = tmp_path / "f.jsonl"
    with pytest.raises(D5P4Error, match="f.jsonl cannot be read: No such file"):
        read_groups(path)
    with pytest.raises(D5P4Error, match="is a folder without .jsonl files"):
        read_groups(tmp_path)
    path.write_bytes(b'{"answers": ["\xff"]}')
    with pytest.raises(D5P4Error, match="not UTF-8 text: byte 14"):
        read_groups(path)
    path.write_text("\n \n")
    with pytest.raises(D5P4Error, match="holds no answers: every line is blank"):
        read_groups(path)


def test_lists_of_answers_and_one_value_over_many_lines(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('["a cat", "a dog"]\n["x", "y"]\n')
    assert [group.answers for group in read_groups(file)] == [("a cat", "a dog"), ("x", "y")]
    file.write_text('["a cat", "a dog"]')
    assert [group.answers for group in read_groups(file)] == [("a cat", "a dog")]
    file.write_text(json.dumps({"prompt": "p", "choices": [{"text": "one"}, {"text": "two"}]}, indent=1))
    assert [group.answers for group in read_groups(file)] == [("one", "two")]
    file.write_text("[1, 2]\n[3]\n")
    with pytest.raises(D5P4Error, match="line 1: expected an object such as"):
        read_groups(file)


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
    with pytest.raises(D5P4Error, match="all 1 lines are errors, the first is .*line 1: .*too long"):
        read_groups(file({"line": 1, "error": "too long", "answers": []}))


def test_the_parts_of_a_run_are_read_as_one(tmp_path):
    folder = tmp_path / "a.jsonl.parts"
    folder.mkdir()
    (folder / "part-0001-0000.jsonl").write_text('{"line": 1, "prompt": "a", "answers": ["x", "y"]}\n')
    (folder / "part-0001-0001.jsonl").write_text('{"line": 2, "prompt": "b", "answers": ["z"]}\n{"line": 3, "ans')
    (folder / "lock").touch()
    assert [group.answers for group in read_groups(folder)] == [("x", "y"), ("z",)]
    with pytest.raises(D5P4Error, match="without .jsonl files"):
        read_groups(tmp_path)
