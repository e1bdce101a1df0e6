"""`d5p4 train` from the command line to a model that decodes; bad values end in one sentence."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

import d5p4
from d5p4_lab.train import books, countdown, judge
from d5p4_lab.train.corpus import END_TEXT, prepare
from d5p4_lab.train.loop import STATE, Run

CPU = ("--device", "cpu")


@pytest.fixture
def tiny(monkeypatch) -> None:
    """Toys of toys: the commands are the same, the models small enough for a test."""
    monkeypatch.setattr(countdown, "TOY", {"d_model": 16, "n_layers": 1, "n_heads": 2, "mlp_hidden_size": 32})
    monkeypatch.setattr(books, "TOY", {"hidden_dim": 16, "n_blocks": 1, "n_heads": 2, "cond_dim": 4})
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    monkeypatch.setattr(judge, "TOY", shape)


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Enough different words for the 8,192 tokens of the vocabulary."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(4000)]
    folder = tmp_path_factory.mktemp("texts")
    (folder / "train.txt").write_text(f"{' '.join(words)}\n{END_TEXT}\n{' '.join(words[:500])}\n")
    (folder / "val.txt").write_text(" ".join(words[1500:500:-1]))
    return folder


@pytest.fixture(scope="module")
def corpus(texts: Path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("corpus")
    prepare(texts, out, 300)
    return out


def succeeded(found) -> str:
    assert found.exit_code == 0, (found.output, found.exception)
    return found.stdout


def test_countdown_from_nothing_to_answers(cli, tiny, tmp_path: Path) -> None:
    out = tmp_path / "model"
    said = succeeded(cli("train", "countdown", "--steps", 2, "--out", out, "--seed", 4, *CPU))
    assert "countdown: " in said and "held-out puzzles of 4 numbers" in said and f"written to {out}" in said
    assert not (out / STATE).exists()
    result = d5p4.generate(d5p4.load(out, device="cpu"), "86,28,13,31:96", k=2, w=2, steps=4, seed=1)
    assert len(result.texts[0]) == 2
    assert set("".join(result.texts[0])) <= set("0123456789+-*/=,:")
    assert "| seed | 4 |" in (out / "README.md").read_text()


def test_steps_make_a_run_repeatable(cli, tiny, tmp_path: Path) -> None:
    for name in "ab":
        succeeded(cli("train", "countdown", "--steps", 2, "--out", tmp_path / name, *CPU, "--quiet"))
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert one == other


def test_quiet_says_nothing(cli, tiny, tmp_path: Path) -> None:
    assert succeeded(cli("train", "countdown", "--steps", 1, "--out", tmp_path / "m", *CPU, "--quiet")) == ""


def test_books_from_texts_to_text(cli, tiny, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    said = succeeded(cli("train", "books", "--data", texts, "--steps", 2, "--out", out, *CPU))
    assert "held-out text: bits a byte, at most" in said
    model = d5p4.load(out, device="cpu")
    assert model.mask_id == 8191
    result = d5p4.generate(model, sets=1, k=2, w=2, gen_length=8, steps=2, seed=1)
    assert len(result.texts[0]) == 2


@pytest.mark.parametrize("name", ["books", "judge"])
def test_a_prepared_corpus_is_taken_as_data(cli, tiny, corpus: Path, tmp_path: Path, name: str) -> None:
    if name == "judge":
        pytest.importorskip("transformers")
    out = tmp_path / "model"
    said = succeeded(cli("train", name, "--data", corpus, "--steps", 1, "--out", out, *CPU))
    assert "training text: perplexity a token" in said
    assert not (out / "corpus").exists()


def test_a_corpus_is_made_once_for_both(cli, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "corpus"
    assert "tokens to train on" in succeeded(cli("train", "corpus", "--data", texts, "--out", out))
    assert (out / "corpus.json").exists()


def test_nothing_of_the_user_s_is_written_over_or_removed(cli, fails, tiny, texts: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    assert "already holds README.md" in fails("train", "countdown", "--steps", 1, "--out", tmp_path, *CPU)
    assert (tmp_path / "README.md").read_text() == "mine"
    out = tmp_path / "model"
    kept = shutil.copytree(texts, out / "corpus")
    succeeded(cli("train", "books", "--data", kept, "--steps", 1, "--out", out, *CPU))
    assert sorted(path.name for path in kept.iterdir()) == ["train.txt", "val.txt"]
    succeeded(cli("train", "books", "--validate", "--data", kept, "--out", out, *CPU))
    assert not [path for path in out.iterdir() if path.name.startswith("training.")]


def test_a_changed_budget_is_refused_when_a_run_continues(cli, fails, tiny, tmp_path: Path, monkeypatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "advance", stop)
        cli("train", "countdown", "--steps", 3, "--out", tmp_path, *CPU)
    assert "budget='3 steps', not '2 steps'" in fails("train", "countdown", "--steps", 2, "--out", tmp_path, *CPU)


def test_a_model_is_measured_again(cli, tiny, tmp_path: Path) -> None:
    out = tmp_path / "model"
    said = succeeded(cli("train", "countdown", "--steps", 1, "--out", out, *CPU))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    again = succeeded(cli("train", "countdown", "--validate", "--out", out, *CPU))
    assert again and set(again.splitlines()) <= set(said.splitlines())
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}


def test_ctrl_c_and_the_same_command_again(cli, tiny, tmp_path: Path, monkeypatch) -> None:
    command = ("train", "countdown", "--steps", 3, "--out", tmp_path, *CPU)
    loss, calls = countdown.Countdown.loss, []

    def interrupted(self, *arguments):
        calls.append(0)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return loss(self, *arguments)

    monkeypatch.setattr(countdown.Countdown, "loss", interrupted)
    found = cli(*command)
    assert (found.exit_code, found.stderr) == (130, "stopped\n")
    assert "stopped at step 1; the same command continues from here" in found.stdout
    assert "continuing from step 1" in succeeded(cli(*command))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("countdown", "--minutes", 0), "minutes=0.0"),
        (("countdown", "--minutes", -1), "minutes=-1.0"),
        (("countdown", "--minutes", "nan"), "minutes=nan"),
        (("countdown", "--minutes", "inf"), "minutes=inf"),
        (("countdown", "--steps", 0), "steps=0"),
        (("countdown", "--steps", 5, "--minutes", 1), "steps=5"),
        (("countdown", "--size", "huge"), "size='huge'"),
        (("countdown", "--seed", -1), "seed=-1"),
        (("countdown", "--seed", 2**63), f"seed={2**63}"),
        (("countdown", "--device", "toaster"), "device='toaster'"),
        (("countdown", "--data", "books"), "--data books"),
        (("chess",), "'chess'"),
        (("books",), "books learns from texts"),
        (("judge",), "judge learns from texts"),
        (("corpus",), "--data"),
        (("books", "--data", "no-such-folder"), "no-such-folder"),
        (("corpus", "--data", "no-such-folder"), "no-such-folder"),
    ],
)
def test_bad_values(fails, tmp_path: Path, options, expected: str) -> None:
    out = tmp_path / "out"
    assert expected in fails("train", *options, "--out", out)
    assert not out.exists()


def test_an_out_that_is_taken(fails, cli, tiny, tmp_path: Path) -> None:
    succeeded(cli("train", "countdown", "--steps", 1, "--out", tmp_path, *CPU))
    assert "already holds a model" in fails("train", "countdown", "--steps", 1, "--out", tmp_path, *CPU)


def test_texts_too_short_for_the_vocabulary(fails, tmp_path: Path) -> None:
    for name in ("train", "val"):
        (tmp_path / f"{name}.txt").write_text("The cat sat on the mat.")
    said = fails("train", "books", "--data", tmp_path, "--out", tmp_path / "out", *CPU)
    assert "train.txt is too short for a vocabulary of 8192" in said


def test_no_out_is_a_usage_error(cli) -> None:
    found = cli("train", "countdown")
    assert found.exit_code == 2 and "--out" in found.stderr and "Traceback" not in found.stderr
