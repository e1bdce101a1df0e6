"""`python -m d5p4_lab train` makes a model that decodes; bad values give a one-line error."""

import random

import pytest
from typer.testing import CliRunner

import d5p4
from d5p4_lab.__main__ import app
from d5p4_lab.train import countdown
from d5p4_lab.train.books import Books
from d5p4_lab.train.corpus import END_TEXT
from d5p4_lab.train.countdown import Countdown
from d5p4_lab.train.folder import STATE

CPU = ("--device", "cpu")


@pytest.fixture(scope="module", autouse=True)
def tiny():
    """Make the models and their validation small enough for a test; the commands stay the same."""
    problems = countdown.problems
    small = {"d_model": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "mlp_hidden_size": 32}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Countdown, "small", small)
        patch.setattr(Books, "small", {"hidden_dim": 16, "n_blocks": 1, "n_heads": 2, "cond_dim": 4})
        patch.setattr(countdown, "problems", lambda count, **options: problems(2, **options))
        yield


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(1500)]
    folder = tmp_path_factory.mktemp("texts")
    (folder / "train.txt").write_text(f"{' '.join(words)}\n{END_TEXT}\n{' '.join(words[:500])}\n")
    (folder / "val.txt").write_text(" ".join(words[1500:500:-1]))
    return folder


def succeeded(outcome):
    assert outcome.exit_code == 0, (outcome.output, outcome.exception)
    return outcome.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A countdown model of two steps, and the output of the command."""
    out = tmp_path_factory.mktemp("trained") / "model"
    command = ["train", "countdown", "--steps", "2", "--out", str(out), "--seed", "4", *CPU]
    return out, succeeded(CliRunner().invoke(app, command))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_countdown_from_nothing_to_answers(trained):
    out, printed = trained
    assert "countdown: " in printed and "held-out puzzles of 4 numbers" in printed and f"written to {out}" in printed
    assert not (out / STATE).exists()
    result = d5p4.generate(d5p4.load(out, device="cpu"), "86,28,13,31:96", k=2, steps=4, seed=1)
    assert len(result.texts[0]) == 2
    assert set("".join(result.texts[0])) <= set("0123456789+-*/=,:")


def test_a_finished_model_is_measured_again_and_never_written_over(cli, fails, trained):
    out, printed = trained
    before = contents(out)
    measured = succeeded(cli("train", "countdown", "--validate", "--out", out, *CPU))
    assert measured and set(measured.splitlines()) <= set(printed.splitlines())
    assert "already has a model" in fails("train", "countdown", "--steps", 1, "--out", out, *CPU)
    assert contents(out) == before


def test_books_from_texts_to_text_and_the_user_s_files_stay(cli, fails, texts, tmp_path):
    (tmp_path / "README.md").write_text("mine")
    assert "already has README.md" in fails("train", "countdown", "--steps", 1, "--out", tmp_path, *CPU)
    assert (tmp_path / "README.md").read_text() == "mine"
    out, corpus = tmp_path / "model", tmp_path / "corpus"
    made = succeeded(cli("train", "corpus", "--data", texts, "--vocabulary", 300, "--out", corpus))
    before = contents(corpus)
    options = ("books", "--data", corpus, "--out", out, *CPU)
    assert "held-out text: bits per byte, at most" in succeeded(cli("train", *options, "--steps", 1))
    model = d5p4.load(out, device="cpu")
    assert len(d5p4.generate(model, sets=1, k=2, gen_length=8, steps=2, seed=1).texts[0]) == 2
    assert "tokens to train on" in made and contents(corpus) == before


def test_bad_values_are_named_and_nothing_is_written(cli, fails, tmp_path):
    short = tmp_path / "short"
    short.mkdir()
    (short / "train.txt").write_text("The cat sat on the mat.")
    (short / "val.txt").write_text("Rain fell in the night.")
    succeeded(cli("train", "corpus", "--data", short, "--vocabulary", 260, "--out", short / "corpus"))
    for options, expected in [
        (("countdown", "--minutes", 0), "minutes=0.0"),
        (("countdown", "--steps", 0), "steps=0"),
        (("countdown", "--steps", 5, "--minutes", 1), "steps=5"),
        (("countdown", "--size", "huge"), "size='huge'"),
        (("countdown", "--seed", -1), "seed=-1"),
        (("countdown", "--data", "books"), "countdown makes its own tasks: leave out --data books"),
        (("chess",), "no recipe 'chess': choose one of countdown, programs, books"),
        (("books",), "books learns from texts"),
        (("corpus", "--data", "texts", "--steps", 1), "trains nothing"),
        (("corpus", "--data", short), "train.txt is too short for a vocabulary of 8192"),
        (("books", "--data", short / "corpus"), "the train text has"),
    ]:
        assert expected in fails("train", *options, "--out", tmp_path / "out"), options
    assert not any(path.is_file() for path in tmp_path.glob("out/*"))
    outcome = cli("train", "countdown")
    assert outcome.exit_code == 2 and "--out" in outcome.stderr and "Traceback" not in outcome.stderr
