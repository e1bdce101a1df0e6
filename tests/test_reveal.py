"""Adaptive reveal rules, orders by position, early stops, and registered orders and rules."""

import itertools
import math
from functools import partial

import pytest
import torch

import d5p4
from d5p4.decode.schedule import Steps
from d5p4.ops.vocab import logits_of
from d5p4.search import Draw, Parents, drawn
from d5p4.types import Head
from tests.fake import FakeModel, fitting
from tests.history import History
from tests.layouts import check_layouts, facts
from tests.refusals import refusal

PROMPTS = ["abc", "ahead", "c", "bigfee"]
RULES = [name for name, rule in d5p4.REVEALS.items() if rule.adaptive]
ORDERS = [name for name in d5p4.ORDERS if name != "ancestral"]
VALUES = {"threshold": {"tau": 0.4}, "factor": {"factor": 2.0}, "entropy-bound": {"entropy_bound": 1.2}}
full = pytest.mark.full
pytestmark = pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")


def run(model, prompts, **options):
    options = dict(method="d5p4", k=3, w=3, gen_length=9, seed=11) | options
    if options.get("reveal", "schedule") == "schedule":
        options.setdefault("steps", 9)
    return d5p4.generate(model, prompts, **fitting(VALUES.get(options.get("reveal"), {}) | options))


LAYOUTS = [
    *[dict(reveal=rule) for rule in RULES],
    *[dict(reveal="threshold", method=method) for method in ("tree", "d5p4-p", "best-of-n", "e-smc", "soar")],
    *[dict(reveal="threshold", order=order, method="independent") for order in ("left", "tempered", "random")],
    dict(reveal="threshold", block_length=4),
    dict(reveal="threshold", block_length=4, order="top", distinct=True, spare=2),
    dict(reveal="factor", guidance=2.0, guidance_window=(0.0, 0.5), block_length=4),
    dict(reveal="threshold", guidance=2.0, guidance_window=(0.3, 1.0), method="tree"),
    dict(method="tree", order="random", block_length=4, eos="free"),
    dict(reveal="threshold", select_window=(0.3, 0.7)),
    dict(reveal="threshold", select_window=(0.2, 0.5), distinct=True, block_length=2),
    dict(reveal="threshold", method="d5p4-p", stop=False),
    dict(reveal="schedule", stop=True, steps=5),
    dict(reveal="schedule", stop=True, order="top", method="best-of-n", block_length=3),
    dict(reveal="threshold", eos="free", order="top"),
    dict(reveal="threshold", start="entropy", start_temperature=2.0, order="top"),
]
EVERY = [
    dict(reveal=rule, method=method, order=order, block_length=block)
    for rule, method, order, block in itertools.product(RULES, d5p4.METHODS, ("confidence", "top"), (None, 4))
]


@pytest.mark.parametrize("options", [*LAYOUTS, *(pytest.param(case, marks=full) for case in EVERY)], ids=str)
def test_answers_do_not_depend_on_the_layout(options):
    saved, plain = check_layouts(partial(run, FakeModel(scale=2.5, seed=3), **options), PROMPTS)
    assert (saved.rows < plain.rows).any() or saved.settings.spec.tree  # a tree has no equal rows


def one_step_at_a_time(model, prompt, **options):
    """Return the shots of a decode as (tokens before, parents, children, tokens after) of one prompt."""
    shots = []

    def keep(shot):
        shots.append(
            (shot.tokens[0].clone(), shot.choice.parents[0], shot.choice.children, shot.next_tokens[0].clone())
        )

    return run(model, [prompt], callback=keep, **options), shots


