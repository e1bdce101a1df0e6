"""Requests that come together are decoded together, oldest first, and nobody gets what belongs to another."""

import threading
import time

import openai
import pytest

import d5p4
from tests.fake import FakeModel
from tests.serve.models import Gated, Slow
from tests.serve.running import NAME, differing, running, together, until

ASKED = {"model": NAME, "max_tokens": 6, "seed": 1}


@pytest.fixture
def gated():
    with running(Gated()) as server:
        yield server


def held(server):
    """A request that is being decoded and waits for the gate; call it for its answer."""
    found = []
    asked = {"prompt": "a", "max_tokens": 1, "seed": 1}
    thread = threading.Thread(target=lambda: found.append(server.post(**asked)))
    thread.start()
    until(server.model.entered.is_set)

    def answer():
        thread.join()
        return found[0]

    return answer


def behind(server, *bodies):
    """Answers to requests that queued up, in this order, behind one that is being decoded."""
    first = held(server)
    found = [None] * len(bodies)

    def ask(number):
        found[number] = server.post(**bodies[number])

    threads = []
    for number, body in enumerate(bodies):
        before = server.metric("d5p4_waiting_prompts")
        threads.append(threading.Thread(target=ask, args=(number,)))
        threads[-1].start()
        count = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
        until(lambda before=before, count=count: server.metric("d5p4_waiting_prompts") == before + count)
    server.model.calls.clear()
    server.model.gate.set()
    for thread in threads:
        thread.join()
    assert first().status_code == 200
    return found


def batches(server):
    """(number of decodes, prompts in them)"""
    return server.metric("d5p4_batch_prompts_count"), server.metric("d5p4_batch_prompts_sum")


def test_what_queued_up_shares_one_decode(gated):
    bodies = [{"prompt": "abc"[: 1 + i % 3] * 2, "max_tokens": 6, "seed": i} for i in range(7)]
    bodies.append(bodies[0])  # who asks the same hears the same
    found = behind(gated, *bodies)
    assert batches(gated) == (2, 9)  # the one that held them up, then the eight
    for body, response in zip(bodies, found, strict=True):
        offline = d5p4.generate(gated.model, body["prompt"], k=1, chat=False, gen_length=6, seed=body["seed"])
        assert response.json()["choices"][0]["text"] == offline.texts[0][0]


def test_other_settings_or_lengths_do_not_share(gated):
    body = {"prompt": "abc", "max_tokens": 6, "seed": 1}
    behind(gated, body, body | {"temperature": 0.5}, body | {"max_tokens": 5}, body | {"seed": 2}, body)
    assert batches(gated) == (4, 6)  # the holder; three that are alike but for the seed; and two of their own


def test_the_oldest_is_served_first(gated):
    """Those who asked for the same later join it; they do not overtake the others."""
    ends = {}
    first, second = {"prompt": "abc", "max_tokens": 6, "seed": 1}, {"prompt": "abc", "max_tokens": 5, "seed": 1}
    for body in (first, second):
        body["user"] = str(body["max_tokens"])
    settle = gated.engine._over

    def over(job, outcome):
        ends.setdefault(len(job.request.window(gated.model.mask_id)), time.monotonic())
        settle(job, outcome)

    gated.engine._over = over
    behind(gated, first, second, first, second)
    assert ends[1] < ends[6] < ends[5]


def test_a_batch_stays_within_the_budget_of_tokens():
    """A row of 8 tokens, pools of one: at most 8 forwards' tokens a decode, 16 a forward."""
    with running(Gated(), max_tokens_per_forward=16) as server:
        found = behind(server, {"prompt": ["abcd"] * 40, "max_tokens": 4, "seed": 1, "w": 1})
        assert found[0].status_code == 200
        assert batches(server) == (1 + 3, 41)  # 8 * 16 tokens / 8 a row = 16 prompts at a time
        assert max(server.model.calls) <= 2


