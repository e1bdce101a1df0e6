"""The recipes: which tokens a loss counts, where rows come from, and that other libraries load the models."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import d5p4
from d5p4_lab.train import books, programs_data
from d5p4_lab.train import countdown as countdown_module
from d5p4_lab.train import countdown_data as task
from d5p4_lab.train import programs as programs_module
from d5p4_lab.train.books import DRAWS, LENGTH, Books
from d5p4_lab.train.corpus import END_TEXT, MASK, Corpus, prepare
from d5p4_lab.train.countdown import ANSWER, PROMPT, Countdown, Problems, Rows
from d5p4_lab.train.loop import Budget, train
from d5p4_lab.train.programs import Programs
from d5p4_lab.train.recipe import LEAST, chances, masks, weighted_cross_entropy

CPU = torch.device("cpu")
VOCABULARY = 300


def write_texts(folder: Path, train_words: int = 3000, val_words: int = 1500) -> Path:
    """Two books to train on and one held out, of a few words each."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(200)]

    def book(count: int) -> str:
        return " ".join(draw.choices(words, k=count))

    folder.mkdir()
    (folder / "train.txt").write_text(f"{book(train_words)}\n{END_TEXT}\n{book(train_words)}\n")
    (folder / "val.txt").write_text(book(val_words))
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    root = tmp_path_factory.mktemp("books")
    return prepare(write_texts(root / "texts"), root / "corpus", VOCABULARY)


class SmallCountdown(Countdown):
    rows = 16

    @property
    def config(self) -> dict[str, Any]:
        return super().config | {"d_model": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "mlp_hidden_size": 32}


class SmallPrograms(Programs):
    rows = 16

    @property
    def config(self) -> dict[str, Any]:
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        return super().config | heads | {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}


class SmallBooks(Books):
    rows = 4

    @property
    def config(self) -> dict[str, Any]:
        return super().config | {"hidden_dim": 16, "n_blocks": 1, "n_heads": 2}


def shaken(model: nn.Module) -> nn.Module:
    """The model without zero weights, so that every token it sees matters."""
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


# the loss

TOKENS, WIDTH, PLACES = 5, 4, 3  # of the little head


@pytest.fixture(scope="module")
def head() -> tuple[Tensor, Tensor, Tensor]:
    """Weight [V, D], bias [V] and a last token that may not be predicted."""
    draw = torch.Generator().manual_seed(0)
    banned = torch.arange(TOKENS) == TOKENS - 1
    return torch.randn(TOKENS, WIDTH, generator=draw), torch.randn(TOKENS, generator=draw), banned


