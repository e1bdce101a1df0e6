"""Requests that come together are decoded together, and nobody gets what belongs to another."""

import threading

import openai
import pytest

import d5p4
from tests.fake import FakeModel
from tests.serve.running import NAME, Gated, running, together, until

ASKED = {"model": NAME, "max_tokens": 6, "seed": 1}


def being_decoded(server):
    """A request that is being decoded and waits for the gate; call it for its answer."""
    replies = []
    asked = {"prompt": "a", "max_tokens": 1, "seed": 1}
    thread = threading.Thread(target=lambda: replies.append(server.post(**asked)))
    thread.start()
    until(server.model.entered.is_set)

    def answer():
        thread.join()
        return replies[0]

    return answer


def steps(server):
    """(number of steps of groups, prompts in them)"""
    return server.metric("d5p4_batch_prompts_count"), server.metric("d5p4_batch_prompts_sum")


def test_a_batch_stays_within_the_budget_of_tokens():
    """A row of 8 tokens, pools of one: 16 tokens per forward, and at most 8 forwards' tokens per decode."""
    with running(Gated(), max_tokens_per_forward=16) as server:
        first = being_decoded(server)

        def open_gate():
            until(lambda: server.metric("d5p4_waiting_prompts") == 40)
            server.model.calls.clear()
            server.model.gate.set()

        reply, _ = together(lambda: server.post(prompt=["abcd"] * 40, max_tokens=4, seed=1), open_gate)
        assert reply.status_code == first().status_code == 200
        until(lambda: steps(server) == (1 + 3 * 4, 1 + 40 * 4))  # 8 * 16 tokens, 8 per row: 16 prompts at a time
        assert max(server.model.calls) <= 2


def test_a_full_queue_refuses_all_of_a_request_and_says_when_to_come_back():
    with running(Gated(), limits={"max_queue": 3}) as server:
        first = being_decoded(server)
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


@pytest.mark.parametrize("clients", [12, pytest.param(240, marks=pytest.mark.full)])
def test_many_clients_at_once_each_get_their_own(clients):
    """Prompts, seeds and numbers of answers differ; half of them stream, and see only drafts of their own."""
    letters = "abcdefghij"

    def prompt(number):
        return letters[number % 10] * (1 + number % 7) + letters[number // 10 % 10]

    with running(Gated()) as server:

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

        def open_gate():
            until(lambda: server.metric("d5p4_waiting_prompts") == clients)
            server.model.gate.set()

        being_decoded(server)
        *replies, _ = together(*(lambda number=number: ask(number) for number in range(clients)), open_gate)
        count, prompts = steps(server)
    assert prompts > 2 * count
    quick = FakeModel()
    for number, answer in enumerate(replies):
        assert not isinstance(answer, Exception), answer
        shots = []
        options = {"chat": False, "seed": number, "gen_length": 6, "k": 1 + number % 2}
        options["callback"] = lambda shot, shots=shots: shots.append(d5p4.view.drafts(quick, shot, 0))
        offline = d5p4.generate(quick, prompt(number), **options)
        texts, drafts = answer
        assert texts == offline.texts[0]
        own = [draft["tokens"] for shot in shots for draft in shot]
        assert all(draft["tokens"] in own for draft in drafts)


def test_the_event_loop_answers_while_a_template_is_rendered_or_a_prompt_encoded():
    """As it does while a decode runs, which most tests of this folder rely on. The list of models renders nothing."""
    for slow in ("chat", "encode"):
        begun, over = threading.Event(), threading.Event()

        def wait(_, slow=slow, begun=begun, over=over):
            begun.set()
            return over.wait(60) and {"chat": "abc", "encode": [1]}[slow]

        def look(begun=begun, over=over):
            until(begun.is_set)
            try:
                return [server.http.get(path).status_code for path in ("/healthz", "/v1/models", "/v1/models/fake")]
            finally:
                over.set()

        with running(FakeModel(template=True)) as server:
            setattr(server.model.tokenizer, slow, wait)
            body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 1}
            reply, looks = together(lambda body=body: server.post("/v1/chat/completions", **body), look)
            assert (reply.status_code, looks) == (200, [200] * 3), slow
