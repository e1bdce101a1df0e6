"""The models in the box do what their cards say: they solve tasks, listen to guidance, respect given text."""

from pathlib import Path

import pytest
import torch

import d5p4
from d5p4.cli.info import describe
from d5p4.eval import programs as language
from d5p4.eval.countdown import WINDOW, Problem, is_right
from d5p4.models.checkpoint import weight_files
from d5p4.models.load import find, shipped_models
from d5p4_lab.puzzles import problems
from d5p4_lab.train.programs_data import tasks

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("countdown", "programs", "books")
MIB = 2**20
pytestmark = pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")  # small sets repeat


@pytest.fixture(scope="module")
def countdown():
    return d5p4.load("countdown", device="cpu")


@pytest.fixture(scope="module")
def programs():
    return d5p4.load("programs", device="cpu")


@pytest.fixture(scope="module")
def books():
    return d5p4.load("books", device="cpu")


def solve(model, puzzles, **options):
    """The answers of a method to puzzles of one size, with a window that fits them."""
    window = WINDOW[len(puzzles[0].numbers)]
    return d5p4.generate(model, [puzzle.prompt for puzzle in puzzles], gen_length=window, seed=0, **options)


def different_right(puzzles, texts):
    """For each puzzle, how many different right answers."""
    return [
        len({answer for answer in answers if is_right(puzzle, answer)})
        for puzzle, answers in zip(puzzles, texts, strict=True)
    ]


def test_names_lead_to_small_shards_with_a_card():
    for name in NAMES:
        folder = find(name)
        assert folder == shipped_models()[name]
        files = weight_files(folder)
        assert all(file.stat().st_size <= 15 * MIB for file in files)
        assert sorted(files) == sorted(folder.glob("*.safetensors")), "no weights that nothing reads"
        card = (folder / "README.md").read_text(encoding="utf-8")
        for part in ("Data:", "| seed |", "| hardware |", "| training time |", f"train {name}", "held-out", "Licence"):
            assert part in card, f"the card of {name} says nothing about {part}"
        assert "not good for" in card and f"{describe(name, 'cpu')['parameters']:,}" in card, name


@pytest.mark.full
def test_d5p4_and_the_tree_find_more_right_answers_than_independent_sampling(countdown):
    puzzles = problems(40, 4, seed=6)
    options = {"independent": {}, "d5p4": {}, "d5p4, distinct": {"distinct": True}, "tree": {}}
    counts = {
        name: sum(different_right(puzzles, solve(countdown, puzzles, k=4, method=name.split(",")[0], **extra).texts))
        for name, extra in options.items()
    }
    assert counts["d5p4"] > 1.1 * counts["independent"]
    assert counts["tree"] > counts["d5p4, distinct"] > 1.1 * counts["independent"]


def test_the_default_length_holds_every_size(countdown):
    """Without gen_length the window is 48: the answer ends by itself, and end-of-text is cut."""
    puzzle = problems(1, 3, seed=2)[0]
    result = d5p4.generate(countdown, puzzle.prompt, k=1, seed=0)
    assert any(is_right(puzzle, answer) for answer in result.texts[0])
    assert result.sequences.shape[-1] == len(puzzle.prompt) + 48


def test_countdown_fills_in_around_given_steps(countdown):
    puzzle = Problem.parse("86,28,13,31:96")
    hole = countdown.tokenizer.mask_token
    given = f"86,28,13,31:9631-13=18,{hole * 9},{hole * 9}"
    filled = d5p4.generate(countdown, given, k=2, eos="never", seed=0).texts[0]
    for text in filled:
        assert text.startswith("86,28,13,31:9631-13=18,") and len(text) == 42 and text[32] == ","
    answers = [text.removeprefix(puzzle.prompt) for text in filled]
    assert any(is_right(puzzle, answer) for answer in answers)


def solved(model, count, operations, **options):
    """How many held-out tasks have a right answer in the set, and how many in its first place. All texts differ."""
    drawn = tasks(count, operations, seed=5)
    texts = d5p4.generate(model, [task.prompt for task in drawn], seed=0, **options).texts
    assert all(len(set(answers)) == options["k"] for answers in texts)
    right = [[language.is_right(task, text) for text in answers] for task, answers in zip(drawn, texts, strict=True)]
    return sum(map(any, right)), sum(marks[0] for marks in right)


def test_programs_solves_held_out_tasks(programs):
    """With defaults, four answers solve two in three of 20 tasks, and the first answer nearly half of them."""
    any_right, first_right = solved(programs, 20, 3, k=4)
    assert any_right >= 13 and first_right >= 9
    assert programs.carry_over, "config.json says how answers are ranked"


@pytest.mark.full
@pytest.mark.parametrize(("operations", "share"), [(3, 0.7), (4, 0.42), (5, 0.22)])
def test_programs_solves_tasks_of_every_size(programs, operations, share):
    assert solved(programs, 200, operations, k=4)[0] >= share * 200


def test_programs_stores_finished_blocks_and_gives_the_same_answers():
    """The shipped model in float64, with prompts of several lengths together, and alone without a cache."""
    model = d5p4.load("programs", device="cpu", dtype=torch.float64)
    prompts = [task.prompt for operations in (3, 5) for task in tasks(2, operations, seed=4)]
    stored = d5p4.generate(model, prompts, k=4, seed=1)
    assert stored.settings.cache == "exact"
    alone = [d5p4.generate(model, prompt, k=4, seed=1, cache="none") for prompt in prompts]
    assert stored.texts == [result.texts[0] for result in alone]
    assert int(stored.tokens_run.sum()) < sum(int(result.tokens_run.sum()) for result in alone)


def test_books_prefers_english_to_its_words_in_disorder(books):
    text = "She had gone down to the garden early in the morning, before anyone in the house was awake."
    disorder = " ".join(sorted(text.split()))
    real, shuffled = (d5p4.loglikelihood(books, words, samples=8, seed=0) for words in (text, disorder))
    assert real > shuffled + 10
