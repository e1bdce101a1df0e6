"""What a run needs is known before it begins: `--plan` prints it, and the run checks it before it decodes."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import Any

import pytest

from d5p4_lab.paper import EXPERIMENTS
from d5p4_lab.paper import answers as answers_module
from d5p4_lab.paper.drawing import Drawing
from d5p4_lab.paper.plan import plan
from d5p4_lab.paper.run import STAGES, prepare, reproduce
from d5p4_lab.paper.setup import Case, Digest, Experiment, Setup
from tests.checkpoints import write_llada
from tests.lab.judges import write_gpt2, write_jina
from tests.lab.paper.smoke import own_experiments, write_arc, write_gsm8k, write_truthfulqa
from tests.refusals import refusal


def cases(setup: Setup) -> list[Case]:
    options = {"method": "d5p4", "k": 2, "w": 2, "beta": 10.0, "gen_length": 6, "steps": 3}
    return [Case(task, options, setup["units"], task) for task in setup["tasks"]]


SETTINGS = {"model": "org/model", "judges": ("org/judge",), "encoder": "org/encoder", "units": 2, "tasks": ("gsm8k",)}
OWN = Experiment(
    "own",
    "Own",
    "nowhere",
    {"box": SETTINGS},
    lambda setup: Drawing([]),
    cases,
    Digest("own", lambda setup, case, unit, row, scores: {}),
    scorers=("ppl", "cos"),
)


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("given")
    written = {
        "model": write_llada(folder / "llada", chat=True),
        "judge": write_gpt2(folder / "gpt2"),
        "encoder": write_jina(folder / "jina"),
        "gsm8k": write_gsm8k(folder / "test.jsonl"),
        "truthfulqa": write_truthfulqa(folder / "questions.jsonl"),
        "arc-challenge": write_arc(folder / "arc.jsonl"),
    }
    return {name: str(path) for name, path in written.items()}


@pytest.fixture
def run(given, tmp_path, monkeypatch):
    """Run the experiment. It fails if anything is decoded, because all errors must come before that."""
    own_experiments(monkeypatch, OWN)
    monkeypatch.setattr(answers_module, "generate", lambda *_, **__: pytest.fail("something was decoded"))

    def call(**words: Any) -> Setup:
        changes = {"judges": [given["judge"]], "encoder": given["encoder"]} | words.pop("changes", {})
        words = {"model": given["model"], "data": given["gsm8k"], "device": "cpu", "out": tmp_path / "out"} | words
        return reproduce("own", changes=changes, **words)

    return call


class GatedRepoError(Exception):
    """What the hub client raises for a model whose licence was not accepted."""


def test_everything_a_run_needs_is_opened_before_it_decodes(run, given, tmp_path, monkeypatch):
    def gated(*_: object, **__: object) -> None:
        raise GatedRepoError("401 Client Error. Access is restricted")

    own_code = str(write_jina(tmp_path / "code", feed_forward_type="original"))
    (tmp_path / "file").touch()
    for words, message in (
        ({"changes": {"judges": ["org/judge"]}}, r"download from the hub failed.*give a folder: --set 'judges=\["),
        ({"changes": {"encoder": "org/encoder"}}, "--set encoder=FOLDER"),
        ({"model": "org/model"}, "--model FOLDER"),
        ({"changes": {"units": 5}}, "gsm8k has only 4 prompts"),
        ({"data": None}, r"'openai/gsm8k' is not a file or folder on this machine.*\(--data gsm8k=FILE\)"),
        ({"changes": {"encoder": own_code}}, "needs Python code of its own"),
        ({"out": tmp_path / "file" / "out", "model": "org/model"}, "file is not a folder; give another --out"),
    ):
        assert re.search(message, refusal(run, **words)), words
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.snapshot_download", gated)
        message = refusal(run, changes={"judges": ["meta-llama/Meta-Llama-3-8B"]})
        assert "is gated: accept its licence at https://huggingface.co/meta-llama/Meta-Llama-3-8B and run" in message
    assert not (tmp_path / "out").exists()
    # Judges may be on another machine: they are not needed to decode.
    lacking = {"stages": ["decode"], "changes": {"judges": ["org/judge"]}}
    for words in ({}, lacking):
        with pytest.raises(pytest.fail.Exception, match="something was decoded"):
            run(**words)


def test_a_plan_counts_missing_rows_once(tmp_path, given, monkeypatch):
    """Rows on the disk count as done, and rows that two experiments share count once in the total."""
    own_experiments(monkeypatch, OWN, replace(OWN, name="other"))
    changes = {"judges": [given["judge"]], "encoder": given["encoder"], "units": 3}
    words = {"out": tmp_path, "model": given["model"], "data": given["gsm8k"], "device": "cpu"}
    reproduce("own", stages=["decode"], changes=changes | {"units": 1}, **words)
    setups = [replace(prepare(name, changes=changes, **words), decoding=False) for name in ("own", "other")]
    text = plan(setups, STAGES, "reproduce")
    assert all(f"| {name} | 2 |" in text for name in ("own", "other", "all, shared rows once"))


def test_the_plan_of_every_experiment(cli, tmp_path, monkeypatch):
    loading = sys.modules["d5p4.models.load"]  # `d5p4.models.load` is also a function
    monkeypatch.setattr(loading, "download", lambda *_: pytest.fail("something was fetched"))
    result = cli("reproduce", "all", "--scale", "paper", "--plan", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    table = {line.split(" | ")[0].strip("| "): line for line in lines if line.startswith("| ")}
    variants = {f"{name}, paper-llada" for name in ("features", "quality-signal")}
    own = [name for name in table if name not in variants]
    assert own == ["experiment", "---", *EXPERIMENTS, "all, shared rows once"] and variants < set(table)
    for name in EXPERIMENTS:
        assert re.search(r" \| [1-9][\d,]* \|$", table[name]), table[name]
    assert any("Meta-Llama-3-8B: fetched from the hub" in line for line in lines)
    assert any(line.startswith("  text: give --data text=FILE") for line in lines)
    assert any("openai/gsm8k from the hub, or give --data gsm8k=FILE" in line for line in lines)
    assert not list(tmp_path.iterdir())
    more = cli("reproduce", "math", "--scale", "paper", "--plan", "--set", "passes=20", "--data", "gsm8k=here.jsonl")
    assert "  gsm8k: here.jsonl; for math" in more.stdout.splitlines()
    texts = table["math"], more.stdout
    rows = [int(re.findall(r"\| math \| ([\d,]+) \|", text)[0].replace(",", "")) for text in texts]
    assert rows[1] == 20 * rows[0]
    assert "books" in cli("reproduce", "pareto", "--plan", "--out", tmp_path).stdout