def test_rows_reveal_their_own_numbers_and_prompts_their_own_steps():
    model = FakeModel(scale=2.5, seed=3)
    result, shots = one_step_at_a_time(model, "ahead", reveal="threshold", tau=0.8, order="top", eos="never", k=4, w=4)
    numbers = set()
    for before, parents, children, after in shots:
        old = before[parents.repeat_interleave(children)]
        new = (old != after).sum(-1)
        assert (old[old != model.mask_id] == after[old != model.mask_id]).all()  # what is revealed stays
        assert ((new > 0) | (old != model.mask_id).all(-1)).all()  # at least one per row and step
        numbers |= set(new.tolist())
    assert len(numbers) > 2
    steps = run(model, PROMPTS, reveal="threshold", eos="never").nfe.tolist()
    assert len(set(steps)) > 1 and max(steps) < 9 == int(run(model, PROMPTS[:1], eos="never").nfe[0])


@pytest.mark.parametrize(
    "order", ["confidence", "top", "left", "margin", *(pytest.param(o, marks=full) for o in ORDERS)]
)
@pytest.mark.parametrize(
    "method", ["d5p4", "best-of-n", *(pytest.param(m, marks=full) for m in d5p4.METHODS if m != "soar")]
)  # soar needs a rule
def test_a_threshold_of_one_is_one_token_per_step(method, order):
    model = FakeModel()
    options = dict(method=method, order=order, gen_length=7, order_temperature=0.0)
    if method == "e-smc":
        options["interval"] = None
    by_table = run(model, PROMPTS, steps=7, **options)
    one = run(model, PROMPTS, reveal="threshold", tau=1, stop=False, **options)
    if method in ("e-smc", "sr-smc", "d5p4-p"):  # intervals count steps in a schedule and shares under a threshold
        assert (one.nfe == by_table.nfe).all()
        return
    others = ("rows", "rows_nominal", "tokens_run", "lineage", "perturbed", "kappa")
    assert facts(one, *others) == facts(by_table, *others)


def test_the_rules_accept_what_their_formulas_say():
    chances = torch.tensor([0.99, 0.95, 0.9, 0.6, 0.97])[None, None, None]
    entropy = torch.tensor([0.05, 0.2, 0.3, 0.9, 0.01])[None, None, None]
    seen = d5p4.search.OpenPositions(chances, {"entropy": entropy}, chances > 0)

    def accepted(name, **parameters):
        return d5p4.REVEALS[name].rule(**parameters)(seen)[0, 0, 0].int().tolist()

    assert accepted("threshold", tau=0.9) == [1, 1, 0, 0, 1]
    assert accepted("threshold", tau=1) == [0, 0, 0, 0, 0]
    # (j + 1)(1 - p_j) is 0.02, 0.15, 0.4, 2.0, 0.18
    assert accepted("factor", factor=0.5) == [1, 1, 1, 0, 0]
    assert accepted("factor", factor=0.1) == [1, 0, 0, 0, 0]
    # the sum without the largest entropy is 0, 0.05, 0.25, 0.55, 0.56
    assert accepted("entropy-bound", entropy_bound=0.26) == [1, 1, 1, 0, 0]
    assert accepted("entropy-bound", entropy_bound=0) == [1, 0, 0, 0, 0]


def alike(open_positions, parents, c):
    """Parents whose open positions all have the distribution (c, 1 - c), and the draw options for them."""
    weight = torch.zeros(3, 1, dtype=torch.float64)
    head = Head(weight, torch.tensor([math.log(c), math.log(1 - c), 0.0]), torch.tensor([False, False, True]))
    tokens = torch.full((parents, 1, open_positions), 2)
    states = torch.zeros(1, open_positions, 1, dtype=torch.float64)
    place = torch.arange(open_positions).expand(parents, -1)
    slot = torch.zeros(parents, 1, dtype=torch.int64)
    stream = d5p4.rng.mix(torch.arange(parents))[:, None]
    return Parents(tokens, states, slot, place, stream, tokens == 2), Draw(head, 2)


