"""The benchmark of prose under reveal rules decodes and judges in separate commands, and leaves out the prompts."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from d5p4 import D5P4Error
from d5p4_lab.bench import books_rules as benchmark
from d5p4_lab.bench.books_rules import Unit
from d5p4_lab.bench.units import read_lines
from d5p4_lab.scoring.perplexity import Scored
from tests.checkpoints import write_mdlm

PARAGRAPH = "the cat sat on the mat and saw a rat. " + "Then it ran on and on and on. " * 8


class Judge:
    """A judge for whom every byte costs 2 bits."""

    describe = "two bits"
    model = SimpleNamespace(device=torch.device("cpu"))

    def score(self, texts, max_tokens_per_batch):
        size = np.array([len(text.encode()) for text in texts])
        return Scored(size * 2 * np.log(2), size, size)


def test_texts_are_decoded_judged_and_drawn(tmp_path, monkeypatch, capsys):
    (tmp_path / "val.txt").write_text("<|endoftext|>\n".join([f"{PARAGRAPH}\n"] * 3))
    monkeypatch.setattr(benchmark, "KINDS", (("schedule", "ancestral", 2), ("schedule", "random", 4)))
    monkeypatch.setattr(benchmark, "LENGTH", 4)
    monkeypatch.setattr(benchmark, "_judge", lambda name: Judge())
    out, results = tmp_path / "lines.jsonl", tmp_path / "results.json"
    common = ["--model", str(write_mdlm(tmp_path / "model", model_length=64)), "--prompts", "3", "--out", str(out)]
    with pytest.raises(D5P4Error, match="with --data, or judges"):
        benchmark.main(common)
    benchmark.main([*common, "--device", "cpu", "--data", str(tmp_path / "val.txt"), "--stages", "rules"])
    assert "4 units are finished, 0 failed" in capsys.readouterr().out
    benchmark.main([*common, "--judge", "mine", "--judged", "2"])
    lines = read_lines(Unit, [out])
    assert len(lines) == 8
    for unit, line in lines.items():
        texts = lines[replace(unit, judge="", judged=0)]["texts"]
        if unit.judge:  # the judge reads the texts of two prompts
            assert line["bytes"] == [sum(len(text.encode()) for text in texts[i]) for i in (0, 1)]
        else:
            assert line["nfe"] == [unit.steps] * 3 and [len(entry) for entry in texts] == [4, 4, 4]
    assert str(tmp_path) not in out.read_text()
    results.write_text(json.dumps({"rows": [{"stage": "rules"}, {"stage": "other"}]}))
    capsys.readouterr()
    benchmark.main([*common, "--draw", "--results", str(results)])
    shown = capsys.readouterr().out.splitlines()
    assert "two bits: perplexity | bits per byte | distinct-2 |" in shown[1]
    assert shown[3].startswith("| schedule, 2 steps | ancestral | independent | 2.0 ± 0.0 | ")
    assert all(" | 2.000 ± 0.000 | " in line for line in shown[3:7]) and "not measured yet" in shown
    assert json.loads(results.read_text())["rows"][-1] == {"stage": "other"}  # kept, because it has no lines


def test_units_become_options():
    options = Unit("rules", "d5p4", "factor 3", "top", None, 64).options()
    assert options["reveal"] == "factor" and options["factor"] == 3 and "steps" not in options
    assert {kind[1] for kind in benchmark.KINDS if kind[0] != "schedule"} == {"top"}
    for stage in ("prose", "length"):
        units = list(benchmark.units_of(stage, 64))
        assert len(units) == len(set(units)) and all(
            "w" not in unit.options() for unit in units if unit.method == "tree"
        )


def test_prose_is_compared_at_equal_distinct_2():
    def curve(distinct, bits):
        return np.tile([distinct, bits * np.log(2) * 10, 10], (3, 1))

    sampled = [curve(0.8, 1.0), curve(1.0, 2.0), None]
    assert benchmark.at_equal_distinct(curve(0.9, 1.25), sampled) == pytest.approx([-0.25] * 3)
    assert benchmark.at_equal_distinct(curve(0.7, 1.25), sampled) is None  # no temperature has such a distinct-2
    assert benchmark.at_equal_distinct(None, sampled) is None
