"""The study of sets of answers: questions, costs, measures and fronts."""

from __future__ import annotations

import hashlib
import itertools
import math

import numpy as np
import pytest
import torch

import d5p4
from d5p4_lab.bench import read, write
from d5p4_lab.bench.language import (
    FIXED,
    KINDS,
    PARTS,
    SETTINGS,
    STUDY,
    SUMS,
    Unit,
    choice,
    decode,
    family,
    figure,
    outside_nats,
    part_of,
    preferences,
    reading,
    repetition,
    resampled,
    shared,
    summary,
    tables,
    work_judging,
    written,
)
from d5p4_lab.bench.units import read_lines, run_units
from d5p4_lab.scoring.causal import Teacher
from d5p4_lab.scoring.encoder import Encoder
from d5p4_lab.scoring.perplexity import CausalJudge
from d5p4_lab.statistics import front
from d5p4_lab.train.smol_data import HELD_OUT, OPENING, TURN
from tests.fake import block_model
from tests.lab.judges import write_gpt2
from tests.lab.smol import teacher


def test_parts_have_no_question_in_common():
    texts = [f"What is {i}?" for i in range(400)]
    again = [f"  what IS {i}?" for i in range(0, 400, 3)]
    parts = {part: part_of([*texts, *again], part, 1000) for part in PARTS}
    assert sorted(itertools.chain(*parts.values())) == sorted(texts)
    assert all(part_of(texts[::-1], part, 7) == own[:7] for part, own in parts.items())
    assert part_of(texts[:200], "tune", 1000) == [text for text in parts["tune"] if text in texts[:200]]


def test_settings_name_their_family_and_differ():
    assert {"independent", "base samples", "wide start", "d5p4", "tree"} < set(map(family, SETTINGS))
    assert len(SETTINGS) == len({str(options) for options in SETTINGS.values()})
    assert set(FIXED) < set(SETTINGS) and len(set(FIXED)) == len(FIXED)
    assert {kind for kinds in KINDS for kind in kinds.split("|")} < set(map(family, SETTINGS))


def test_the_test_gets_the_best_of_each_kind():
    """Quality differs by setting; difference and relevance are those of the baselines, except where this is said."""
    draw, rows = np.random.default_rng(0), []
    quality = dict(zip(SETTINGS, draw.permutation(len(SETTINGS)) / 100 + 1, strict=True))
    cold, off_topic, beyond = "tree, T 0.7", "d5p4, T 0.7, β 100", "wide start, cut 16, α 1, T 1"
    oracle = "wide start, cut 16, α 1, oracle"
    quality |= dict.fromkeys((off_topic, beyond, oracle), 0.5) | {cold: 0.6}
    for name, nats in quality.items():
        own = dict.fromkeys(SUMS, [1.0] * 12) | {
            "nats": [nats] * 12,
            "relevance": [0.4 if name == off_topic else 0.5] * 12,
        }
        own["cosine"] = [0.05 if name == beyond else 0.5] * 12
        rows.append({"setting": name, "part": "screen", "length": 64} | own)
    taken = choice([*rows, {**rows[0], "part": "test", "nats": [0.0] * 12}])
    assert taken[: len(FIXED)] == FIXED and len(set(taken)) == len(taken) == STUDY
    assert cold in taken and not {off_topic, beyond, oracle} & set(taken)
    for kind in KINDS:
        kin = [name for name in SETTINGS if family(name) in kind.split("|") and name not in (off_topic, beyond, oracle)]
        assert min(kin, key=quality.__getitem__) in taken


def test_the_base_writes_questions_that_the_training_leaves_out():
    texts = written(teacher(), Codec(), 2048, 512)
    assert texts == written(teacher(), Codec(), 2048, 512) and 1 < len(texts) < 64
    for text in texts:
        assert int(hashlib.sha256(text.encode()).hexdigest(), 16) % HELD_OUT == 0 and "2" not in text.split()


SMALL = ["independent, T 0.7", "6 samples and a DPP, T 1, α 1", "cooling, T 1 then 0.5 from 8", "tree, T 0.7"]
SMALL += ["d5p4 enumerated, T 0.7, β 100, α 1", "cuts every 8, 8 rows, tokens × states", "cuts every 8, 6 rows"]
SMALL += ["d5p4, T 0.7, β 100", "wide start, cut 8, α 1", "order top, tree, edges first, T 1", "best of 16, T 0.7"]


