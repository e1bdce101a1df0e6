"""The examples run, and they show different answers. The notebooks give the outputs that they were committed with."""

import re
import runpy
import sys
from pathlib import Path

import nbformat
import pytest

import d5p4
from d5p4_lab.notebooks import ALL, METADATA, executed
from tests.checkpoints import write_llada

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# A minute; tests/integrations/test_trl.py; below; docs/tutorials/fill.md has the same code.
OTHERS = ("demo.py", "grpo_trl.py", "four_answers.py", "fill_antibody.py", "fill_reaction.py")
SCRIPTS = sorted(p.name for p in EXAMPLES.glob("*.py") if p.name not in OTHERS)
MOST_BYTES = 90_000  # of a notebook with its outputs
DECIMAL = re.compile(r"-?\d+\.\d+")


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


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts_of(cell):
    """What a cell prints and shows, without pictures."""
    shown = []
    for output in cell.outputs:
        data = output.get("data", {})
        shown += [output.text] if output.output_type == "stream" else []
        shown += [data[kind] for kind in ("text/plain", "text/html") if kind in data and "image/png" not in data]
    return shown


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_notebook_is_tidy(path):
    text = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output.get("name", output.output_type) for cell in cells for output in cell.outputs}
    assert kinds <= {"stdout", "display_data", "execute_result"}  # no errors, and nothing on standard error
    assert notebook.metadata == METADATA and not any(cell.metadata for cell in notebook.cells)
    assert len(text.encode()) < MOST_BYTES
    words = "".join(cell.source for cell in notebook.cells) + "".join(sum(map(texts_of, cells), []))
    assert not re.search(r"/(?:home|root|tmp|usr|work|Users)/|[A-Z]:\\", words)
    for target in re.findall(r"\]\(([^)#]+)", words):
        assert (path.parent / target).exists(), target


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_notebook_gives_its_committed_outputs(path):
    """Texts and counts are equal. Rounding errors of another processor may move a decimal fraction."""
    committed = code_cells(nbformat.read(path, as_version=4))
    for old, new in zip(committed, code_cells(executed(path)), strict=True):
        before, after = "\n".join(texts_of(old)), "\n".join(texts_of(new))
        assert DECIMAL.sub("x", after) == DECIMAL.sub("x", before), old.id
        numbers = [[float(number) for number in DECIMAL.findall(text)] for text in (after, before)]
        assert numbers[0] == pytest.approx(numbers[1], abs=0.002), old.id
        assert [output.output_type for output in new.outputs] == [output.output_type for output in old.outputs], old.id
