"""Requests join calls that run, and groups take turns. Each request gets the answers that it would get alone."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import d5p4
from d5p4.serve.calls import RESERVE, SMALL, entering, next_group
from tests.checkpoints import WRITERS
from tests.fake import FakeModel, block_model
from tests.serve.running import Gated, request, running, until

METHODS = list(d5p4.METHODS)
full = pytest.mark.full
pytestmark = pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")


def of(method, **options):
    return {"method": method} | ({"interval": 2} if method.endswith("smc") else {}) | options


FREE = [of(method) for method in METHODS]
RULES = [of("d5p4", reveal="threshold", tau=0.3), of("tree", reveal="factor", factor=2.0), of("tree", early_stop=True)]
FORMS = [of(method, regex="(a|b){1,3}c|d(ef|gh)*") for method in ("tree", "independent", "d5p4")]
QUICK = [of("tree"), of("d5p4", w=2), of("independent", stop=["b"]), FORMS[0]]
CASES = [
    ("fake", {}, QUICK),
    ("block", {}, [of("tree"), of("d5p4", w=2, guidance=1.5)]),
    ("llada", {"deterministic": True, "max_tokens_per_forward": 256}, [of("tree"), of("d5p4", w=2)]),
    pytest.param("fake", {}, [*FREE, *RULES, *FORMS], marks=full),
    pytest.param("block", {}, [*FREE, *RULES, FORMS[0]], marks=full),
    pytest.param("block", {"cache": "none"}, FREE, marks=full),
    pytest.param("wide", {"cache": "prefix"}, FREE, marks=full),
    pytest.param("wide", {"cache": "dual"}, FREE, marks=full),
    pytest.param("llada", {"deterministic": True, "max_tokens_per_forward": 256}, FREE, marks=full),
]


@pytest.mark.parametrize("name, fixed, kinds", CASES)
def test_random_arrivals_get_the_answers_they_would_get_alone(tmp_path, name, fixed, kinds):
    """Of every kind several, with their own lengths, numbers of answers and seeds; in float64, or with fixed bits."""
    if name in ("llada", "wide"):
        model = d5p4.load(WRITERS["llada"](tmp_path), "cpu", "bfloat16" if name == "llada" else "float64")
        model.generation_defaults = {"block_length": 4} if "cache" in fixed else {}
    else:
        model = FakeModel() if name == "fake" else block_model()
    order, asked = random.Random(len(kinds)), []
    for number in range(4 * len(kinds)):
        body = {"prompt": "".join(order.choice("abcdefgh") for _ in range(order.randint(1, 9))), "seed": number}
        asked.append(body | {"n": order.choice((1, 2)), "max_tokens": order.choice((6, 9, 12))} | kinds[number // 4])
    order.shuffle(asked)
    with running(model, **fixed) as server, ThreadPoolExecutor(8) as clients:
        replies = list(clients.map(lambda body: server.post(**body), asked))
        shared = server.metric("d5p4_batch_prompts_sum") / server.metric("d5p4_batch_prompts_count")
    for body, reply in zip(asked, replies, strict=True):
        assert reply.status_code == 200, (body, reply.text)
        got, names = reply.json()["choices"], {"n": "k", "max_tokens": "gen_length", "stop": "stop_strings"}
        options = {names.get(name, name): value for name, value in (fixed | body).items() if name != "prompt"}
        options["stop"] = options.pop("early_stop", None)
        alone = d5p4.generate(model, body["prompt"], chat=False, **options)[0]
        assert [one["text"] for one in got] == alone.texts, body
        for one, score in zip(got, alone.score, strict=True):
            assert one["d5p4"]["score"] == pytest.approx(score, rel=1e-5, abs=1e-6), body
    assert shared > 1


def test_a_short_request_joins_a_long_one_and_leaves_before_it():
    """It adds no forward to those of the long one, and its trace is the one that it has alone."""
    with running(Gated()) as server, server.connect() as long:
        long.sendall(request({"prompt": "abc", "max_tokens": 60, "seed": 1}))
        server.model.turns.release(9)
        until(lambda: len(server.model.calls) == 9)
        replies, asked = [], {"prompt": "abd", "max_tokens": 40, "seed": 2, "n": 1, "history": True}
        thread = threading.Thread(target=lambda: replies.append(server.post(**asked).json()))
        thread.start()
        until(lambda: server.metric("d5p4_waiting_prompts") + server.metric("d5p4_running_prompts") == 2)
        server.model.turns.release(41)
        thread.join()
        assert server.metric("d5p4_running_prompts") == 1 and len(server.model.calls) <= 50
        calls = server.model.calls[:50]  # it joins before the tenth forward, or after it if this has begun
        assert calls[:9] == [1] * 9 and calls.count(2) == 40
    trace = d5p4.view.trace(Gated(open=True), "abd", gen_length=40, seed=2, k=1, chat=False)
    got = replies[0]["d5p4"]["history"][0]
    assert {name: got[name] for name in got if name not in ("seconds", "settings")} == {
        name: trace[name] for name in trace if name not in ("seconds", "settings")
    }


def test_a_cheap_request_waits_for_one_step_of_expensive_ones():
    """Four of them, of four kinds, would fill all room without the reserve."""
    costly = {"prompt": "abc", "method": "d5p4", "n": 7, "w": 8, "max_tokens": 20}
    with running(Gated(), max_tokens_per_forward=512) as server:
        wires = [server.connect() for _ in range(4)]
        for number, wire in enumerate(wires):
            wire.sendall(request(costly | {"temperature": 1 + number / 1000, "seed": number}))
        until(server.model.entered.is_set)
        until(lambda: server.metric("d5p4_running_prompts") + server.metric("d5p4_waiting_prompts") == 4)
        server.model.turns.release(12)
        until(lambda: len(server.model.shapes) == 12)
        with server.connect() as cheap:
            cheap.sendall(request({"prompt": "abc", "max_tokens": 6, "seed": 1}))
            until(lambda: server.metric("d5p4_waiting_prompts") > 0)
            until(lambda: len(server.engine.live) == 5)
            server.model.gate.set()
            cheap.recv(1000)
        last = max(i for i, (_, columns) in enumerate(server.model.shapes) if columns == 9)
        assert sum(columns > 9 for _, columns in server.model.shapes[12:last]) <= 2
        for wire in wires:
            wire.close()


def test_an_expensive_request_gets_on_while_cheap_ones_keep_coming():
    with running(FakeModel()) as server, ThreadPoolExecutor(4) as clients:
        costly = clients.submit(server.post, prompt="abc", method="d5p4", n=7, w=8, max_tokens=20, seed=1)
        count = 0
        while not costly.done():
            cheap = [clients.submit(server.post, prompt="abc", max_tokens=4, seed=count + i) for i in range(3)]
            assert all(one.result().status_code == 200 for one in cheap)
            count += len(cheap)
        assert costly.result().status_code == 200


def job(share, done=False):
    return SimpleNamespace(share=share, outcome=SimpleNamespace(done=lambda: done))


def test_large_jobs_leave_a_reserve_and_wait_for_each_other():
    large, small = (1 - RESERVE) / 2, SMALL
    two, third, few = [job(large), job(large)], job(large), [job(small) for _ in range(20)]
    assert entering([*two, third], [], 0) == two
    assert entering([third, *few], two, 0) == few[: int(RESERVE / SMALL)]  # small ones fill the reserve alone
    assert entering([third], [*two[:1], *few], 0) == []  # and go on until the large one has room
    assert entering([*few, third], [], 0) == few[: int(1 / SMALL)]
    assert entering([job(5.0)], [], 3) != [] and entering([job(5.0)], few[:1], 0) != []  # a giant enters an empty room
    assert entering(few, [job(5.0)], 0) == few[: int(RESERVE / SMALL)]  # which keeps its reserve
    assert entering([job(5.0)], two[:1], 0) == entering([job(small, done=True)], [], 0) == []
    assert entering([*two], [], 1) == two[:1]  # when memory ran out, half as many fit


def group(rank, last, seconds=0.1):
    return SimpleNamespace(jobs={0: SimpleNamespace(rank=rank)}, last=last, seconds=seconds)


def test_the_cheapest_group_goes_first_until_another_has_waited_too_long():
    cheap, other, costly = group(3, 9.9), group(3, 9.8), group(9, 9.7)
    assert next_group([cheap, costly], 10.0) is cheap and next_group([cheap, other, costly], 10.0) is other
    assert next_group([cheap, costly], 10.6) is costly  # it has waited more than four rounds of 0.2 s


@pytest.mark.parametrize("count", [40, pytest.param(600, marks=full)])
def test_a_load_with_clients_that_leave(count):
    """No 5xx, and every client that stays gets the answer that it would get alone."""
    order, left = random.Random(1), 0
    asked = [
        {"prompt": order.choice("abcdefgh") * order.randint(1, 6), "seed": number, "max_tokens": order.randint(4, 24)}
        | {"n": order.choice((1, 1, 3)), "method": order.choice(("tree", "d5p4", "independent"))}
        for number in range(count)
    ]

    def ask(body):
        if body["seed"] % 3:
            return server.post(**body)
        with server.connect() as wire:
            wire.sendall(request(body | {"stream": body["seed"] % 2 == 0}))
            if body["seed"] % 4 == 0:
                wire.recv(200)
        return None

    with running(FakeModel(), limits={"max_queue": 1000}) as server, ThreadPoolExecutor(16) as clients:
        replies = list(clients.map(ask, asked))
        until(lambda: not server.engine.live and not server.server.server_state.tasks)
        left = sum(reply is None for reply in replies)
        assert all(reply.status_code == 200 for reply in replies if reply is not None)
        until(lambda: server.metric("d5p4_running_prompts") == server.metric("d5p4_waiting_prompts") == 0)
        until(lambda: not server.engine.groups or not any(one.jobs for one in server.engine.groups.values()))
        statuses = {s: server.metric("d5p4_requests_total", route="/v1/completions", status=s) for s in ("200", "499")}
        assert sum(statuses.values()) == server.metric("d5p4_requests_total", route="/v1/completions")
        assert count - left <= statuses["200"] <= count
    for body, reply in [pair for pair in zip(asked, replies, strict=True) if pair[1] is not None][:20]:
        options = {"k": body["n"], "gen_length": body["max_tokens"], "seed": body["seed"], "method": body["method"]}
        alone = d5p4.generate(FakeModel(), body["prompt"], chat=False, **options)[0].texts
        assert [one["text"] for one in reply.json()["choices"]] == alone
