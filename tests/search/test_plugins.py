"""Methods of a stranger: from a module or a file, once, in all processes; and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import d5p4
from d5p4.options import load_plugins
from d5p4.search import Identity
from tests.fake import FakeModel
from tests.refusals import refusal

SOURCE = """from __future__ import annotations
from dataclasses import dataclass
from typing import Annotated
import d5p4
{more}
@dataclass(frozen=True)
class Mine:
    loud: Annotated[float, d5p4.Option("How loud.", least=0)] = 1.0
    def __call__(self, pool, k, key):
        return pool.stay()
d5p4.register(d5p4.Method({name!r}, Mine, "a method of a stranger", branches=False))
"""
PAPER = {
    *("tree", "d5p4", "d5p4x", "d5p4-p", "d5p3", "greedy-beam", "cat", "diverse-beam", "random", "k-dpp", "e-smc"),
    *("best-of-n", "independent"),
}
LAB = {"odd", "sr-smc", "wide-start", "cooling", "ots", "soar", "partition-sample"}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write plugins into the current folder. Their methods are forgotten after the test."""
    before = dict(d5p4.METHODS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)

    def call(file: str, name: str, more: str = "") -> Path:
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(SOURCE.format(name=name, more=more))
        return path

    yield call
    for name in set(d5p4.METHODS) - set(before):
        del d5p4.METHODS[name]


def test_a_file_is_a_plugin_by_every_spelling_of_its_path_and_loaded_once(write):
    path = write("random.py", "mine", more="from beside import HELP")  # the file hides no module of its name
    (path.parent / "beside.py").write_text("HELP = 'me'")
    for spelling in ("random.py", "./random.py", f"../{path.parent.name}/random.py", str(path)):
        load_plugins([spelling])
    import random

    assert random.random() < 1
    result = d5p4.generate(FakeModel(), "abc", method="mine", loud=2, k=2, gen_length=3, seed=0)
    select = result.settings.spec.build(result.settings)
    assert select.loud == 2 and pickle.loads(pickle.dumps(select)) == select


def test_a_plugin_that_cannot_be_loaded_is_refused_in_one_sentence(write, tmp_path):
    write("good.py", "good")
    (tmp_path / "broken.py").write_text("x = = 3\n")
    (tmp_path / "fails.py").write_text("raise ValueError('two\\nlines')\n")
    for given, message in (
        ("./no_such.py", "plugin='./no_such.py' is not a file; give a Python file"),
        ("sub/good", "plugin='sub/good' is not a file; give a Python file"),
        ("broken.py", "plugin='broken.py' cannot be loaded: SyntaxError: invalid syntax (broken.py, line 1)"),
        ("./fails.py", "plugin='./fails.py' cannot be loaded: ValueError: two lines"),
        ("no_such_module", "plugin='no_such_module' cannot be loaded: ModuleNotFoundError: No module named"),
    ):
        assert message in refusal(load_plugins, ["good.py", given]), given
    assert "good" in d5p4.METHODS and "\n" not in refusal(load_plugins, ["fails.py"])


def test_the_command_line_takes_modules_and_files(write, tmp_path):
    """The library alone has the methods of the paper and the tree. The lab adds its methods as a stranger does."""
    absolute = write("sub/absolute.py", "absolute")
    for name in ("module", "bare", "dotted"):
        write(f"{name}_plugin.py", name)
    given = ["module_plugin", "bare_plugin.py", "./dotted_plugin.py", str(absolute), "d5p4_lab.methods"]
    code = "import d5p4, json; print(json.dumps(list(d5p4.METHODS))); from d5p4.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code, "methods", "--json", *(word for name in given for word in ("--plugin", name))],
        env=os.environ | {"PYTHONPATH": str(Path(d5p4.__file__).parents[1]), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    library, _, listed = ended.stdout.partition("\n")
    assert set(json.loads(library)) == PAPER
    assert {entry["name"] for entry in json.loads(listed)} == PAPER | LAB | {"module", "bare", "dotted", "absolute"}


class Counting(Identity):
    """Scores an answer by its number of different letters, and adds this number and the sum of all answers."""

    def extras(self, settings):
        return {"counts": (settings.k,), "total": ()}

    def finish(self, final, k):
        counts = torch.tensor([[len(set(text)) for text in texts] for texts in final.texts()])
        rows = torch.arange(k).expand_as(counts)
        return d5p4.Kept(rows, counts.double(), extras={"counts": counts, "total": counts.sum(-1)})


def test_a_method_may_add_extras_which_follow_their_answers():
    """Also when its prompts are decoded in several calls, whose results are joined."""
    d5p4.register(d5p4.Method("counting", Counting, branches=False))
    prompts = ["abc", "ahead", "b"]
    few = {"k": 5, "gen_length": 8, "eos": "never", "max_tokens_per_forward": 1}
    result = d5p4.generate(FakeModel(scale=0.5), prompts, method="counting", seed=1, **few)
    counts = [[len(set(text)) for text in texts] for texts in result.texts]
    assert result.extras["counts"].tolist() == result.score.tolist() == counts and len(set(counts[0])) > 1
    assert result.total.tolist() == [sum(row) for row in counts]


class Shy(Identity):
    """Gives answers the score NaN."""

    def finish(self, final, k, **_):
        return d5p4.Kept(torch.arange(k).expand(len(final.tie), k), torch.full((len(final.tie), k), torch.nan))


class Lost:
    """A selector whose `finish` nobody would call."""

    def __call__(self, pool, k, key):
        return pool.stay()

    finish = Shy.finish


def test_a_selector_with_hooks_must_be_a_search():
    message = "method 'lost' has 'finish'; derive it from d5p4.search.Beam or TreeSearch"
    assert refusal(d5p4.Method, "lost", Lost) == message


def test_what_a_method_may_not_do_is_refused_in_one_sentence(write):
    d5p4.register(d5p4.Method("shy", Shy, branches=False))
    message = refusal(d5p4.generate, FakeModel(), "abc", method="shy", k=2, gen_length=3)
    assert message == "method 'shy' gave an answer the score NaN; a score must be a number"
    for item, message in (
        (d5p4.Method("shy", Shy), "method 'shy' exists already; choose another name"),
        (Shy, "register takes a d5p4.Method, d5p4.Order or d5p4.Reveal, not type"),
        (d5p4.Method("deaf", 3), "method 'deaf': it needs a dataclass or a function"),
    ):
        assert message in refusal(d5p4.register, item)
