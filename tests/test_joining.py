"""Prompts may join a running call at any step, and each gets the answers that it would get alone. In float64."""

import random
from dataclasses import replace

import pytest
import torch

import d5p4
from d5p4.decode.answers import merged
from d5p4.decode.batch import Arrivals
from d5p4.decode.loop import Loop, decode
from d5p4.generate import arrivals as arrive
from d5p4.generate import row_length, run_requests
from d5p4.prompts import layout, prepare, schedule_for
from tests.checkpoints import WRITERS
from tests.fake import FakeModel, block_model, fitting
from tests.layouts import facts

METHODS = list(d5p4.METHODS)
RULES = {"threshold": {"tau": 0.3}, "factor": {"factor": 2.0}, "entropy-bound": {"entropy_bound": 1.5}}
JOBS = [("abc", 7, 5), ("jig", 9, 9), ("c", 4, 3), ("ahead", 7, 4), ("bigfeeda", 11, 6), ("abc", 7, 5), ("de", 5, 5)]
full = pytest.mark.full
pytestmark = pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")


def model_named(name, folder):
    if name in ("block", "shifted"):
        return block_model(name == "shifted")
    if name in ("llada", "dream"):
        return d5p4.load(WRITERS[name](folder), "cpu", "float64")
    return FakeModel(carry_over=name == "carry")


def arrivals(model, settings, jobs, names):
    """The jobs (prompt, length of the answer, steps) with these numbers, which also are their seeds."""
    made = [
        prepare(model, [prompt], dict(gen_length=length or None, order="left")).requests[0]
        for prompt, length, _ in jobs
    ]
    shapes = [(len(r.window(model.mask_id)), r.offset(model)) for r in made]
    numbers = [None if settings.reveal_spec.adaptive else steps for *_, steps in jobs]
    device = model.head.weight.device
    return Arrivals(
        layout(made, model.mask_id, model.pad_id, device),
        [schedule_for(model, replace(settings, steps=n), *shape) for n, shape in zip(numbers, shapes, strict=True)],
        torch.tensor(names, device=device),
        torch.tensor([request.key for request in made], device=device),
        torch.tensor(names, device=device),
    )


def check(model, options, jobs=JOBS, seed=0, callback=None):
    settings = prepare(model, ["abc"], fitting(dict(k=3, w=2, temperature=1.3, gen_length=7, logprobs=True) | options))
    settings = settings.settings
    alone = [decode(model, arrivals(model, settings, [job], [i]), settings) for i, job in enumerate(jobs)]
    order, got, waiting = random.Random(seed), {}, list(range(2, len(jobs)))
    begun = 2

    def join():
        nonlocal begun
        empty = len(got) == begun
        if not waiting or (len(waiting) == 1 and not empty) or (not empty and order.random() < 0.6):
            return None  # the last prompt joins when no other is left
        now = [waiting.pop(0) for _ in range(min(order.choice((1, 1, 2)), max(1, len(waiting) - 1)))]
        begun += len(now)
        return arrivals(model, settings, [jobs[i] for i in now], now)

    def deliver(result, names):
        got.update(zip(names, facts(result), strict=True))

    loop = Loop(model, settings, deliver=deliver, callback=callback)
    loop.join(arrivals(model, settings, jobs[:2], [0, 1]), kept=True)
    while loop.batch is not None or waiting:
        if (new := join()) is not None:
            loop.join(new)
        loop.step()
    first = merged(loop.results, model.pad_id)
    assert [got[i] for i in range(len(jobs))] == [facts(result)[0] for result in alone]
    assert facts(first) == [got[0], got[1]] and not waiting


def of(method, **options):
    steps = method.endswith("smc") and "reveal" not in options
    return {"method": method} | ({"interval": 2} if steps else {}) | options


CASES = [
    *[("order", of(method)) for method in METHODS],
    *[("carry", of(method)) for method in ("d5p4", "e-smc", "best-of-n")],
    *[("order", of("d5p4", reveal=rule, **own)) for rule, own in RULES.items()],
    *[("order", of("tree", reveal=rule, **own)) for rule, own in RULES.items()],
    *[("block", of(method)) for method in ("d5p4", "tree", "independent")],
    ("block", of("tree", reveal="threshold", tau=0.3, spare=2)),
    ("block", of("d5p4", guidance=1.5, stop=True)),
    ("shifted", of("tree", temperature=0.0, diversity=1.0)),
    ("order", of("d5p4", guidance=2.0, guidance_window=(1, 4), select_window=(1, 3))),
    (
        "order",
        of("d5p4", guidance=2.0, guidance_window=(0, 0.5), select_window=(0.2, 0.6), reveal="factor", factor=2.0),
    ),
    ("order", of("d5p4", order="tempered", distinct=True, start="entropy", features="masked", positions="masked")),
    ("order", of("d5p4", block_length=3, stop=True, quality="self-certainty", eos="last")),
    ("carry", of("d5p4", block_length=3, features="non-masked", guidance=1.5)),
    *[("order", of(method, regex="(a|b){1,3}c|d(ef|gh)*")) for method in ("tree", "independent", "d5p4")],
    *[("order", of(method, regex="[a-d][b-e]{1,5}", reveal="threshold", tau=0.4)) for method in ("tree", "d5p4")],
    ("block", of("tree", regex="(a|b)cdefgh(a|b)+")),
    ("block", of("independent", regex="(a|b)cd[e-g]*", reveal="entropy-bound", entropy_bound=0.5)),
    ("shifted", of("independent", choices=["abcdefg", "abd", "c"])),
    ("llada", of("d5p4", cache="prefix", block_length=4, order="margin")),
    ("dream", of("tree", cache="dual", block_length=4, order="margin")),
]


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_prompts_that_join_get_the_answers_they_would_get_alone(tmp_path, name, options):
    check(model_named(name, tmp_path), options)