def work(unit):
    asked = ["abc", "defghi"]
    return {"questions": asked} | decode(unit, asked, block_model(shifted=True), None, 4096) | {"shown": ""}


def test_settings_decode_and_finished_units_are_kept(tmp_path):
    units, file, lines = [Unit(name, "teacher", "tune", 0, 12) for name in SMALL], tmp_path / "decoded.jsonl", {}
    run_units(file, lines, lambda _: units[:5], work, lambda: None, ())
    before = file.read_bytes()
    run_units(file, lines, lambda _: units, work, lambda: None, ())
    assert file.read_bytes().startswith(before) and read_lines(Unit, [file]) == lines and set(lines) == set(units)
    for line in lines.values():
        assert [len(group) for group in line["ids"]] == [4, 4] == [len(group) for group in line["texts"]]
        assert all(1 <= len(ids) <= 12 for group in line["ids"] for ids in group)
        assert min(line["rows"]) >= 12 and line["texts"] != line["questions"]


@pytest.mark.parametrize("kind", ["top, independent", "confidence, independent", "top, tree"])
def test_the_first_token_of_a_block_may_come_first(kind):
    """The rule changes the answers, and a unit without it does not inherit it from the unit before."""
    model = block_model(shifted=True)
    units = [Unit(f"order {kind}{rule}, T 1", "teacher", "tune", 0, 12) for rule in ("", ", edges first", "")]
    plain, first, again = (decode(unit, ["abc"], model, None, 4096)["ids"] for unit in units)
    assert plain == again != first


def test_a_dpp_keeps_samples():
    """The four answers are among the six samples, and the six cost more rows than four."""
    six, four = (
        decode(Unit(f"{name}, T 1{rest}", "teacher", "tune", 0, 12), ["abc"], block_model(shifted=True), None, 4096)
        for name, rest in (("6 samples and a DPP", ", α 1"), ("independent", ""))
    )
    options = {**SETTINGS["independent, T 1"], "order": "left", "gen_length": 12, "seed": 0}
    result = d5p4.generate(block_model(shifted=True), "abc", k=6, **options)
    own = [[*answer, 2] if len(answer) < 12 else answer for answer in result.answers[0]]
    assert len(six["ids"][0]) == 4 and all(ids in own for ids in six["ids"][0]) and six["rows"] > four["rows"]


def test_nats_per_byte_are_those_of_a_plain_computation(tmp_path):
    judge = CausalJudge(write_gpt2(tmp_path, n_positions=128), device="cpu", dtype="float64")
    asked, groups = ["a b", "cd"], [["ab", ""], ["é b a", "d"]]
    ended = [True, False, False, True]
    nats, sizes = outside_nats(judge, asked, groups, ended)
    assert sizes == [1 + 2 + 1, 1, 1 + 6, 1 + 1 + 1]
    flat = [(question, text) for question, group in zip(asked, groups, strict=True) for text in group]
    for (question, text), end, value in zip(flat, ended, nats, strict=True):
        before = [judge.start_id, *judge.tokens(f"Question: {question}\nAnswer:")[0]]
        row = [judge.start_id, *judge.tokens(f"Question: {question}\nAnswer: {text}")[0]]
        row += [judge.tokenizer.eos_token_id] * end
        logits = judge.model(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)
        brute = -sum(logits[i - 1, row[i]].item() for i in range(len(before), len(row)))
        assert row[: len(before)] == before and math.isclose(value, brute, abs_tol=1e-9)