@pytest.mark.parametrize("m", [1, 2, 4])
def test_confidence_suppresses_unlikely_tokens_and_position_first_orders_do_not(m):
    """With m open positions of top probability c, `confidence` reveals another token with chance (1 - c)^m."""
    c, count = 0.6, 20_000
    parents, draw = alike(m, count, c)
    step = Steps((), (), 0, m, 1, m, True)
    for order, expected in (("confidence", (1 - c) ** m), ("top", 1 - c), ("left", 1 - c), ("margin", 1 - c)):
        tokens = drawn(parents, step, Draw(**vars(draw) | {"order": order}), 1).tokens
        share = (tokens == 1).any(-1).double().mean().item()
        assert share == pytest.approx(expected, abs=5 * math.sqrt(expected * (1 - expected) / count)), order


def test_the_first_reveal_may_be_the_least_certain_position():
    model = FakeModel(scale=2.5)
    for options in (dict(), dict(reveal="threshold", tau=0.1)):
        _, shots = one_step_at_a_time(
            model, "abc", order="top", start="entropy", start_temperature=3.0, eos="free", **options
        )
        before, _, _, after = shots[0]
        row = torch.cat([torch.tensor([0, 1, 2]), before[0]])
        head = model.head
        logits = logits_of(model.body(row[None]).states[0, 3:], head.weight, head.bias, head.banned)
        least_sure = int(torch.distributions.Categorical(logits=logits).entropy().argmax())
        assert (after != model.mask_id).sum(-1).tolist() == [1] * len(after)
        assert set((after != model.mask_id).int().argmax(-1).tolist()) == {least_sure}


class Ending(FakeModel):
    """Writes its prompt's first letter as many times as the prompt is long, then end-of-text; all are nearly sure."""

    def __init__(self, **options):
        super().__init__(**options)
        vocabulary = len(self.head.weight)
        self.head = Head(torch.eye(vocabulary, dtype=torch.float64) * 4, None, self.head.banned)

    def body(self, tokens, attention_mask=None):
        real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
        self.rows_seen += len(tokens)
        first = tokens.gather(1, real.int().argmax(-1, keepdim=True))
        length = ((tokens != self.mask_id) & real).cumprod(-1).sum(-1, keepdim=True)  # of a prompt without padding
        place = real.cumsum(-1) - 1
        token = torch.where(place < 2 * (first + 2), first, self.eos_ids[0])
        states = torch.nn.functional.one_hot(token, len(self.head.weight)).double()
        return d5p4.Hidden(states + 0.01 * place[..., None] + 0 * length[..., None], states)


def test_a_row_stops_at_its_end_of_text_and_a_short_prompt_does_not_wait_for_a_long_one():
    model = Ending()
    common = dict(method="d5p4", k=2, w=2, gen_length=40, seed=1, temperature=0.5)
    options = common | dict(reveal="factor", factor=0.7)
    delivered = []
    prepared = d5p4.prepare(model, ["b", "jj"], options | {"seed": None})
    from d5p4.generate import run_requests

    steps = []
    both = run_requests(
        model,
        prepared.requests,
        prepared.settings,
        1,
        callback=lambda shot: steps.append(shot.prompts.tolist()) and None,
        deliver=lambda number, result, place: delivered.append((number, len(steps), result.texts[place])),
    )
    alone = [d5p4.generate(model, [prompt], **options) for prompt in ("b", "jj")]
    assert [facts(both)[p] for p in (0, 1)] == [facts(result)[0] for result in alone]
    assert [number for number, _, _ in delivered] == [0, 1] and delivered[0][1] < delivered[1][1]
    assert delivered[0][2] == both.texts[0] and [0, 1] in steps and steps[-1] == [1]
    assert set(map(len, both.answers[0])) == {5} and set(map(len, both.answers[1])) == {20}
    assert both.sequences[0].ne(model.mask_id).all()  # what was left masked behind the end is filled
    by_table = common | dict(stop=True)  # all prompts end before the table
    assert [set(map(len, answers)) for answers in d5p4.generate(model, ["b", "jj"], **by_table).answers] == [{5}, {20}]
    longer = d5p4.generate(model, ["b"], **options | {"stop": False})
    assert longer.texts == alone[0].texts and longer.nfe[0] > alone[0].nfe[0]