CACHED = [("llada", {"cache": "prefix", "block_length": 4}), ("dream", {"cache": "dual", "block_length": 4})]
KINDS = [
    ("order", {}),
    ("carry", {}),
    ("block", {}),
    ("shifted", {"guidance": 1.5}),
    ("block", {"cache": "none"}),
    *CACHED,
]
GRID = [
    (name, of(method, **rule, **more))
    for name, more in KINDS
    for method in METHODS
    for rule in ({}, {"stop": True}, *({"reveal": rule, "order": "top"} | own for rule, own in RULES.items()))
    if name != "carry" or "reveal" not in rule
]


@pytest.mark.full
@pytest.mark.parametrize("name, options", GRID, ids=str)
def test_prompts_join_every_method_cache_and_rule(tmp_path, name, options):
    check(model_named(name, tmp_path), options, seed=len(str(options)))


@pytest.mark.parametrize("method", ["tree", "d5p4"])
def test_prompts_with_holes_join(method):
    mask = FakeModel().mask_id
    holes = [[0, mask, 1, mask], [mask, 2, 3], [4, mask, 5, mask, 6, mask], [mask], [1, mask, mask, mask, mask]]
    check(FakeModel(), of(method), [(ids, length, 3) for ids, length in zip(holes, (0, 4, 0, 3, 2), strict=True)])


def serve(model, settings, requests, most=4, dropped=(), seed=0):
    """The texts of requests, whose seeds are their numbers, of a call in which at most `most` are decoded at a time.
    They come at random; some leave after their second step."""
    loop, order, got, begun = Loop(model, settings), random.Random(seed), {}, 0

    def deliver(result, names):
        got.update(
            (name, (result.texts[place], result.score[place].nan_to_num().tolist())) for place, name in enumerate(names)
        )

    loop.deliver = deliver
    loop.callback = lambda shot: [
        name for name, taken in zip(shot.prompts.tolist(), shot.taken, strict=True) if name in dropped and taken == 1
    ]
    while loop.batch is not None or begun < len(requests):
        room = most - (0 if loop.batch is None else len(loop.batch.turns))
        count = min(room, order.choice((0, 0, 1, 2)), len(requests) - begun)
        if count:
            new = range(begun, begun + count)
            loop.join(arrive(model, settings, [requests[i] for i in new], new, new))
            begun += count
        loop.step()
    return got


@pytest.mark.parametrize("name, method", [("block", "tree"), ("order", "d5p4")])
def test_one_call_serves_requests_that_come_and_go(name, method):
    """At most four requests at a time, and each gets the answers that it would get alone. One that leaves gets none."""
    model, order = model_named(name, None), random.Random(0)
    prompts = ["".join(order.choice("abcdefgh") for _ in range(order.randint(1, 9))) for _ in range(24)]
    given = [(p, of(method, k=3, gen_length=order.randint(3, 14))) for p in prompts]
    prepared = [prepare(model, [prompt], options) for prompt, options in given]
    settings, requests = prepared[0].settings, [one.requests[0] for one in prepared]
    alone = [run_requests(model, [request], settings, seed).texts[0] for seed, request in enumerate(requests)]
    got = serve(model, settings, requests, dropped=(5, 9))
    assert {number: texts for number, (texts, _) in got.items()} == {
        number: texts for number, texts in enumerate(alone) if number not in (5, 9)
    }


@pytest.mark.parametrize(
    "kind, options",
    [
        ("llada", of("tree")),
        ("dream", of("d5p4", w=2)),
        ("mdlm", of("d5p4", w=2)),
        *[
            pytest.param(kind, of(method), marks=full)
            for kind in ("llada", "dream", "mdlm")
            for method in METHODS
            if not (kind == "mdlm" and d5p4.METHODS[method].tree)
        ],
    ],
)
def test_half_precision_with_deterministic_keeps_its_bits_when_requests_join(tmp_path, kind, options):
    model = d5p4.load(WRITERS[kind](tmp_path), "cpu", "bfloat16")
    texts = ["the cat", "a", "two little words", "far away"]
    common = fitting(dict(k=3, gen_length=5, temperature=1.2, deterministic=True, max_tokens_per_forward=256) | options)
    prepared = prepare(model, texts * 3, common)
    settings, requests = prepared.settings, prepared.requests
    assert len({row_length(model, request, settings) for request in requests}) == 1
    expected = {}
    for number, request in enumerate(requests):
        result = run_requests(model, [request], settings, number)
        expected[number] = result.texts[0], result.score[0].nan_to_num().tolist()
    assert serve(model, settings, requests, most=5) == expected