def test_a_line_of_numbers(tmp_path, monkeypatch):
    """The base's nats are sums of its own log-probabilities, with the question and without."""
    judge = CausalJudge(write_gpt2(tmp_path / "judge", n_positions=128), device="cpu")
    base = Teacher(teacher())
    needs = {"tokenizer": Codec(), "outside": judge, "base": base, "encoder": Encoder()}
    unit, ids = Unit(SMALL[0], "teacher", "tune", 0, 3), [[[9, 8, 2], [7, 7, 7]]]
    line = {"questions": ["ab"], "ids": ids, "texts": [["a b", "c"]], "rows": [5], "positions": [7], "seconds": 1}
    for name, value in (needs | {"lines": {unit: line | {"about": {}}}}).items():
        monkeypatch.setitem(shared, name, value)
    numbers = work_judging(unit)
    assert set(SUMS) < set(numbers) and numbers["tokens"] == [6] and numbers["questions"] != ["ab"]
    for name, question in (("base", "ab"), ("alone", "")):
        before = Codec().encode(f"{OPENING}{question}<|im_end|>{TURN}")
        total = 0.0
        for answer in ids[0]:
            row = torch.tensor([before + answer])
            place = torch.arange(row.shape[1])
            states = base.body(row, place, (place[:, None] >= place)[None, None])[0]
            logp = base.body.logits(states).log_softmax(-1)
            total -= sum(float(logp[len(before) + i - 1, token]) for i, token in enumerate(answer))
        assert numbers[name] == [pytest.approx(total, abs=1e-3)]


class Codec:
    """Gives every word an id of the toy base."""

    def encode(self, text):
        return [8 + sum(map(ord, word)) % 50 for word in text.split()]

    def decode(self, ids):
        return " ".join(map(str, ids))


def test_repetition_is_the_share_of_repeated_groups_of_words():
    assert repetition("a b c d a b c d") == pytest.approx(1 / 5) and repetition("a b") == 0


def test_the_front_is_that_of_the_best_mixture():
    draw = np.random.default_rng(1)
    x, y, at = draw.random((30, 4)), draw.random((30, 4)), draw.random(30)
    grid = np.array([w for w in itertools.product(np.linspace(0, 1, 21), repeat=4) if abs(sum(w) - 1) < 1e-9])
    mixed_x, mixed_y = x @ grid.T, y @ grid.T
    rough = np.where(mixed_x >= at[:, None], mixed_y, np.inf).min(1)
    values = front(x, y, at)
    reached = x.max(1) >= at
    assert np.isnan(values[~reached]).all() and 5 < reached.sum() < 30
    assert (values[reached] <= rough[reached] + 1e-12).all() and (rough - values)[reached].max() < 0.1
    line = np.array([[0.0, 1.0, 0.5]])
    assert front(line, 2 * line, np.array([0.25])) == pytest.approx([0.5])
    assert front(line, 1 - line, np.array([0.25])) == pytest.approx([0.0])  # more difference for less is on the front


def lines_with_a_gap(gap, questions=40):
    """Independent settings on the line nats per byte = 1 + difference, and a tree that is better by `gap`."""
    draw, base, lines = np.random.default_rng(2), np.linspace(-0.5, 0.5, questions), {}
    places = {"independent, T 0.5": 0.1, "independent, T 0.7": 0.3, "independent, T 1": 0.5, "tree, T 0.7": 0.2}
    for (name, x), seed in itertools.product(places.items(), (0, 1)):
        own = 1 + x + base + 0.01 * draw.normal(size=questions) - gap * name.startswith("tree")
        columns = dict.fromkeys(SUMS, np.ones(questions)) | {"bytes": np.full(questions, 50.0)}
        columns |= {"nats": 50 * own, "cosine": np.full(questions, 1 - x)}
        row = {column: values.tolist() for column, values in columns.items()}
        lines[Unit(name, "teacher", "test", seed, 64)] = row | {
            "questions": [str(i) for i in range(questions)],
            "about": {},
        }
    return lines


def test_a_known_gap_is_found_and_is_paired(tmp_path):
    lines = lines_with_a_gap(0.25)
    assert [row["seeds"] for row in summary(lines)[1:]] == [2] * 4
    write(tmp_path / "results.jsonl.xz", summary(lines))
    results = read(tmp_path / "results.jsonl.xz")
    points, n = resampled(results, "test", 64)
    assert n == 40 and points["tree, T 0.7"]["nats per byte"].std() > 0.02  # questions differ by far more than the gap
    row = next(line for line in tables(results)["test-64"]().splitlines() if line.startswith("| tree"))
    value, low, high = (float(x) for x in row.split("|")[-4].translate(str.maketrans("[,]", "   ")).split())
    assert low <= -0.25 <= high and high - low < 0.02 and abs(value + 0.25) < 0.01
    assert "front of base samples" not in tables(results)["test-64-ceiling"](), "the base was not measured"
    for line in results[1:]:
        line["setting"] = line["setting"].replace("independent", "base samples")
    ceiling = next(line for line in tables(results)["test-64-ceiling"]().splitlines() if line.startswith("| tree"))
    assert ceiling.split("|")[-4:] == row.split("|")[-4:] != [""] * 4
    figure(results, tmp_path / "one.svg")
    assert "tree" in (tmp_path / "one.svg").read_text()
    assert tables([])["test-64"]() == "not measured yet"


