"""The examples run, and they show different answers."""

import runpy
import sys
from pathlib import Path

import pytest

import d5p4
from tests.checkpoints import write_llada

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SCRIPTS = sorted(p.name for p in EXAMPLES.glob("*.py") if p.name != "demo.py")  # takes a minute


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llada(tmp_path_factory.mktemp("llada"), generation={"d5p4": {"length": 12}})


@pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")
@pytest.mark.parametrize("script", SCRIPTS)
def test_runs(script, folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, str(folder), "a __ cat"])
    methods = dict(d5p4.METHODS)
    try:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    finally:  # an example may register a method
        d5p4.METHODS.clear()
        d5p4.METHODS.update(methods)
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_four_answers_are_different_and_marked_right(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["four_answers.py", "countdown", "86,28,13,31:96"])
    runpy.run_path(str(EXAMPLES / "four_answers.py"), run_name="__main__")
    *answers, counts = capsys.readouterr().out.splitlines()
    assert len({line.split()[-1] for line in answers}) == 4 and counts.startswith("4 different answers")
    assert [line.split()[1] for line in answers] == ["right"] * 4


def test_there_are_examples():
    assert len(SCRIPTS) >= 5
