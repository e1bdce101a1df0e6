"""The recipes: which tokens a loss counts, where rows come from, and that the library loads what they write."""

import json
import math
import random
from itertools import islice, product

import pytest
import torch

import d5p4
from d5p4_lab.train import books, countdown, programs
from d5p4_lab.train import countdown_data as puzzles
from d5p4_lab.train.corpus import END_TEXT, prepare
from d5p4_lab.train.loop import Budget, train
from d5p4_lab.train.programs_data import BLOCK, MASK, spell
from d5p4_lab.train.recipe import LEAST, chances, masks, weighted_cross_entropy

CPU = torch.device("cpu")
VOCABULARY = 300


def write_texts(folder, train_words=3000, val_words=1500):
    """Two books to train on and one held out, of a few words each."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(200)]
    first, second, third = (" ".join(draw.choices(words, k=count)) for count in (train_words, train_words, val_words))
    folder.mkdir()
    (folder / "train.txt").write_text(f"{first}\n{END_TEXT}\n{second}\n")
    (folder / "val.txt").write_text(third)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("books")
    return prepare(write_texts(root / "texts"), root / "corpus", VOCABULARY)


class SmallCountdown(countdown.Countdown):
    batch_rows = (16, 16)
    small = {"d_model": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "mlp_hidden_size": 32}


class SmallPrograms(programs.Programs):
    batch_rows = (16, 16)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 2}


class SmallBooks(books.Books):
    batch_rows = (4, 4)
    small = {"hidden_dim": 16, "n_blocks": 1, "n_heads": 2}


RECIPES = {"countdown": SmallCountdown, "programs": SmallPrograms, "books": SmallBooks}


def made(name, corpus, seed=0, rows=None):
    recipe = RECIPES[name](CPU, seed, True, *([corpus] if name == "books" else []))
    recipe.rows = rows or recipe.rows
    return recipe


class Seen:
    """A model whose inputs are kept: tokens and attention mask."""

    def __init__(self, model):
        self.model, body = model, model.body

        def watched(tokens, attention_mask):
            self.tokens, self.looked = tokens, attention_mask
            return body(tokens, attention_mask)

        model.body = watched


# the loss


def test_over_all_masks_the_weighted_loss_is_the_enumerated_bound_without_banned_tokens():
    """The states depend on the mask, as a model's do: each mask's loss counts with the chance of that mask."""
    chance, targets, draw = 0.3, torch.tensor([0, 2, 3]), torch.Generator().manual_seed(1)
    weight, bias, base, shift = (torch.randn(*shape, generator=draw) for shape in ((5, 4), (5,), (3, 4), (3, 4)))
    banned = torch.arange(5) == 4
    expected = estimate = 0.0
    for bits in product([False, True], repeat=3):
        masked = torch.tensor(bits)
        states = base + masked.float() @ shift
        likely = chance ** sum(bits) * (1 - chance) ** (3 - sum(bits))
        scores = (states @ weight.T + bias)[:, ~banned].exp()
        costs = -(scores.gather(1, targets[:, None])[:, 0] / scores.sum(1)).log()
        expected += likely / chance * float(costs[masked].sum())
        weights = torch.full((3,), 1 / chance)[masked]
        loss = weighted_cross_entropy(states[masked], weight, bias, banned, targets[masked], weights)
        estimate += likely * float(loss)
    assert estimate == pytest.approx(expected, rel=1e-5)


def test_chances_lie_one_in_each_equal_part_and_masks_have_the_chance_of_their_row():
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
    chance = torch.tensor([LEAST, 0.25, 0.9])
    share = masks(chance, 20_000, torch.Generator().manual_seed(3)).float().mean(1)
    assert ((share - chance).abs() < 4 * (chance * (1 - chance) / 20_000).sqrt()).all()


@pytest.mark.parametrize("chance", [0.8, pytest.param(0.15, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", RECIPES)
def test_the_loss_is_the_mean_over_the_open_tokens_at_every_chance(corpus, monkeypatch, name, chance):
    """A fresh model gives each token one cross-entropy wherever it stands, so the expectation can be written down."""
    for module in (books, countdown, programs):
        monkeypatch.setattr(module, "chances", lambda rows, generator: torch.full((rows,), chance))
    recipe = made(name, corpus)
    batch, fresh = next(recipe.batches(3)), recipe.build()
    targets = {"books": batch, "countdown": getattr(batch, "answers", None), "programs": getattr(batch, "tokens", None)}
    with torch.no_grad():
        state = fresh.body(torch.tensor([[fresh.mask_id]])).states[0]
        logits = state @ fresh.head.weight.T + (0 if fresh.head.bias is None else fresh.head.bias)
        costs = -logits.masked_fill(fresh.head.banned, -torch.inf).log_softmax(-1)[0, targets[name]]
        if name == "countdown":  # windows of all lengths from the least
            means = costs.cumsum(1) / torch.arange(1, costs.shape[1] + 1)
            parts = [row[least - 1 :].mean() for row, least in zip(means, batch.least, strict=True)]
        elif name == "programs":
            parts = [row[len(row) - opened :].mean() for row, opened in zip(costs, batch.opened, strict=True)]
        else:
            parts = costs.mean(1)
        draws = 60 if chance == 0.8 else 300
        losses = torch.stack([recipe.loss(fresh, batch, recipe.generator(i)) for i in range(draws)])
    expected, error = float(torch.stack(tuple(parts)).mean()), float(losses.std()) / draws**0.5
    assert error < 0.02 * expected, "too noisy to tell"
    assert abs(float(losses.mean()) - expected) < 4 * error


def test_countdown_sees_windows_of_every_length_and_learns_nothing_outside(corpus):
    recipe = made("countdown", corpus, rows=600)
    model = recipe.build()
    with torch.no_grad():
        for parameter in model.parameters():  # no zero weights, so that every token that the model sees matters
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)))
    batch, seen = next(recipe.batches(0)), Seen(model)

    @torch.no_grad()
    def loss(**changes):
        return float(recipe.loss(seen.model, batch._replace(**changes), recipe.generator(0)))

    before = loss()
    known, inside = seen.looked.split([countdown.PROMPT, countdown.ANSWER], 1)
    (prompts, answers), window = seen.tokens.split([countdown.PROMPT, countdown.ANSWER], 1), inside.sum(1)
    assert torch.equal(inside, torch.arange(countdown.ANSWER) < window[:, None])
    four = puzzles.WINDOW[4]
    assert set(window[batch.least == four].tolist()) == set(range(four, countdown.ANSWER + 1))
    assert (window >= batch.least).all() and (batch.answers[~inside] == puzzles.END).all()
    dropped, hidden = (prompts == puzzles.MASK).all(1), answers == puzzles.MASK
    assert torch.equal(prompts[~dropped], batch.prompts[~dropped]) and 0.05 < float(dropped.float().mean()) < 0.15
    assert torch.equal(answers[~hidden], batch.answers[~hidden]) and 0.4 < float(hidden[inside].float().mean()) < 0.6
    for name, part in (("answers", inside), ("prompts", known)):
        assert loss(**{name: getattr(batch, name).masked_fill(~part, 3)}) == before
        assert loss(**{name: getattr(batch, name).masked_fill(part, 3)}) != before


def test_programs_masks_only_answer_tokens_of_the_last_block_and_one_prompt_in_twenty(corpus):
    recipe = made("programs", corpus, rows=800)
    rows, seen = next(recipe.batches(0)), Seen(recipe.build())
    recipe.loss(seen.model, rows, recipe.generator(0))
    place = torch.arange(rows.tokens.shape[1]) - (rows.tokens.shape[1] - rows.lengths[:, None])
    assert torch.equal(seen.looked, place >= 0)
    hidden, prompt = seen.tokens == MASK, (place >= 0) & (place < rows.prompts[:, None])
    assert torch.equal(seen.tokens[~hidden], rows.tokens[~hidden])
    dropped = (hidden | ~prompt).all(1)
    assert 0.02 < float(dropped.float().mean()) < 0.09 and not (hidden & prompt)[~dropped].any()
    opened = (place >= rows.prompts[:, None]) & (place // BLOCK == (rows.lengths[:, None] - 1) // BLOCK)
    assert torch.equal(opened.sum(1), rows.opened) and (rows.opened > 0).all()
    assert not (hidden & ~prompt & ~opened).any() and 0.4 < float(hidden[opened].float().mean()) < 0.6


# what all of them promise


@pytest.mark.parametrize("name", RECIPES)
def test_a_batch_depends_on_the_seed_and_its_number_alone(name, corpus):
    def same(one, other):
        return all(map(torch.equal, one, other))

    first = list(islice(made(name, corpus).batches(0), 4))
    assert same(first[3], next(made(name, corpus).batches(3))) and not same(first[0], first[1])
    assert not same(first[0], next(made(name, corpus, seed=1).batches(0)))


@pytest.mark.parametrize("name", RECIPES)
def test_the_written_model_is_the_recipe_s(name, corpus, tmp_path, monkeypatch):
    """Trained for a step, written, read again by the library, measured on held-out data."""
    problems, tasks = countdown.problems, programs.task.tasks
    monkeypatch.setattr(countdown, "problems", lambda count, **options: problems(2, **options))
    monkeypatch.setattr(programs.task, "tasks", lambda count, **options: tasks(2, **options))
    recipe = made(name, corpus)
    figures = train(recipe, tmp_path, Budget(steps=1), say=lambda line: None)
    assert json.loads((tmp_path / "config.json").read_text()) == recipe.config
    assert figures and all(0 <= value < float("inf") for value in figures.values())
    model = d5p4.load(tmp_path, device="cpu")
    assert model.mask_id == recipe.config["vocab_size"] - 1 == model.tokenizer.mask_id
    assert model.tokenizer.encode(model.tokenizer.mask_token) == [model.mask_id]
    if name == "books":
        bits = math.log2(figures["held-out text: perplexity per token, at most"]) * len(corpus.val) / corpus.val_bytes
        assert figures["held-out text: bits per byte, at most"] == pytest.approx(bits)


def test_the_data_are_spelled_in_the_tokens_of_the_shipped_model():
    for name, data in (("countdown", puzzles), ("programs", programs.task)):
        model, prompt = d5p4.load(name, device="cpu"), "86,28,13,31:96" if data is puzzles else "4 -7 2>2 4|-3 8>8:"
        spelled = [puzzles.CHARACTERS.index(c) for c in prompt] if data is puzzles else spell(prompt)
        assert model.tokenizer.encode(prompt) == spelled
        assert (model.mask_id, model.tokenizer.token_id("<|endoftext|>")) == (data.MASK, data.END)
