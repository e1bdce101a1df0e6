"""A decode step on CUDA: where it waits for the device, what replays change, what NaN says."""

import sys
import warnings

import pytest
import torch

import d5p4
from d5p4.decode.rows import RowRunner, Rows
from d5p4.decode.schedule import Adaptive, Checks
from d5p4.search import Beam, Tree
from tests.checkpoints import write_llada
from tests.fake import fitting
from tests.test_joining import check

replay = sys.modules["d5p4.decode.replay"]  # d5p4.decode is the function
pytestmark = pytest.mark.gpu


def run(model, prompts=("the cat", "a"), **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", d5p4.DuplicateAnswers)
        options = dict(method="d5p4", k=3, w=3, gen_length=10, seed=2, temperature=1.2) | options
        return d5p4.generate(model, list(prompts), **fitting(options))


ADAPTIVE = {"reveal": "threshold", "tau": 0.1, "block_length": 4, "order": "top", "guidance": 1.5}
WAITING = [{"method": m} for m in ("d5p4", "d5p4x", "diverse-beam", "greedy-beam", "cat", "independent")]
WAITING += [
    ADAPTIVE,
    ADAPTIVE | {"guidance_window": (0, 0.4), "select_window": (0.2, 0.6), "reveal": "factor", "tau": None},
    {"method": "tree"},
    ADAPTIVE | {"method": "tree", "temperature": 0.0, "spare": 3, "diversity": 1.0},
]


@pytest.mark.parametrize("options", WAITING, ids=str)
def test_nothing_waits_between_the_forward_and_the_next_pool(monkeypatch, tmp_path, options):
    """The loop looks at the device before a forward (which rows differ, which prompts are finished), and nowhere else.
    When a prompt leaves the batch, the loop waits, too."""
    model = d5p4.load(write_llada(tmp_path), "cuda", "bfloat16")
    run(model, **options)  # compile
    row_run, look = RowRunner.run, Checks.read

    def waiting(function):
        def wrapped(*args, **kwargs):
            torch.cuda.set_sync_debug_mode("default")
            try:
                return function(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("error")

        return wrapped

    done = []

    def last(*args, **kwargs):
        done.append(1)
        return waiting(gather)(*args, **kwargs)

    def whole(*args, **kwargs):
        try:
            return decode(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    loop, door = sys.modules["d5p4.decode.loop"], sys.modules["d5p4.generate"]  # d5p4.decode is the function
    batch = sys.modules["d5p4.decode.batch"]
    decode = door.decode
    monkeypatch.setattr(door, "decode", whole)
    gather = batch.add_answers
    monkeypatch.setattr(RowRunner, "run", waiting(row_run))
    monkeypatch.setattr(Checks, "read", waiting(look))
    monkeypatch.setattr(batch, "add_answers", last)
    waits = (
        (batch.Batch, "part"),
        (batch, "Final"),
        (loop, "merged"),
        (batch.ForwardView, "part"),
        (Adaptive, "next"),
        (Tree, "settle"),
        (Tree, "finish"),
        (Beam, "finish"),
    )
    for owner, name in waits:
        monkeypatch.setattr(owner, name, waiting(getattr(owner, name)))
    monkeypatch.setattr(Rows, "run", waiting(Rows.run) if "guidance_window" in options else Rows.run)
    try:
        run(model, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert done


TREES = [
    {"method": "tree", "temperature": 1.0},
    {"method": "tree", "temperature": 0.0, "diversity": 1.0, "spare": 2, "steps": 6, "block_length": 4},
]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize(
    "prompts", [["the cat"], ["the cat", "a"], ["a", "b", "the cat"]], ids=["even", "padded", "three"]
)
@pytest.mark.parametrize("options", [{}, *TREES], ids=str)
def test_replays_change_nothing(monkeypatch, folder, dtype, prompts, options):
    model = d5p4.load(folder, "cuda", dtype)
    recorded = []
    record = replay.Recorder._record

    def counted(self, *args):
        recorded.append(self.what)
        return record(self, *args)

    monkeypatch.setattr(replay.Recorder, "_record", counted)
    monkeypatch.setattr(replay, "OFTEN", 1)
    replayed = run(model, prompts, guidance=1.5, **options)
    wanted = {model.name, "the search"} if options else {model.name}
    assert set(recorded) == wanted, "no shape came twice: the test shows nothing"
    monkeypatch.setattr(replay, "FEW", 0)
    plain = run(model, prompts, guidance=1.5, **options)
    assert replayed.answers == plain.answers
    torch.testing.assert_close(replayed.score, plain.score, atol=1e-9 if dtype == "float64" else 1e-5, rtol=0)


@pytest.mark.parametrize("options", [{"method": "d5p4"}, *TREES], ids=str)
def test_prompts_join_steps_that_are_replayed(monkeypatch, folder, options):
    monkeypatch.setattr(replay, "OFTEN", 1)
    check(d5p4.load(folder, "cuda", "float64"), options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_names_the_prompt(tmp_path, dtype):
    model = d5p4.load(write_llada(tmp_path), "cuda", dtype)
    model.unembedding[0].data[3] = float("nan")
    with pytest.raises(d5p4.NonFiniteLogits, match="step 0, prompt [01], row"):
        run(model)