def test_scores_do_not_count_what_follows_the_end():
    model = FakeModel(scale=3.0, seed=5)
    kept = History()
    result = run(model, ["abc"], callback=kept, eos="free", temperature=3.0, method="independent", seed=1, stop=False)
    for i, answer in enumerate(result.answers[0]):
        row = torch.cat([torch.tensor([0, 1, 2]), kept[0][-1].tokens[result.lineage[0][i, -1]]])
        head = model.head
        logits = logits_of(model.body(row[None]).states[0, 3:], head.weight, head.bias, head.banned)
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        shown = entropy[: len(answer) + 1].mean()
        assert result.score[0, i].item() == pytest.approx(-shown.item(), abs=1e-8)


@pytest.mark.parametrize("reveal", ["schedule", "threshold"])
def test_infilling_is_not_cut_at_an_end_of_text(reveal):
    model = FakeModel(scale=2.5)
    mask, end = model.mask_id, model.eos_ids[0]
    prompt = [[0, mask, 1, mask, end, mask, 2]]
    options = dict(gen_length=None, steps=None, eos="free", reveal=reveal)
    stopped, free = run(model, prompt, stop=True, **options), run(model, prompt, stop=False, **options)
    assert stopped.answers == free.answers and all(len(answer) == 3 for answer in stopped.answers[0])


def test_what_a_stranger_order_or_rule_returns_is_checked(monkeypatch):
    """tests/test_doors.py runs good ones."""
    for name, order in {
        "whole": lambda seen: seen.place,  # whole numbers are fine
        "short": lambda seen: seen.place[..., :1].double(),
        "nan": lambda seen: torch.where(seen.place == 2, torch.nan, seen.place.double()),
    }.items():
        monkeypatch.setitem(d5p4.ORDERS, name, d5p4.Order(name, order))
    monkeypatch.setitem(d5p4.REVEALS, "floats", d5p4.Reveal("floats", lambda seen: seen.probability))
    assert run(FakeModel(), ["abc"], order="whole").texts
    assert "order 'nan' exists already" in refusal(d5p4.register, d5p4.Order("nan", len))
    assert "no statistic 'nope'" in refusal(d5p4.register, d5p4.Order("odd", len, statistics=("nope",)))
    for options, message in (
        (dict(order="short"), "order 'short' must return"),
        (dict(order="nan", method="tree"), "order='nan' returned NaN"),
        (dict(order="nan"), "order='nan' returned NaN"),
        (dict(reveal="floats"), "a reveal rule must return"),
    ):
        assert message in refusal(run, FakeModel(), ["abc"], **options), options


def test_bad_values_are_refused_by_name():
    model = FakeModel()
    ancestral = FakeModel(carry_over=True)
    rule = dict(reveal="threshold")
    for options, words in (
        (rule | dict(tau=0), "tau=0 must be a number above 0 and at most 1"),
        (dict(reveal="treshold"), "reveal='treshold' is not known; did you mean threshold"),
        (dict(tau=0.9), "tau: it is a parameter of reveal threshold; reveal is schedule here"),
        (rule | dict(steps=4), "steps=4 has no meaning with reveal='threshold'"),
        (rule | dict(guidance=2, guidance_window=(0, 4)), "guidance_window=(0, 4) counts steps"),
        (dict(guidance=2, guidance_window=(0.5, 2)), " must be steps counted from 0"),
        (rule | dict(method="e-smc", interval=4), "interval=4 counts steps"),
        (dict(method="e-smc", interval=0.5), "interval=0.5 must be a whole number of steps"),
    ):
        assert words in refusal(run, model, ["abc"], **{"steps": None} | options), options
    for options in (dict(reveal="threshold"), dict(start="entropy")):
        assert "the ancestral order reveals by chance" in refusal(run, ancestral, ["abc"], **options)
    assert run(ancestral, ["abc"], reveal="threshold", order="top").texts  # MDLM under another order