def cross_entropies(states: Tensor, head: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    """[M], from the definition and without the banned token."""
    weight, bias, banned = head
    scores = (states @ weight.T + bias)[:, ~banned].exp()
    return -(scores.gather(1, targets[:, None])[:, 0] / scores.sum(1)).log()


def test_over_all_masks_the_weighted_loss_is_the_enumerated_bound_without_banned_tokens(head) -> None:
    """The states depend on the mask, as a model's do: each mask's loss counts with the chance of that mask."""
    chance, targets = 0.3, torch.tensor([0, 2, 3])
    draw = torch.Generator().manual_seed(1)
    base, shift = torch.randn(PLACES, WIDTH, generator=draw), torch.randn(PLACES, WIDTH, generator=draw)
    expected = estimate = 0.0
    for bits in product([False, True], repeat=PLACES):
        masked = torch.tensor(bits)
        states = base + masked.float() @ shift
        likely = chance ** sum(bits) * (1 - chance) ** (PLACES - sum(bits))
        expected += likely / chance * float(cross_entropies(states, head, targets)[masked].sum())
        weights = torch.full((PLACES,), 1 / chance)[masked]
        estimate += likely * float(weighted_cross_entropy(states[masked], *head, targets[masked], weights))
    assert estimate == pytest.approx(expected, rel=1e-5)


def test_chances_lie_one_in_each_equal_part_and_masks_have_the_chance_of_their_row() -> None:
    generator = torch.Generator().manual_seed(2)
    for rows in (1, 7, 128):
        firsts = []
        for _ in range(200):
            chance = chances(rows, generator)
            assert chance.shape == (rows,) and float(chance.min()) >= LEAST and float(chance.max()) <= 1
            even = ((chance.double() - LEAST) / (1 - LEAST) * rows).sort().values
            # Half a part of room for each end: rounding may put a value just over an edge.
            assert ((even - torch.arange(rows) - 0.5).abs() <= 0.5 + 1e-3).all(), rows
            firsts.append(float(chance[0]))
        assert 0.4 < sum(firsts) / len(firsts) < 0.6, "each row by itself is uniform"
        assert min(firsts) < 0.05 and max(firsts) > 0.95, rows
    chance = torch.tensor([LEAST, 0.25, 0.9])
    share = masks(chance, 20_000, torch.Generator().manual_seed(3)).float().mean(1)
    assert ((share - chance).abs() < 4 * (chance * (1 - chance) / 20_000).sqrt()).all()


# countdown


@pytest.fixture(scope="module")
def countdown() -> SmallCountdown:
    return SmallCountdown(CPU, 0, toy=True)


class Seen:
    """A model whose inputs are kept: tokens and attention mask [B, PROMPT + ANSWER]."""

    def __init__(self, model: nn.Module) -> None:
        self.model, body = model, model.body

        def watched(tokens: Tensor, attention_mask: Tensor) -> Any:
            self.tokens, self.looked = tokens, attention_mask
            return body(tokens, attention_mask)

        model.body = watched  # type: ignore[method-assign]


def test_countdown_looks_at_and_learns_nothing_past_the_window_and_before_the_prompt(countdown) -> None:
    batch, seen = next(countdown.batches(0)), Seen(shaken(countdown.build()))

    @torch.no_grad()
    def loss(rows: Rows) -> float:
        return float(countdown.loss(seen.model, rows, countdown.generator(0)))

    before = loss(batch)
    known, inside = seen.looked[:, :PROMPT], seen.looked[:, PROMPT:]
    assert (~known).any() and (~inside).any() and known.any() and inside.any()
    other_end = batch.answers.where(inside, torch.full_like(batch.answers, 3))
    other_start = batch.prompts.where(known, torch.full_like(batch.prompts, 3))
    assert not torch.equal(other_end, batch.answers) and not torch.equal(other_start, batch.prompts)
    assert loss(batch._replace(answers=other_end)) == before
    assert loss(batch._replace(prompts=other_start)) == before
    assert loss(batch._replace(answers=batch.answers.where(~inside, torch.full_like(batch.answers, 3)))) != before
    assert loss(batch._replace(prompts=batch.prompts.where(~known, torch.full_like(batch.prompts, 3)))) != before
    # At first the blocks add nothing, so a state knows only its own token: a prompt matters only if it is learned.
    fresh, other = countdown.build(), batch._replace(prompts=(batch.prompts + 1) % 10)
    losses = [countdown.loss(fresh, rows, countdown.generator(0)).item() for rows in (batch, other)]
    assert losses[0] == losses[1], "the prompt is learned"


def test_countdown_masks_answers_within_windows_of_every_length_and_one_prompt_in_ten(countdown) -> None:
    batch, seen = Problems(600, 0)[0], Seen(countdown.build())
    countdown.loss(seen.model, batch, countdown.generator(0))
    inside = seen.looked[:, PROMPT:]
    window = inside.sum(1)
    assert torch.equal(inside, torch.arange(ANSWER) < window[:, None])
    assert (window >= batch.least).all() and set(batch.least.tolist()) == set(task.WINDOW.values())
    four = task.WINDOW[4]
    assert set(window[batch.least == four].tolist()) == set(range(four, ANSWER + 1))
    assert (batch.answers[~inside] == task.END).all(), "a token of an answer lies past its window"
    prompts, answers = seen.tokens[:, :PROMPT], seen.tokens[:, PROMPT:]
    dropped = (prompts == task.MASK).all(1)
    assert torch.equal(prompts[~dropped], batch.prompts[~dropped])
    assert 0.05 < float(dropped.float().mean()) < 0.15
    hidden = answers == task.MASK
    assert torch.equal(answers[~hidden], batch.answers[~hidden])
    assert 0.4 < float(hidden[inside].float().mean()) < 0.6


@pytest.mark.parametrize("chance", [0.8, pytest.param(0.15, marks=pytest.mark.full)])
def test_countdown_loss_is_the_mean_over_the_window_at_every_chance(countdown, monkeypatch, chance: float) -> None:
    """The fresh model gives each token one cross-entropy wherever it stands, so the expectation can be written down."""
    monkeypatch.setattr(countdown_module, "chances", lambda rows, generator: torch.full((rows,), chance))
    batch, fresh = next(countdown.batches(3)), countdown.build()
    with torch.no_grad():
        state = fresh.body(torch.tensor([[task.MASK]])).states[0]
        logits = (state @ fresh.head.weight.T).masked_fill(fresh.head.banned, -torch.inf)
        costs = -logits.log_softmax(-1)[0, batch.answers]  # [B, ANSWER]
        means = costs.cumsum(1) / torch.arange(1, ANSWER + 1)  # over each window
        expected = torch.stack([row[least - 1 :].mean() for row, least in zip(means, batch.least, strict=True)]).mean()
        draws = 60 if chance == 0.8 else 200
        losses = torch.stack([countdown.loss(fresh, batch, countdown.generator(i)) for i in range(draws)])
    check_mean(losses, float(expected))


def check_mean(losses: Tensor, expected: float) -> None:
    error = float(losses.std()) / len(losses) ** 0.5
    assert error < 0.02 * expected, "too noisy to tell"
    assert abs(float(losses.mean()) - expected) < 4 * error


def test_countdown_rows_are_right_answers_and_never_held_out(countdown) -> None:
    batch = next(countdown.batches(0))
    for prompt, length, answer in zip(batch.prompts, batch.prompt_lengths, batch.answers, strict=True):
        problem = task.Problem.parse(task.decode(prompt[-int(length) :]))
        assert task.is_right(problem, task.decode(answer))
        assert not problem.heldout


# programs


@pytest.fixture(scope="module")
def programs() -> SmallPrograms:
    return SmallPrograms(CPU, 0, toy=True)


def test_programs_masks_only_answer_tokens_of_the_last_block_and_one_prompt_in_twenty(programs) -> None:
    batch, seen = programs_module.Tasks(800, 0, programs_data.MIX)[0], Seen(programs.build())
    rows = programs_module.Rows(*(part.long() for part in batch))
    programs.loss(seen.model, rows, programs.generator(0))
    place = torch.arange(rows.tokens.shape[1]) - (rows.tokens.shape[1] - rows.lengths[:, None])
    assert torch.equal(seen.looked, place >= 0)
    hidden = seen.tokens == programs_data.MASK
    assert torch.equal(seen.tokens[~hidden], rows.tokens[~hidden])
    prompt = (place >= 0) & (place < rows.prompts[:, None])
    dropped = (hidden | ~prompt).all(1)
    assert 0.02 < float(dropped.float().mean()) < 0.09 and not (hidden & prompt)[~dropped].any()
    last = (rows.lengths[:, None] - 1) // programs_data.BLOCK
    opened = (place >= rows.prompts[:, None]) & (place // programs_data.BLOCK == last)
    assert torch.equal(opened.sum(1), rows.opened) and (rows.opened > 0).all()
    assert not (hidden & ~prompt & ~opened).any()
    assert 0.4 < float(hidden[opened].float().mean()) < 0.6
    assert (opened & (place % programs_data.BLOCK == 0)).any() and (
        prompt & (place // programs_data.BLOCK == last)
    ).any()


@pytest.mark.parametrize("chance", [0.8, pytest.param(0.15, marks=pytest.mark.full)])
def test_programs_loss_is_the_mean_over_the_open_tokens_at_every_chance(programs, monkeypatch, chance: float) -> None:
    monkeypatch.setattr(programs_module, "chances", lambda rows, generator: torch.full((rows,), chance))
    batch, fresh = next(programs.batches(3)), programs.build()
    with torch.no_grad():
        state = fresh.body(torch.tensor([[programs_data.MASK]])).states[0]
        logits = (state @ fresh.head.weight.T).masked_fill(fresh.head.banned, -torch.inf)
        costs = -logits.log_softmax(-1)[0, batch.tokens]
        opened = torch.arange(batch.tokens.shape[1], 0, -1) <= batch.opened[:, None]
        expected = ((costs * opened).sum(1) / batch.opened).mean()
        draws = 60 if chance == 0.8 else 300
        losses = torch.stack([programs.loss(fresh, batch, programs.generator(i)) for i in range(draws)])
    check_mean(losses, float(expected))


# what all of them promise


def same(one: Any, other: Any) -> bool:
    parts = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
    return all(torch.equal(a, b) for a, b in parts)


def made(name: str, corpus: Corpus, seed: int) -> Any:
    if name in ("countdown", "programs"):
        return (SmallCountdown if name == "countdown" else SmallPrograms)(CPU, seed, True)
    return SmallBooks(CPU, seed, True, corpus)


@pytest.mark.parametrize("name", ["countdown", "programs", "books"])
def test_a_batch_depends_on_the_seed_and_its_number_alone(name: str, corpus: Corpus) -> None:
    def batches(seed: int, start: int) -> Iterator[Any]:
        return made(name, corpus, seed).batches(start)

    first = list(islice(batches(0, 0), 4))
    assert same(first[3], next(batches(0, 3)))
    assert not same(first[0], first[1])
    assert not same(first[0], next(batches(1, 0)))


@pytest.mark.parametrize("name", ["countdown", "programs", "books"])
def test_the_written_model_is_the_recipe_s(name: str, corpus: Corpus, tmp_path: Path, monkeypatch) -> None:
    """Trained for a step, written, read again by the library it is for, measured on held-out data."""
    problems, tasks = task.problems, programs_data.tasks
    monkeypatch.setattr(task, "problems", lambda count, **options: problems(2, **options))
    monkeypatch.setattr(programs_data, "tasks", lambda count, **options: tasks(2, **options))
    recipe = made(name, corpus, 0)
    figures = train(recipe, tmp_path, Budget(steps=1), say=lambda line: None)
    assert json.loads((tmp_path / "config.json").read_text()) == recipe.config
    assert figures and all(0 <= value < float("inf") for value in figures.values())
    model = d5p4.load(tmp_path, device="cpu")
    assert model.mask_id == recipe.config["vocab_size"] - 1 == model.tokenizer.mask_id
    assert model.tokenizer.encode(model.tokenizer.mask_token) == [model.mask_id]


# books


@pytest.mark.parametrize("recipe", [Countdown, Programs])
def test_a_recipe_writes_the_tokenizer_and_the_defaults_of_the_shipped_model(recipe, tmp_path: Path) -> None:
    recipe(CPU, 0, toy=False).write_tokenizer(tmp_path)
    shipped = Path(d5p4.__file__).parent / "models" / "weights" / recipe.name
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / name).read_text() == (shipped / name).read_text()


def test_books_rows_are_pieces_of_the_text_up_to_both_ends(corpus: Corpus) -> None:
    text = corpus.train.tobytes()
    batch = next(made("books", corpus, 0).batches(0))
    assert batch.shape == (4, LENGTH) and batch.dtype == torch.int64
    assert all(row.tobytes() in text for row in batch.numpy().astype(corpus.train.dtype))
    rows = books.crops(torch.arange(10, dtype=torch.int16), 200, 8, torch.Generator().manual_seed(0))
    assert {tuple(row) for row in rows.tolist()} == {tuple(range(s, s + 8)) for s in range(3)}


@pytest.mark.parametrize("chance", [0.8, pytest.param(0.15, marks=pytest.mark.full)])
def test_books_loss_is_the_mean_over_the_row_at_every_chance(corpus: Corpus, monkeypatch, chance: float) -> None:
    monkeypatch.setattr(books, "chances", lambda rows, generator: torch.full((rows,), chance))
    recipe = made("books", corpus, 0)
    batch, fresh = next(recipe.batches(0)), recipe.build()
    with torch.no_grad():
        state = fresh.body(torch.tensor([[fresh.mask_id]])).states[0, 0]
        logits = (fresh.head.weight @ state + fresh.head.bias).masked_fill(fresh.head.banned, -torch.inf)
        expected = -logits.log_softmax(-1)[batch].mean()
        draws = 30 if chance == 0.8 else 60
        losses = torch.stack([recipe.loss(fresh, batch, recipe.generator(i)) for i in range(draws)])
    check_mean(losses, float(expected))


def test_books_bound_of_a_model_that_knows_nothing_is_the_vocabulary(corpus: Corpus) -> None:
    """Perplexity is the number of tokens that may come, and bits per byte follow from the lengths of the text."""
    recipe = made("books", corpus, 0)
    model = recipe.build()
    assert recipe.config["mask_token_id"] == corpus.tokenizer.token_to_id(MASK) == VOCABULARY - 1
    assert model.head.banned.tolist() == [False] * (VOCABULARY - 1) + [True], "the mask may be predicted"
    nn.init.zeros_(model.vocab_embed.embedding)
    nn.init.zeros_(model.output_layer.linear.bias)
    nats = math.log(VOCABULARY - 1)
    assert recipe.nats(model, books.spread_rows(corpus.val, 8), DRAWS) == pytest.approx(nats, rel=0.05)
    figures = books.language_figures(corpus, nats, nats)
    assert figures["held-out text: perplexity per token"] == pytest.approx(VOCABULARY - 1, rel=1e-5)
    bits = math.log2(VOCABULARY - 1) * len(corpus.val) / corpus.val_bytes
    assert figures["held-out text: bits per byte"] == pytest.approx(bits, rel=1e-6)
