from __future__ import annotations

import json
import re

import d5p4
from d5p4 import view

ARGUMENTS = ("--gen-length", 6, "--seed", 5, "-k", 2, "-w", 2)


def test_a_json_file_holds_what_the_library_gives(cli, models, tmp_path):
    file = tmp_path / "trace.json"
    options = ("--methods", "independent, d5p4", "--beta", 7)
    outcome = cli("trace", "two plus two", "-m", models.llada, *ARGUMENTS, *options, "-o", file)
    assert outcome.exit_code == 0, outcome.output
    written = json.loads(file.read_text(encoding="utf-8"))
    model = d5p4.load(models.llada)
    one = view.trace(model, "two plus two", method="independent", k=2, w=2, gen_length=6, seed=5)
    two = view.trace(model, "two plus two", method="d5p4", beta=7.0, k=2, w=2, gen_length=6, seed=5)
    for trace in (*written["traces"], one, two):
        del trace["seconds"]
    assert written == {"format": view.FORMAT, "traces": [one, two]}
    assert "seed 5" in outcome.stdout and "trace.json" in outcome.stdout.replace("\n", "")


def test_a_page(cli, models, tmp_path):
    file = tmp_path / "trace.html"
    file.write_text("old")
    outcome = cli(
        "trace", "-m", models.mdlm, "--gen-length", 6, "-k", 2, "-w", 2, "--methods", "cat,d5p4", "-o", file, "-q"
    )
    assert (outcome.exit_code, outcome.stdout) == (0, ""), outcome.output
    text = file.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and '"format":"d5p4-trace/3"' in text
    assert len({*re.findall(r'"seed":(\d+)', text)}) == 1  # one fresh seed for all methods
    assert [path.name for path in tmp_path.iterdir()] == ["trace.html"]


def test_what_cannot_be_is_said_before_any_work(fails, models, tmp_path):
    (tmp_path / "folder.html").mkdir()
    for options, expected in (
        (("-o", tmp_path / "no/trace.html"), "there is no folder"),
        (("-o", tmp_path), "must end in .html"),
        (("-o", tmp_path / "folder.html"), "is a folder"),
        (("-o", tmp_path / "trace.txt"), "must end in .html (a page) or .json"),
        (("-o", tmp_path / "t.html", "--methods", "cat,best"), "--methods='best' is not a method"),
        (("-o", tmp_path / "t.html", "-k", 0), "k=0"),
    ):
        model = models.llada if "-k" in options else "no/model"
        assert expected in fails("trace", "two", "-m", model, "--gen-length", 4, *options), options
        assert [path.name for path in tmp_path.iterdir()] == ["folder.html"]
