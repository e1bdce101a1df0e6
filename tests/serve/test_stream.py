"""Server-sent events: drafts while the answers are denoised, then what the plain response holds."""

import json

import openai
import pytest

from tests.serve.models import Faulty, Gated
from tests.serve.running import NAME, running

ASKED = {"model": NAME, "n": 3, "seed": 3, "max_tokens": 10}


def told(stream):
    """(texts by choice, finish reasons by choice, chunks)"""
    texts, reasons, chunks = {}, {}, list(stream)
    for chunk in chunks:
        for choice in chunk.choices:
            said = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (said or "")
            if choice.finish_reason is not None:
                assert reasons.setdefault(choice.index, choice.finish_reason) == choice.finish_reason
    return texts, reasons, chunks


def draft_of(chunk):
    return "drafts" in (getattr(chunk, "d5p4", None) or {})


def test_the_deltas_are_the_answers_and_drafts_come_first():
    with running(Gated()) as server:
        def opened(stream):
            """The second step waits until there was a draft of the first."""
            for chunk in stream:
                if draft_of(chunk):
                    server.model.gate.set()
                yield chunk

        client = server.client()
        usage = {"include_usage": True}
        server.model.turns.release()
        texts, reasons, chunks = told(
            opened(client.completions.create(prompt="abc", logprobs=0, stream=True, stream_options=usage, **ASKED))
        )
        plain = client.completions.create(prompt="abc", logprobs=0, **ASKED)
    assert list(texts.values()) == [choice.text for choice in plain.choices]
    assert reasons == {choice.index: choice.finish_reason for choice in plain.choices}
    first_text = next(i for i, chunk in enumerate(chunks) if any(choice.text for choice in chunk.choices))
    drafts = [i for i, chunk in enumerate(chunks) if draft_of(chunk)]
    assert drafts and drafts[-1] < first_text
    steps = [chunks[i].d5p4["step"] for i in drafts]
    assert steps == sorted(set(steps)) and steps[-1] <= chunks[drafts[0]].d5p4["steps"] == 10
    draft = chunks[drafts[0]].d5p4["drafts"][0]
    assert len(draft["tokens"]) == 10 and None in draft["tokens"] and "░" in draft["text"]
    assert all((chance is None) == (token is None)
               for chance, token in zip(draft["logprobs"], draft["tokens"], strict=True))  # fmt: skip
    assert chunks[-1].choices == [] and chunks[-1].usage.to_dict() == plain.usage.to_dict()
    ends = [chunk for chunk in chunks if "settings" in (getattr(chunk, "d5p4", None) or {})]
    assert len(ends) == 1 and ends[0].d5p4 == plain.d5p4
    sent = {c.index: c.logprobs for chunk in chunks for c in chunk.choices if c.logprobs is not None}
    assert [sent[i].token_logprobs for i in range(3)] == [c.logprobs.token_logprobs for c in plain.choices]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_a_chat_stream(server):
    """Read by a naive loop, as in everybody's first program, and accumulated by the client library."""
    client, messages = server.client(), [{"role": "user", "content": "abc"}]
    plain = client.chat.completions.create(messages=messages, **ASKED)
    said = ""
    for chunk in client.chat.completions.create(stream=True, messages=messages, **ASKED | {"n": 1}):
        said += chunk.choices[0].delta.content or ""
    alone = client.chat.completions.create(messages=messages, **ASKED | {"n": 1})
    assert said == alone.choices[0].message.content != ""
    with client.chat.completions.stream(messages=messages, **ASKED) as stream:
        stream.until_done()
        final = stream.current_completion_snapshot
    assert [c.message.content for c in final.choices] == [c.message.content for c in plain.choices]
    assert {c.message.role for c in final.choices} == {"assistant"}


def test_several_prompts_stops_and_holes(server):
    for given in ({"prompt": ["abc", "d"], "stop": ["e"]}, {"prompt": "albl", "n": 1}):
        texts, _, _ = told(server.client().completions.create(stream=True, **ASKED | given))
        plain = server.client().completions.create(**ASKED | given).choices
        assert [texts[i] for i in range(len(plain))] == [choice.text for choice in plain]


def test_history_comes_with_the_end(server):
    asked = ASKED | {"prompt": ["abc", "d"], "extra_body": {"history": True}}
    _, _, chunks = told(server.client().completions.create(stream=True, **asked))
    plain = server.client().completions.create(**asked)
    sent = [chunk.d5p4["history"] for chunk in chunks if "history" in (getattr(chunk, "d5p4", None) or {})]
    assert len(sent) == 1
    for found, expected in zip(sent[0], plain.d5p4["history"], strict=True):
        assert found | {"seconds": 0} == expected | {"seconds": 0}


def test_the_bytes_are_events(server):
    body = ASKED | {"prompt": "abc", "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = response.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        assert event.startswith("data: ") and json.loads(event[6:])["object"] == "text_completion"


def test_an_error_before_the_stream_is_a_status_and_in_it_an_event():
    with running(Faulty({"x": "raise"})) as server:
        with pytest.raises(openai.BadRequestError):
            server.client().completions.create(model=NAME, prompt="abc", stream=True, n=0)
        with pytest.raises(openai.APIError, match="the decode failed"):
            list(server.client().completions.create(model=NAME, prompt="xyz", stream=True, max_tokens=4))


def test_a_silent_decode_tells_proxies_that_it_lives(monkeypatch):
    monkeypatch.setattr("d5p4.serve.stream.STILL_HERE", 0.05)
    with running(Gated()) as server:
        body = {"prompt": "abc", "stream": True, "max_tokens": 2}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            events = ""
            for part in response.iter_text():
                events += part
                if ": still here\n\n" in events:
                    server.model.gate.set()
        assert events.endswith("data: [DONE]\n\n")
        texts, _, _ = told(server.client().completions.create(model=NAME, **body))
        assert len(texts[0]) == 2
