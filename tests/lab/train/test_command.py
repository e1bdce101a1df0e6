"""`python -m d5p4_lab train` makes a model that decodes; bad values give a one-line error."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import d5p4
from d5p4_lab.__main__ import app
from d5p4_lab.train import countdown_data as task
from d5p4_lab.train.books import Books
from d5p4_lab.train.corpus import END_TEXT
from d5p4_lab.train.countdown import Countdown
from d5p4_lab.train.folder import STATE

CPU = ("--device", "cpu")


@pytest.fixture(scope="module", autouse=True)
def tiny() -> Iterator[None]:
    """Make the models and their validation small enough for a test; the commands stay the same."""
    problems = task.problems
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Countdown, "small", {"d_model": 16, "n_layers": 1, "n_heads": 2, "mlp_hidden_size": 32})
        patch.setattr(Books, "small", {"hidden_dim": 16, "n_blocks": 1, "n_heads": 2, "cond_dim": 4})
        patch.setattr(task, "problems", lambda count, **options: problems(2, **options))
        yield


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(1500)]
    folder = tmp_path_factory.mktemp("texts")
    (folder / "train.txt").write_text(f"{' '.join(words)}\n{END_TEXT}\n{' '.join(words[:500])}\n")
    (folder / "val.txt").write_text(" ".join(words[1500:500:-1]))
    return folder


def succeeded(outcome) -> str:
    assert outcome.exit_code == 0, (outcome.output, outcome.exception)
    return outcome.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, str]:
    """A countdown model of two steps, and the output of the command."""
    out = tmp_path_factory.mktemp("trained") / "model"
    command = ["train", "countdown", "--steps", "2", "--out", str(out), "--seed", "4", *CPU]
    return out, succeeded(CliRunner().invoke(app, command))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_countdown_from_nothing_to_answers(trained) -> None:
    out, printed = trained
    assert "countdown: " in printed and "held-out puzzles of 4 numbers" in printed and f"written to {out}" in printed
    assert not (out / STATE).exists()
    result = d5p4.generate(d5p4.load(out, device="cpu"), "86,28,13,31:96", k=2, steps=4, seed=1)
    assert len(result.texts[0]) == 2
    assert set("".join(result.texts[0])) <= set("0123456789+-*/=,:")
    assert "| seed | 4 |" in (out / "README.md").read_text()


def test_steps_make_a_run_repeatable_and_quiet_prints_nothing(cli, trained, tmp_path: Path) -> None:
    command = ("train", "countdown", "--steps", 2, "--seed", 4, "--out", tmp_path / "again", *CPU, "--quiet")
    assert succeeded(cli(*command)) == ""
    assert contents(tmp_path / "again")["model.safetensors"] == contents(trained[0])["model.safetensors"]


def test_a_finished_model_is_measured_again_and_never_written_over(cli, fails, trained) -> None:
    out, printed = trained
    before = contents(out)
    measured = succeeded(cli("train", "countdown", "--validate", "--out", out, *CPU))
    assert measured and set(measured.splitlines()) <= set(printed.splitlines())
    assert "already has a model" in fails("train", "countdown", "--steps", 1, "--out", out, *CPU)
    assert contents(out) == before


def test_books_from_texts_to_text_and_the_user_s_files_stay(cli, fails, texts: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    assert "already has README.md" in fails("train", "countdown", "--steps", 1, "--out", tmp_path, *CPU)
    assert (tmp_path / "README.md").read_text() == "mine"
    out = tmp_path / "model"
    options = ("books", "--data", texts, "--vocabulary", 300, "--out", out, *CPU)
    assert "held-out text: bits per byte, at most" in succeeded(cli("train", *options, "--steps", 1))
    succeeded(cli("train", *options, "--validate"))
    assert sorted(contents(texts)) == ["train.txt", "val.txt"]
    assert not list(out.glob("training.*"))
    model = d5p4.load(out, device="cpu")
    assert model.mask_id == 299
    assert len(d5p4.generate(model, sets=1, k=2, gen_length=8, steps=2, seed=1).texts[0]) == 2


def test_a_corpus_that_was_made_before_is_used(cli, texts: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    made = succeeded(cli("train", "corpus", "--data", texts, "--vocabulary", 300, "--out", corpus))
    assert "tokens to train on" in made
    before = contents(corpus)
    printed = succeeded(cli("train", "books", "--data", corpus, "--steps", 1, "--out", tmp_path / "model", *CPU))
    assert "training text: perplexity per token" in printed
    assert contents(corpus) == before


def test_ctrl_c_and_the_same_command_again(cli, fails, tmp_path: Path, monkeypatch) -> None:
    command = ("train", "countdown", "--out", tmp_path, *CPU, "--steps")
    loss, calls = Countdown.loss, []

    def interrupted(self, *arguments):
        calls.append(0)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return loss(self, *arguments)

    monkeypatch.setattr(Countdown, "loss", interrupted)
    outcome = cli(*command, 3)
    assert (outcome.exit_code, outcome.stderr) == (130, "stopped\n")
    assert "stopped at step 1; the same command continues from here" in outcome.stdout
    assert "budget='3 steps', not '2 steps'" in fails(*command, 2)
    assert "continuing from step 1" in succeeded(cli(*command, 3))


def test_bad_values_are_named_and_nothing_is_written(cli, fails, tmp_path: Path) -> None:
    for options, expected in [
        (("countdown", "--minutes", 0), "minutes=0.0"),
        (("countdown", "--minutes", "nan"), "minutes=nan"),
        (("countdown", "--minutes", "inf"), "minutes=inf"),
        (("countdown", "--steps", 0), "steps=0"),
        (("countdown", "--steps", 5, "--minutes", 1), "steps=5"),
        (("countdown", "--size", "huge"), "size='huge'"),
        (("countdown", "--seed", -1), "seed=-1"),
        (("countdown", "--seed", 2**63), f"seed={2**63}"),
        (("countdown", "--device", "toaster"), "device='toaster'"),
        (("countdown", "--data", "books"), "countdown makes its own tasks: leave out --data books"),
        (("chess",), "no recipe 'chess': choose one of countdown, programs, books"),
        (("books",), "books learns from texts"),
        (("corpus",), "--data"),
        (("corpus", "--data", "texts", "--steps", 1), "trains nothing"),
        (("books", "--data", "no-such-folder"), "no-such-folder"),
        (("corpus", "--data", "no-such-folder"), "no-such-folder"),
    ]:
        message = fails("train", *options, "--out", tmp_path / "out")
        assert expected in message, options
        assert not (tmp_path / "out").exists(), options
    outcome = cli("train", "countdown")
    assert outcome.exit_code == 2 and "--out" in outcome.stderr and "Traceback" not in outcome.stderr


def test_short_texts_are_refused_with_the_reason(fails, texts: Path, tmp_path: Path) -> None:
    command = ("train", "books", "--data", tmp_path, "--out", tmp_path / "out", *CPU)
    (tmp_path / "train.txt").write_text("The cat sat on the mat.")
    (tmp_path / "val.txt").write_text("Rain fell in the night.")
    assert "train.txt is too short for a vocabulary of 8192" in fails(*command)
    assert "the train text has" in fails(*command, "--vocabulary", 260)
    (tmp_path / "train.txt").write_bytes((texts / "train.txt").read_bytes())
    assert "the val text has" in fails(*command[:-3], tmp_path / "other", *CPU, "--vocabulary", 260)
