"""The trace is the decode: replayed, it gives what a callback of `generate` gets."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import pytest

import d5p4
from d5p4 import view
from d5p4.view import trace as trace_of
from d5p4.view.trace import count_right
from tests.fake import FakeModel
from tests.history import History

pytestmark = pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")

FEW_TOKENS, GREEDY = {"vocabulary": 6, "scale": 1.2, "seed": 4}, {"w": 4, "temperature": 0, "gen_length": 3}
CASES = {
    "d5p4": {},
    "independent": {"method": "independent"},
    "best-of-n": {"method": "best-of-n", "rank": "logprob"},
    "e-smc": {"method": "e-smc", "interval": 2},
    "soar": {"method": "soar", "temperature": 0, "w": 4, "shrink": False},
    "spare": {"distinct": True, "spare": 2},
    "blocks": {"block_length": 3, "steps": 4},
    "window": {"select_window": (2, 4)},
    "ancestral": {"carry_over": True, "steps": 5},
    "form": {"method": "independent", "regex": "ab[a-d]{1,2}(cde|f)"},
    "form of a tree": {"method": "tree", "regex": "a[b-e]{1,2}cd", "temperature": 0, "reveal": "threshold", "tau": 0.2},
    "choices": {"choices": ["ab", "cd", "ceaf"], "k": 2},
    "infilling and on": {"prompt": "ab" + "l" + "c", "gen_length": 4},
    "ids": {"prompt": [1, 2, 3]},
    "one": {"k": 1, "w": 1},
    "tree": {"method": "tree", "temperature": 0, "spare": 2},
    "tree that draws": {"method": "tree", "w": 4, "diversity": 1.0, "reveal": "threshold", "tau": 0.2},
    "tree with few answers": {"method": "tree", "temperature": 0, "k": 9, "gen_length": 1},
    "tree that wakes rows up": {"model": FEW_TOKENS, "method": "tree", "prompt": "ab", "k": 2} | GREEDY,
    "tree that fills": {"method": "tree", "temperature": 0, "prompt": "ab" + "l" + "c", "gen_length": 4},
}


Row = list[tuple[int, float] | None]  # a piece and its log-probability at each position; None while masked


def pools(trace: dict[str, Any]) -> list[list[Row]]:
    """The rows of every pool, and at the end those of the final one."""
    every_pool: list[list[Row]] = []
    for pool in (*trace["pools"], trace["final"]):
        before = [[None] * trace["length"] if at is None else every_pool[at[0]][at[1]] for at in pool["parents"]]
        every_pool.append([changed(row, new) for row, new in zip(before, pool["changes"], strict=True)])
    return every_pool


def answers(trace: dict[str, Any]) -> list[Row]:
    return [pools(trace)[-1][answer["row"]] for answer in trace["answers"]]


def changed(row: Row, changes: list[list[Any]]) -> Row:
    row = list(row)
    for position, piece, logprob in changes:
        assert row[position] is None, "only masks are revealed"
        row[position] = (piece, logprob)
    return row


def decoded(prompt="abc", carry_over=False, model=None, **options):
    """The trace, the result and the steps of the same call, and the model."""
    model = FakeModel(carry_over=carry_over, **model or {})
    options = {"method": "d5p4", "k": 3, "w": 2, "gen_length": 6, "seed": 5, "temperature": 1.3} | options
    kept = History()
    result = d5p4.generate(model, prompt, callback=kept, logprobs=True, **options)
    return trace_of(model, prompt, **options), result, kept[0], model


QUICK = (
    "form",
    "form of a tree",
    "choices",
    "d5p4",
    "best-of-n",
    "e-smc",
    "spare",
    "blocks",
    "window",
    "ancestral",
    "infilling and on",
    "one",
    "tree",
)
QUICK += ("tree that draws", "tree with few answers", "tree that wakes rows up", "soar")
ONCE = [case if case in QUICK else pytest.param(case, marks=pytest.mark.full) for case in CASES]


@pytest.mark.parametrize("case", ONCE)
def test_a_replayed_trace_is_the_history(case):
    trace, result, history, model = decoded(**CASES[case])
    pieces = [model.tokenizer.encode(text)[0] for text in trace["pieces"]]

    def ids(row):
        return [model.mask_id if entry is None else pieces[entry[0]] for entry in row]

    assert len(trace["pools"]) == trace["steps"] == len(history)
    shown = []  # per step, the rows that the trace shows: those of a tree that do not sleep
    for pool, rows, step in zip(trace["pools"], pools(trace), history, strict=False):
        shown.append(list(range(len(step.group))) if step.awake is None else step.awake.nonzero()[:, 0].tolist())
        assert [ids(row) for row in rows] == step.tokens[shown[-1]].tolist()
        assert pool["score"] == pytest.approx(step.scores[shown[-1]].tolist(), abs=1e-6)
        if step.awake is not None:
            continue
        assert pool["chosen"] == step.parents.tolist() and pool["group"] == step.group.tolist()
        assert pool["quality"] == pytest.approx(step.quality.tolist(), abs=1e-6)
        size = len(step.group)
        below = [float(step.similarity[i, j]) for i in range(size) for j in range(i)]
        assert (pool["similarity"] or []) == pytest.approx(below, abs=1e-4)
    assert len(trace["answers"]) == len(result.texts[0])
    for rank, (answer, row) in enumerate(zip(trace["answers"], answers(trace), strict=True)):
        rows = result.lineage[0][rank].tolist()
        assert answer["lineage"] == [at.index(row) if row in at else None for at, row in zip(shown, rows, strict=True)]
        assert answer["text"] == result.texts[0][rank]
        assert ids(row)[: answer["end"]] == result.answers[0][rank]
        assert [chance for _, chance in row[: answer["end"]]] == pytest.approx(result.logprobs[0][rank], abs=1e-4)
        assert answer["score"] == pytest.approx(float(result.score[0, rank]), rel=1e-5)
    slept = [answer for answer in trace["answers"] if None in answer["lineage"]]
    assert bool(slept) == (case == "tree that wakes rows up")
    assert trace["distinct"] == int(result.distinct[0]) and trace["rows"] == int(result.rows[0])
    assert trace["rows_nominal"] == int(result.rows_nominal[0]) and trace["seed"] == 5
    assert trace["distances"] == [pytest.approx(row, abs=1e-4) for row in result[0].distances]
    assert trace["near_copies"] == result[0].near_copies
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace  # plain JSON, no NaN


def test_the_recording_of_the_playground_is_what_its_command_gives(tmp_path):
    """By texts, because other machines may round differently."""
    from d5p4_lab.__main__ import recording

    def texts(file):
        traces = json.loads(file.read_text(encoding="utf-8"))["traces"]
        return [(trace["method"], trace["prompt"], [answer["text"] for answer in trace["answers"]]) for trace in traces]

    recording(tmp_path / "recording.json")
    shipped = texts(view.page_folder() / "recording.json")
    assert shipped == texts(tmp_path / "recording.json"), "run `make recording`"
    assert [method for method, _, _ in shipped] == ["tree", "independent"]


def test_the_callers_seed_and_place_count():
    """A server decodes several prompts in one call, and drops some on the way."""
    model, recorder = FakeModel(), view.Recorder(FakeModel())

    def listen(shot):
        numbers = shot.prompts.tolist()
        recorder.step(shot, numbers.index(2))
        return [0] if shot.step == 1 else None

    options = {"method": "d5p4", "k": 2, "w": 2, "gen_length": 5, "seed": 3}
    result = d5p4.generate(model, ["ab", "ac", "ad"], callback=listen, **options)
    trace = recorder.trace("ad", result, 2, 77, 0.5)
    alone = trace_of(model, "ad", **options)
    assert trace["seed"] == 77 and trace["seconds"] == 0.5
    for name in ("pools", "answers", "pieces", "distances"):
        assert trace[name] == alone[name]


def test_a_recorder_lets_go_of_every_step():
    """A view holds the hidden states of its step."""
    recorder, alive = view.Recorder(FakeModel()), []

    def listen(shot):
        recorder.step(shot, 0)
        alive.append(weakref.ref(shot.view))
        if shot.step == 3:
            gc.collect()
            assert sum(ref() is not None for ref in alive) <= 2  # this step's and at most the one before

    d5p4.generate(FakeModel(), "ab", method="d5p4", k=2, w=2, gen_length=4, seed=1, callback=listen)
    assert len(alive) == 4


def test_answers_to_a_puzzle_are_graded_and_what_is_no_puzzle_is_not():
    model, right = d5p4.load("countdown", dtype="float32"), "86+28=114,31-13=18,114-18=96"
    texts = [right, "31-13=18,28+86=114,114-18=96", right[:-1] + "7", ""]
    marks = view.grade(model, "86,28,13,31:96", texts)
    assert marks == [True, True, False, False] and count_right(model, texts, marks) == 1
    for prompt in ("86,28", None, [1, 2], [{"role": "user", "content": "86,28,13,31:96"}]):
        assert view.grade(model, prompt, [right]) is None, prompt
    assert view.grade(FakeModel(), "86,28,13,31:96", [right]) is None  # another model has no grader
    assert decoded()[0]["right"] is None
