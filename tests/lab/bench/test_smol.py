"""The benchmark of smol: its causal base by enumeration, smol's chain by whole forwards, and that every stage runs."""

import itertools
import json
import random
import shutil
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from d5p4.models.checkpoint import read_json
from d5p4_lab.bench import read, write
from d5p4_lab.bench import smol as bench
from d5p4_lab.bench.smol import serves_to_tune, student_nats
from d5p4_lab.scoring.causal import Teacher, cut, in_batches, search_step
from d5p4_lab.train.loop import Budget, train
from d5p4_lab.train.smol import Body, random_base
from d5p4_lab.train.smol_data import END
from tests.lab import smol

VOCABULARY, LENGTH = 4, 3  # of the tiny causal model that is enumerated


@pytest.fixture(scope="module")
def tiny():
    shape = smol.SHAPE | {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24}
    base = random_base(shape)
    return Teacher(Body(shape, base, 0, torch.float32))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    root = tmp_path_factory.mktemp("smol")
    recipe = smol.recipe(block=4, rank=4)
    recipe.rates = (0.0, 0.01)
    train(recipe, root / "adapter", Budget(steps=5), say=lambda line: None)
    return smol.load(smol.write_base(root / "base"), root / "adapter")


def law(teacher, prompt, temperature, top_p=1.0):
    """Return the probability of every answer of at most LENGTH tokens, by whole forwards."""
    answers = {(): 1.0}
    for _ in range(LENGTH):
        grown = {}
        for answer, chance in answers.items():
            if END in answer:
                grown[answer] = grown.get(answer, 0) + chance
                continue
            tokens = torch.tensor([[*prompt, *answer]])
            at = torch.arange(tokens.shape[1])
            logits = teacher.body.logits(teacher.body(tokens, at, (at[:, None] >= at)[None, None])[:, -1])
            scores = kept(logits[0] / temperature, top_p)
            grown |= {(*answer, token): chance * scores[token] for token in range(VOCABULARY)}
        answers = grown
    return {answer: chance for answer, chance in answers.items() if chance > 0}


def kept(logits, top_p):
    """Return probabilities of the fewest tokens with a mass of at least top_p."""
    chances, mass = logits.softmax(-1).tolist(), 0.0
    result = [0.0] * len(chances)
    for token in sorted(range(len(chances)), key=lambda i: -chances[i]):
        if mass < top_p:
            result[token] = chances[token]
        mass += chances[token]
    return [chance / sum(result) for chance in result]


def fits(counts, expected):
    """Return the p-value of counts beside chances. Rare outcomes are counted together."""
    total = sum(counts.values())
    assert set(counts) <= set(expected), "an outcome without a chance"
    common = [outcome for outcome, chance in expected.items() if chance * total >= 5]
    pairs = [(counts[outcome], total * expected[outcome]) for outcome in common]
    rest = total - sum(count for count, _ in pairs), total - sum(mean for _, mean in pairs)
    pairs += [rest] if rest[1] >= 5 else []
    observed, means = zip(*pairs, strict=True)
    return chisquare(observed, [mean * sum(observed) / sum(means) for mean in means]).pvalue


@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}])
def test_samples_follow_the_enumerated_law_whatever_the_padding(tiny, options):
    prompts = [[1, 3, 3, 0], [0]]
    groups = [*tiny.answers(prompts * 300, 0, LENGTH, 4, batch=150, **options)]
    for prompt, name in zip(prompts, (0, 1), strict=True):
        counts = Counter(tuple(answer) for group in groups[name::2] for answer in group)
        assert fits(counts, law(tiny, prompt, **options)) > 1e-3, prompt
        assert len(counts) > 3