def test_rows_that_only_a_dpp_reads_count():
    again = {"wide start, cut 8, α 1": 12, "wide start, cut 16, α 1, two cuts of 8": 24, "cuts every 8, 8 rows": 56}
    again |= {"wide start, cut 16, α 1, kernel of d5p4": 0, "6 samples and a DPP, T 1, α 1": 6, "tree, T 0.7": 0}
    facts = {"questions": ["a", "b"], "about": {}} | {name: [100.0, 200.0] for name in SUMS}
    rows = summary({Unit(name, "teacher", "test", 0, 64): facts for name in again})[1:]
    assert {row["setting"]: row["rows"] for row in rows} == {name: [100 + n, 200 + n] for name, n in again.items()}
    assert all(row["positions"] == [100, 200] for row in rows)


def test_only_questions_that_all_settings_have_count():
    lines = lines_with_a_gap(0.25)
    first, second = list(lines)[:2]
    for unit in (first, second):
        lines[unit] = {name: own[:-1] if isinstance(own, list) else own for name, own in lines[unit].items()}
    assert {len(row["nats"]) for row in summary(lines)[1:]} == {39}
    with pytest.raises(d5p4.D5P4Error, match="in common"):
        summary({first: {"questions": ["1"], "about": {}} | dict.fromkeys(SUMS, [1.0])})


def test_a_blind_reading_hides_the_settings_and_counts_preferences():
    names, lines = ["independent, T 1", "tree, T 0.7", "d5p4, T 0.7, β 100"], {}
    for i, name in enumerate(names):
        texts = [[f"{name[0]}{i} says {q} times. Then: 2. It" for _ in range(4)] for q in range(70)]
        ids = [[[9, 2] if n == 0 else [9, 9] for n in range(4)] for _ in range(70)]
        lines[Unit(name, "teacher", "test", 0, 64)] = {"questions": [f"Why {q}?" for q in range(70)], "texts": texts}
        lines[Unit(name, "teacher", "test", 0, 64)]["ids"] = ids
    page, key = reading(lines, names, 60)
    assert len(key) == 180 == page.count("\n## ") and not any(name in page for name in names)
    assert {tuple(sorted(sides)) for _, *sides in key} == {tuple(sorted(x)) for x in itertools.combinations(names, 2)}
    assert 50 < sum(names.index(a) < names.index(b) for _, a, b in key) < 130  # sides are drawn
    block = page.split("\n## ")[1]
    question, first, second = key[0]
    short = {name: f"{name[0]}{i} says {question[4:-1]} times." for i, name in enumerate(names)}
    left, right = block.split("**B**")
    assert f"1. {short[first]} Then: 2. It\n2. {short[first]}\n" in left and f"4. {short[second]}" in right

    tree = ["AB"[sides.index("tree, T 0.7")] if "tree, T 0.7" in sides else "=" for _, *sides in key]
    fond = {str(number): mark for number, mark in enumerate(tree, 1)}
    shown = preferences(key, [fond, fond])
    assert "| independent, T 1 | tree, T 0.7 | 60 | -1.00 [-1.00, -1.00] |" in shown
    assert "| independent, T 1 | d5p4, T 0.7, β 100 | 60 | 0.00 [0.00, 0.00] |" in shown and "kappa 1.00" in shown
    one, other = ({str(n): mark for n, mark in enumerate(text, 1)} for text in ("AAAABBBBBB", "AAABBBBBBA"))
    shown = preferences([["?", *names[:2]]] * 10, [one, other])
    assert "| 10 | -0.20 [" in shown and "agreement 80 %, Cohen's kappa 0.58" in shown  # (0.8 - 0.52) / 0.48
