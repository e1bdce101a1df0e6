"""The benchmark of public models, on tiny checkpoints in their layouts."""

import json

import pytest

from d5p4_lab.bench import public
from tests.checkpoints import write_llada, write_sdar
from tests.lab.paper.smoke import write_gsm8k

PROMPT = "import math\n\ndef add(a, b):\n    "
TEST = "def check(f):\n    assert f(1, 2) == 3"


def test_programs_of_answers():
    whole = f"Here:\n```python\n{PROMPT}return a + b\n```\nDone."
    for text, right in ((whole, True), ("return a + b", True), ("```\nreturn a - b```", False), ("", False)):
        example = public.Example("0", PROMPT, (), (PROMPT, TEST, "add"))
        assert public.graded("humaneval", example, [text]) == [right], text


@pytest.mark.full
def test_two_models_and_two_tasks(tmp_path, capsys):
    models = [
        write_llada(tmp_path / "llada", chat=True, max_sequence_length=512),
        write_sdar(tmp_path / "sdar", chat=True, max_position_embeddings=512),
    ]
    (tmp_path / "data/gsm8k").mkdir(parents=True)
    (tmp_path / "data/humaneval").mkdir()
    write_gsm8k(tmp_path / "data/gsm8k/test.jsonl")
    record = {"prompt": PROMPT, "canonical_solution": "return a + b", "test": TEST, "entry_point": "add"}
    lines = [json.dumps(record | {"task_id": str(i)}) for i in range(3)]
    (tmp_path / "data/humaneval/test.jsonl").write_text("\n".join(lines), encoding="utf-8")
    options = ["--models", ",".join(map(str, models)), "--data", tmp_path / "data", "--questions", "3", "--batch", "2"]
    options += ["--gen-length", "8", "--device", "cpu", "--dtype", "float32", "--out", tmp_path / "out"]
    public.main(list(map(str, options)))
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]
    assert len(table) == 2 * 2 * 4 and all(line.split(" | ")[3] == "3" for line in table)
    stored = (tmp_path / "out/answers.jsonl").read_bytes()
    public.main(list(map(str, options)))  # nothing is missing
    assert (tmp_path / "out/answers.jsonl").read_bytes() == stored