def test_beams_of_stochastic_beam_search_are_samples_without_repeats_in_their_order(tiny):
    prompts = [[1, 3, 3, 0], [0]]
    groups = [*tiny.answers(prompts * 1000, 7, LENGTH, 2, batch=500, temperature=1.0, beam=True)]
    for prompt, name in zip(prompts, (0, 1), strict=True):
        chances = law(tiny, prompt, 1.0)
        pairs = {(a, b): p * q / (1 - p) for (a, p), (b, q) in itertools.permutations(chances.items(), 2)}
        counts = Counter(tuple(map(tuple, group)) for group in groups[name::2])
        assert fits(counts, pairs) > 1e-3, prompt


def test_the_likeliest_child_keeps_its_parent_s_value_at_any_depth():
    """Deep in a long answer, the value of a beam is far above its log-probability."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 2, 50, generator=generator).log_softmax(-1)
    scores[0, 1] = torch.where(torch.arange(50) == END, 0.0, -torch.inf)  # an answer that has ended
    gumbel = -torch.rand(3, 2, 50, generator=generator).log().neg().log()
    logp, noisy = torch.full((3, 2), -80.0), torch.tensor([[0.5, -0.2]] * 3)
    logp[:, 1] = -20
    total, values, parents, tokens = search_step(logp, noisy, scores, gumbel, False)
    assert torch.allclose(values, noisy) and parents.tolist() == [[0, 1]] * 3
    assert (tokens == (scores + gumbel).argmax(-1)).all() and tokens[0, 1] == END
    assert torch.allclose(total, logp + scores.gather(2, tokens[..., None])[..., 0])


def test_cut_keeps_the_fewest_tokens_with_the_mass():
    scores = torch.randn(20, 7, generator=torch.Generator().manual_seed(1)) * 2
    for top_p in (0.1, 0.5, 0.9, 1.0):
        expected = torch.tensor([kept(row, top_p) for row in scores])
        torch.testing.assert_close(cut(scores, top_p).exp(), expected, atol=1e-6, rtol=1e-5)


def pairs_of(draw, lengths, count=4):
    """Return pairs of prompts of these lengths and answers of 1 to 13 tokens, in random order."""
    sizes = [(length, draw.randint(1, 13)) for length in lengths for _ in range(count)]
    draw.shuffle(sizes)
    return [tuple([draw.randint(8, 50) for _ in range(size)] for size in pair) for pair in sizes]


def test_the_base_s_nats_are_those_of_whole_forwards():
    pairs = pairs_of(random.Random(0), (1, 5, 9))
    expected = []
    for before, answer in pairs:
        scores = smol.next_log_probabilities([*before, *answer])
        expected.append(-sum(float(scores[len(before) - 1 + j, token]) for j, token in enumerate(answer)))
    assert Teacher(smol.teacher()).nats(pairs, batch=3) == pytest.approx(expected, rel=1e-4)


def test_smol_s_nats_hide_all_that_is_to_the_right(model):
    """Prompts shorter than a block, of whole blocks, and of a block and a part, together in batches."""
    pairs = pairs_of(random.Random(1), (2, 4, 11))
    expected = []
    for before, answer in pairs:
        row, nats = [*before, *answer, *[0] * 8], 0.0
        for i in range(len(before), len(before) + len(answer)):
            nats -= float(smol.log_probabilities(model, row, [j >= i for j in range(len(row))], i)[row[i]])
        expected.append(nats)
    nats = in_batches(lambda pairs: student_nats(model, pairs), pairs, batch=5)
    assert nats == pytest.approx(expected, rel=1e-4)


# the stages


@pytest.fixture
def data(tmp_path):
    """Files of questions with choices and of questions with references, in the authors' layouts."""
    draw, letters = random.Random(0), "defgijkl"  # "c" is the end, "h" the mask

    def words(count):
        return " ".join("".join(draw.choices(letters, k=3)) for _ in range(count))

    records = []
    for _ in range(16):
        choices = [{"label": label, "text": words(2)} for label in "ABC"]
        records.append({"question": {"stem": words(4), "choices": choices}, "answerKey": draw.choice("ABC")})
    for place in ("arc/ARC-Challenge-Test.jsonl", "commonsenseqa/dev_rand_split.jsonl"):
        (tmp_path / place).parent.mkdir()
        (tmp_path / place).write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "truthfulqa").mkdir()
    rows = ["Question,Best Answer,Correct Answers"] + [f"{words(3)}?,{words(3)},{words(2)}; {words(3)}" for _ in "abc"]
    (tmp_path / "truthfulqa" / "questions.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


def test_choices_and_answers_give_one_figure_per_question(model, data, monkeypatch):
    monkeypatch.setattr(bench, "TOKENS", 8)
    teacher = Teacher(smol.teacher())
    lines = [*bench.choices(model, teacher, data, 4, 0)]
    assert [(line["task"], line["who"]) for line in lines] == [
        (task, who) for task in ("arc-challenge", "commonsenseqa") for who in ("base", "smol")
    ]
    assert all(len(line["right"]) == len(line["chance"]) == 4 and set(line["right"]) <= {0, 1} for line in lines)
    again = [*bench.choices(model, teacher, data, None, 0)]
    stems = [json.loads(line)["question"]["stem"] for line in (data / "arc/ARC-Challenge-Test.jsonl").open()]
    assert len(again[0]["right"]) == sum(not serves_to_tune(stem) for stem in stems) < len(stems)
    assert again[0]["right"][:4] == lines[0]["right"], "a limit takes the first of one order"
    lines += bench.answers(model, teacher, data, 2, 0, "T 0.7$|T 1, top-p 0.8, β")
    for line in lines[4:]:
        assert all(len(line[name]) == 2 for name in ("nats", "distinct-2", "f1", "mean f1", "rows", "texts")), line
        assert all(len(group) == 4 for group in line["texts"])
    named = {"base samples, T 0.7", "independent, T 0.7", "base beams, stochastic, T 0.7", "tree, T 0.7"}
    named |= {"threshold 0.9, T 0.7", "d5p4, T 1, top-p 0.8, β 100"}
    assert {line["method"] for line in lines[4:]} == named
    drawn = bench.tables(lines)
    assert drawn["accuracy"]().count("\n") == 3 and drawn["fronts"]().count("\n") == len(named) + 1
    write(data / "lines.jsonl", lines)
    assert len(read(data / "lines.jsonl")) == len(lines)


def test_every_variant_is_trained_on_the_same_rows_and_kept_as_it_comes(cli, tmp_path):
    out, rows = tmp_path / "variants.jsonl", tmp_path / "rows.npz"
    command = ["bench", "smol", "--stage", "variants", "--toy", "--rows", rows, "--steps", 1, "--out", out]
    done = cli(*command, "--device", "cpu")
    assert done.exit_code == 0, (done.output, done.exception)
    lines, written = read(out), rows.read_bytes()
    assert [{key: line[key] for key in ("block", "rank", "causal")} for line in lines] == bench.VARIANTS
    for line in lines:
        assert line["KL per token"] > 0
    folders = [path for path in (tmp_path / "variants").iterdir() if (path / "adapter_model.safetensors").is_file()]
    assert len(folders) == len(lines)
    assert {read_json(folder / "config.json")["bd_size"] for folder in folders} == {8, 16, 32}
    assert bench.tables(lines)["compared"]().count("\n") == len(lines) + 1
    shutil.rmtree(tmp_path / "variants")
    write(out, lines[1:])
    done = cli(*command, "--device", "cpu")
    assert done.exit_code == 0 and rows.read_bytes() == written
    again = {line["KL per token"] for line in read(out)}
    assert again == {line["KL per token"] for line in lines} and len(done.stdout.splitlines()) == 1, "one was missing"


def test_the_gap_is_measured_on_the_line_of_the_base_and_never_beside_it():
    line = [{"distinct-2": [d] * 3, "nats": [n] * 3} for d, n in ((0.9, 2.0), (0.7, 1.0))]
    for distinct, expected in ((0.8, "-0.300"), (0.75, "-0.050"), (0.6, "0.200"), (0.95, None)):
        gap = bench.gap({"distinct-2": [distinct] * 3, "nats": [1.2] * 3}, line)
        assert gap is None if expected is None else gap.startswith(expected), (distinct, gap)


def test_a_share_above_chance_is_given_only_if_the_base_is_above_chance():
    def rows(base, smol):
        marks = {"base": base, "smol": smol}
        return [
            {"stage": "choices", "task": "t", "who": who, "right": marks[who], "chance": [0.25] * 80} for who in marks
        ]

    knows = bench.accuracy(rows([1.0] * 60 + [0.0] * 20, [1.0] * 50 + [0.0] * 30)).splitlines()[-1].split(" | ")
    assert knows[3].startswith("75.0 ±") and knows[5].startswith("-12.5 ±")
    assert knows[6].startswith("75 ["), "(62.5 - 25) / (75 - 25)"
    assert bench.accuracy(rows([1.0, 0, 0, 0] * 20, [1.0, 0, 0, 0] * 20)).splitlines()[-1].endswith("| – |")


def test_kl_by_offset_is_a_ratio_of_sums():
    rows = {"kl": [[1.0, 0.0], [2.0, 6.0]], "tokens": [[2, 0], [1, 3]], "entropy": [[2, 0], [4, 6]]}
    table = bench.offsets([{"stage": "kl"} | rows])
    assert [row.split(" | ")[:2] for row in table.split("\n")[2:6]] == [
        ["| 0", "3"], ["| 1", "3"], ["| all", "6"], ["| entropy of the base", "6"]
    ]  # fmt: skip
    values = [float(row.split(" | ")[2].split()[0]) for row in table.split("\n")[2:6]]
    assert values == [1.0, 2.0, 1.5, 2.0]


def test_objects_are_compared_by_value():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    one, same, true, cut = (bench.valid(text, schema) for text in ('{"a":1}', '{ "a": 1.0 }', '{"a":true}', '{"a":1'))
    assert one == same and one and true is None and cut is None
    numbers = {"nats": [6.0, 2.0], "tokens": [3, 1], "rows": [9, 11], "passes": [4, 6]}
    lines = [{"stage": "forms", "method": "tree", "valid": [[one, same, None, cut], [one, "b", "c", "d"]], **numbers}]
    line = bench.forms([*lines, {"stage": "time"}]).splitlines()[2]
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[:2] == ["tree", "2"] and cells[2].startswith("75.0 ±") and cells[3].startswith("2.50 ±")
    assert cells[4].startswith("2.00") and cells[5:] == ["10", "5", "–"]


def test_a_stage_says_what_it_needs(fails):
    for stage, option in (("kl", "--data"), ("choices", "--data"), ("answers", "--data"), ("variants", "--rows")):
        assert f"the stage {stage} needs {option}" in fails("bench", "smol", "--stage", stage, "--device", "cpu")


def test_drawn_results_replace_those_of_their_stage_machine_and_method(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "RESULT", tmp_path / "committed.jsonl")
    old = [{"stage": stage, "about": {"machine": "cpu"}, "old": True} for stage in ("kl", "time")]
    write(bench.RESULT, old)
    new = [{"stage": stage, "about": {"machine": "gpu"}, "texts": ["?"]} for stage in ("kl", "time")]
    assert bench.drawn(new) == [old[1], *({"stage": s, "about": {"machine": "gpu"}} for s in ("kl", "time"))]
    answers = [{"stage": "answers", "method": name} for name in ("tree, T 0.7", "independent, T 0.7")]
    write(bench.RESULT, answers)
    assert bench.drawn([answers[0] | {"new": True}]) == [answers[1], answers[0] | {"new": True}]
