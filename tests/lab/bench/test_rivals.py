"""The benchmark of rivals tunes on other problems, pairs problem by problem, and goes on from compressed lines."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import d5p4
from d5p4 import D5P4Error
from d5p4.decode.view import PoolView
from d5p4.methods.dpp import D5P4
from d5p4_lab.bench import books_rules, rivals, variants
from d5p4_lab.bench.countdown import DEFAULT, TREES
from d5p4_lab.bench.rivals import SMALL, TEST, TUNING, Sizes, Unit, plan
from d5p4_lab.bench.units import read_lines
from tests.checkpoints import write_llada, write_mdlm
from tests.fake import FakeModel

from .test_books_rules import PARAGRAPH, Judge

FACTS = {"machine": "none", "weights": "none"}


def line(right, rows, different=None):
    means = {"pass@4": np.mean([digit != "0" for digit in right]), "different": 1.0, "rows": rows, "nfe": 5.0}
    return {"about": FACTS, "puzzles": {"right": right, "different": different or right}, **means}


def finish(sizes, tasks=rivals.TASKS, stages=rivals.STAGES, made=lambda unit: line("10", 10.0)):
    """All units of a run with made-up lines."""
    lines = {}
    while new := [unit for unit in dict.fromkeys(plan(lines, sizes, tasks, stages)) if unit not in lines]:
        lines |= {unit: made(unit) for unit in new}
    return lines


def test_every_method_is_tuned_with_at_most_seven_settings_and_then_tested():
    lines = finish(sizes := Sizes(tested=4, tuned=2, tried=3, prompts=2, seeds=2, tries=1))
    for subtask, (task, *_) in rivals.SUBTASKS.items():
        for name, method in rivals.methods_of(task).items():
            units = [u for u in lines if (u.task, u.method, u.stage) == (subtask, name, "coverage")]
            settings = [u for u in units if u.cases == TUNING]
            assert len(settings) <= 7 and {u.problems for u in settings} <= {2} and bool(settings) != bool(method.like)
            tests = [u for u in units if u.cases == TEST]
            assert tests and {u.problems for u in tests} == {4}
            assert {u.seed for u in tests if u.temperature} in (set(), {0, 1}), name
            if name in TREES.values():
                assert replace(settings[0], problems=4, cases=TEST, **DEFAULT) in tests
    tried = [u for u in lines if u.stage == "ideas"]
    assert {u.cases for u in tried} == {TUNING} and {u.problems for u in tried} == {3}
    assert {u.change for u in tried} > {"", "method=d5p4-spread", "sort=leaves"}
    assert [u for u in lines if u.task == "books"] == list(rivals.prose(sizes))
    only = finish(sizes, ["programs"])
    assert {u.task for u in only} == {"programs-3", "programs-4"}


def test_the_options_of_all_units_are_accepted():
    """Also those of the rivals, which a version of d5p4 without them leaves out."""
    variants.register_variants()
    models = {False: FakeModel(), True: FakeModel(carry_over=True, max_length=128)}
    for unit in finish(SMALL):
        options = unit.options()
        options.pop("sort", None)
        d5p4.Settings.make(models[unit.task == "books"], **options)


def test_differences_are_paired_and_name_the_nearest_best_of_n():
    sizes = Sizes(tested=4, tuned=2, seeds=1)
    tree = Unit("coverage", "countdown-4", TREES[8], 4, TEST, **DEFAULT)
    lines = {tree: line("1110", 100.0)}
    lines[Unit("coverage", "countdown-4", "best-of-8", 4, TEST)] = line("0110", 40.0)
    lines[Unit("coverage", "countdown-4", "best-of-16", 4, TEST)] = line("1100", 90.0)
    lines[Unit("coverage", "countdown-4", "d5p4", 4, TEST, knob=20.0)] = line("1111", 45.0)
    table = rivals.tables(lines, sizes)["countdown-4"]().splitlines()[2:]
    assert [row.split(" | ")[0] for row in table] == [
        "| best-of-8",
        "| d5p4",
        "| best-of-16",
        "| tree, K = 8 (default)",
    ]
    half = 1.96 * 0.25  # of the differences 1, 0, 0, 0
    assert table[1].endswith(f"| 45 | 5.0 | 25.0 ± {100 * half:.1f} | 50.0 ± {100 * 1.96 * 0.2887:.1f} (best-of-8) |")
    assert table[3].endswith(" | – | 25.0 ± 49.0 (best-of-16) |")
    assert rivals.tables({}, sizes)["programs-3"]() == "not measured yet"
    assert rivals.tables({}, sizes)["papers"]().count("arxiv.org/abs/") == len(rivals.PAPERS)


def test_ideas_are_compared_with_their_base_at_equal_rows():
    cost = {"independent": 10.0, "best-of-8": 20.0, "d5p4": 15.0}
    marks = {"independent": "0000", "best-of-8": "1100"}
    sizes = Sizes(tested=4, tuned=4, tried=4, prompts=2, seeds=1, tries=1)
    lines = finish(
        sizes, ["countdown"], ["ideas"], lambda u: line(marks.get(u.method, "1110"), cost.get(u.method, 99.0))
    )
    assert {u.task for u in lines} == {"countdown-4", "countdown-5"} and {u.cases for u in lines} == {TUNING}
    assert all(
        u.stage == "ideas" or u.method in ("d5p4", "d5p4, distinct, spare 4", *rivals.SAMPLES, *TREES.values())
        for u in lines
    )
    table = rivals.tables(lines, sizes)
    similarity = table["idea-similarity"]().splitlines()[2:]
    assert len(similarity) == 8 and similarity[0].endswith("| – | – |") and "share=0.9" in similarity[2]
    assert similarity[1].endswith("| 0.0 ± 0.0 | 0.00 ± 0.00 |")
    search = [row for row in table["idea-search"]().splitlines() if row.startswith("| 4 | d5p4 |")]
    assert len(search) == 1 and "| 15 | 45.8 ± " in search[0]  # 75 % minus what lies 58 % of the way from 0 to 50 %


def test_a_run_is_folded_and_goes_on_from_the_compressed_lines(tmp_path, monkeypatch, capsys):
    (tmp_path / "val.txt").write_text("<|endoftext|>\n".join([f"{PARAGRAPH}\n"] * 3))
    monkeypatch.setattr(rivals, "LENGTH", 4)
    few = {"independent": replace(rivals.PROSE["independent"], heats={"ancestral": (1.0, 0.7)})}
    monkeypatch.setattr(rivals, "PROSE", few | {"d5p4": replace(rivals.PROSE["d5p4"], heats={"ancestral": (1.0,)})})
    monkeypatch.setattr(books_rules, "_judge", lambda name: Judge())
    monkeypatch.setattr(rivals, "SUBTASKS", {"countdown-4": rivals.SUBTASKS["countdown-4"]})
    names = (TREES[4], "independent")
    methods = {name: replace(rivals.methods_of("countdown")[name], values=(None,), knob="") for name in names}
    methods = {name: replace(method, heats={"top": (0.7,)}) for name, method in methods.items()}
    monkeypatch.setattr(rivals, "methods_of", lambda task: methods)
    monkeypatch.setattr(rivals, "IDEAS_ON", ())
    monkeypatch.setitem(rivals.WINDOW, 4, 3)  # short and quick; all answers are wrong anyway
    out, results = tmp_path / "lines.jsonl", tmp_path / "rivals.jsonl.xz"
    common = ["--small", "--device", "cpu", "--out", str(out), "--results", str(results)]
    common += ["--model", f"countdown={write_llada(tmp_path / 'model')}"]
    common += ["--model", f"books={write_mdlm(tmp_path / 'books', model_length=64)}", "--stages", "coverage"]
    rivals.main([*common, "--tasks", "countdown"])
    rivals.main([*common, "--tasks", "countdown,books"])
    assert "books are left out" in capsys.readouterr().out
    rivals.main([*common, "--tasks", "books", "--data", str(tmp_path / "val.txt")])
    rivals.main([*common, "--judge", "judge", "--judged", "3"])
    whole = read_lines(Unit, [out])
    assert len(whole) == 5 + 3 + 3 and len([u for u in whole if u.judge]) == 3
    rivals.main([*common, "--draw"])
    shown = capsys.readouterr().out
    assert "| d5p4 | ancestral, T 1, beta 20 | " in shown and "judge: perplexity | self-BLEU" in shown
    assert "| independent | top, T 0.7 | 0.0 ± 0.0 | " in shown
    kept = rivals.committed(results)
    assert kept.keys() == whole.keys() and not any("texts" in line or "prompts" in line for line in kept.values())
    assert all(("puzzles" in kept[u]) == (u.cases == TEST) for u in whole if u.task != "books")
    size = results.stat().st_size
    out.unlink()
    rivals.main([*common, "--tasks", "countdown,books", "--data", str(tmp_path / "val.txt")])
    assert "11 units are finished, 0 failed" in capsys.readouterr().out and not read_lines(Unit, [out])
    rivals.main([*common, "--draw"])
    assert results.stat().st_size == size and str(tmp_path) not in str(kept)
    with pytest.raises(D5P4Error, match="other weights"):
        rivals.main([*common, "--model", f"countdown={write_llada(tmp_path / 'other', seed=1)}"])


def test_rows_that_would_be_the_same_answer_get_the_same_number():
    """Masked positions take their most probable token, and operands may be swapped."""
    signs = "0123456789+*=;_"  # ; ends the text, and _ is the mask
    rows = ["3+4=_;_", "4+3=7;1", "3*4=_2;", "3+4=_;_"]
    guesses = ["3+4=7;9", "4+3=7;1", "3*4=12;", "3+4=8;_"]
    tokens = torch.tensor([[[signs.index(sign) for sign in row] for row in rows]])
    states = torch.nn.functional.one_hot(torch.tensor([[signs.index(sign) for sign in row] for row in guesses]))
    head = SimpleNamespace(weight=torch.eye(15), bias=None, banned=torch.zeros(15, dtype=torch.bool))
    codec = SimpleNamespace(decode=lambda ids: "".join(signs[i] for i in ids))
    model = SimpleNamespace(tokenizer=codec, mask_id=14, generation_defaults={"grader": "countdown"})
    call = SimpleNamespace(head=head, model=model, end_ids=torch.tensor([13]))
    owner, slot = torch.tensor([[0, 0], [0, 1], [0, 2], [0, 3]]), torch.tensor([[0, 1, 2, 3]])
    hidden = SimpleNamespace(states=states.float(), owner=owner, slot=slot)
    pool = SimpleNamespace(hidden=hidden, pool=SimpleNamespace(tokens=tokens, call=call))
    assert variants.answer_names(pool).tolist() == [[0, 0, 1, 2]]


def test_ideas_change_the_similarity_or_the_weight_of_diversity(monkeypatch):
    source = torch.Generator().manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(1, 8, 6, generator=source, dtype=torch.float64), dim=-1)
    quality, similarity = torch.rand(1, 8, generator=source, dtype=torch.float64), features @ features.mT
    tie, key = torch.arange(8)[None], torch.zeros(1, dtype=torch.int64)

    def chosen(select, seen=similarity):
        view = PoolView(group=tie // 2, tie=tie, quality=quality, similarity=seen, width=2)
        return select(view, 4, key).parents.tolist()

    names = torch.tensor([[0, 1, 0, 2, 0, 1, 3, 0]])
    monkeypatch.setattr(variants, "answer_names", lambda pool: names)
    same = (names[:, :, None] == names[:, None, :]).double()
    assert chosen(variants.Same(beta=5.0, share=0.0)) == chosen(D5P4(beta=5.0))
    assert chosen(variants.Same(beta=5.0, share=0.75)) == chosen(D5P4(beta=5.0), 0.25 * similarity + 0.75 * same)
    apart = (1 - similarity).sum() / (8 * 7)
    for scale in (0.1, 3.0):
        beta = float(scale * quality.std() / apart)
        assert chosen(variants.Spread(beta=scale)) == chosen(D5P4(beta=beta))