def test_a_full_queue_refuses_all_of_a_request_and_says_when_to_come_back():
    with running(Gated(), limits={"max_queue": 3}) as server:
        first = held(server)
        waiting = threading.Thread(target=lambda: server.post(prompt=["a", "b"], max_tokens=2))
        waiting.start()
        until(lambda: server.metric("d5p4_waiting_prompts") == 2)
        with pytest.raises(openai.RateLimitError) as raised:
            server.client().completions.create(prompt=["a", "b"], **ASKED)
        assert int(raised.value.response.headers["retry-after"]) >= 1 and raised.value.code == "queue_full"
        assert server.metric("d5p4_waiting_prompts") == 2 and server.metric("d5p4_refused_requests_total") == 1
        last = threading.Thread(target=lambda: server.post(prompt="a", max_tokens=2))
        last.start()  # there is still room for one
        until(lambda: server.metric("d5p4_waiting_prompts") == 3)
        server.model.gate.set()
        waiting.join()
        last.join()
        assert first().status_code == 200
        until(lambda: server.metric("d5p4_waiting_prompts") == 0)
        retried = server.client(max_retries=3).completions.create(prompt="a", **ASKED)
        assert retried.choices


@pytest.mark.parametrize("clients", [32, pytest.param(256, marks=pytest.mark.full)])
def test_many_clients_at_once_each_get_their_own(clients):
    """Prompts, seeds and numbers of answers differ; half of them stream, and see only drafts of their own."""
    letters = "abcdefghij"
    model = Slow(0.002)

    def prompt(number):
        return letters[number % 10] * (1 + number % 7) + letters[number // 10 % 10]

    with running(model) as server:
        def ask(number):
            asked = {"model": NAME, "prompt": prompt(number), "n": 1 + number % 2, "seed": number, "max_tokens": 6}
            if number % 4 < 2:
                return [choice.text for choice in server.client().completions.create(**asked).choices], []
            texts, drafts = [""] * asked["n"], []
            for chunk in server.client().completions.create(stream=True, **asked):
                drafts += (getattr(chunk, "d5p4", None) or {}).get("drafts", [])
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
            return texts, drafts

        found = together(*(lambda number=number: ask(number) for number in range(clients)))
        count, prompts = batches(server)
    assert prompts == clients and count < clients / 2
    quick = FakeModel()
    for number, answer in enumerate(found):
        assert not isinstance(answer, Exception), answer
        shots = []
        offline = d5p4.generate(
            quick, prompt(number), chat=False, seed=number, gen_length=6, **differing(1 + number % 2),
            callback=lambda shot, shots=shots: shots.append(d5p4.view.drafts(quick, shot, 0)),
        )  # fmt: skip
        texts, drafts = answer
        assert texts == offline.texts[0]
        own = [draft["tokens"] for shot in shots for draft in shot]
        assert all(draft["tokens"] in own for draft in drafts)


def test_an_answer_does_not_wait_for_an_acknowledgement(server):
    """Small writes go out at once: a connection that is kept open answers in less than the 40 ms of a delayed one."""
    waits = []
    for _ in range(20):
        start = time.monotonic()
        server.post(n=0)
        waits.append(time.monotonic() - start)
    assert sorted(waits)[10] < 0.03, waits


def test_the_event_loop_answers_while_a_decode_runs_and_a_long_prompt_is_encoded():
    """A decode of a quarter of a second a forward; bodies of a megabyte, a text and a list of lists, ten times."""
    with running(Slow(0.25)) as server:
        text, lists = b'{"prompt": "' + b"a" * 1_000_000 + b'"}', b'{"prompt": [' + b"[1]," * 250_000 + b"[1]]}"
        decode = lambda: server.post(prompt="abc", max_tokens=4)  # noqa: E731
        encode = [lambda body=body: server.raw(body) for body in (text, lists) * 5]

        def ask():
            waits = []
            for _ in range(30):
                start = time.monotonic()
                assert server.http.get("/healthz").status_code == 200
                waits.append(time.monotonic() - start)
                time.sleep(0.02)
            return sorted(waits)

        decoded, waits, *encoded = together(decode, ask, *encode)
        assert decoded.status_code == 200 and {found.status_code for found in encoded} == {400}
        assert waits[26] < 0.25 and waits[-1] < 1.5, waits[-5:]  # nine in ten
