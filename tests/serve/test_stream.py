"""Server-sent events: drafts while the answers are denoised, then what the plain response holds."""

import openai
import pytest
import tokenizers
from tokenizers import decoders, models

import d5p4
from d5p4.models.tokenizer import Tokenizer
from d5p4.prompts import Request
from d5p4.serve.job import settled_text
from tests.fake import FakeModel, fitting
from tests.serve.running import NAME, Faulty, Gated, running

ASKED = {"model": NAME, "n": 3, "seed": 3, "max_tokens": 10}


def collected(stream):
    """(texts by choice, finish reasons by choice, chunks)"""
    texts, reasons, chunks = {}, {}, list(stream)
    for chunk in chunks:
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
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
        texts, reasons, chunks = collected(
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
    assert all(
        (chance is None) == (token is None) for chance, token in zip(draft["logprobs"], draft["tokens"], strict=True)
    )
    assert chunks[-1].choices == [] and chunks[-1].usage.to_dict() == plain.usage.to_dict()
    ends = [chunk for chunk in chunks if "settings" in (getattr(chunk, "d5p4", None) or {})]
    assert len(ends) == 1 and ends[0].d5p4 == plain.d5p4
    sent = {c.index: c.logprobs for chunk in chunks for c in chunk.choices if c.logprobs is not None}
    assert [sent[i].token_logprobs for i in range(3)] == [c.logprobs.token_logprobs for c in plain.choices]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


@pytest.mark.parametrize("prompt", ["abc", pytest.param("al", marks=pytest.mark.full)], ids=["appended", "filled"])
@pytest.mark.parametrize("carry_over", [True, pytest.param(False, marks=pytest.mark.full)])
def test_settled_text_is_never_taken_back(carry_over, prompt):
    """With n = 1, after every step of every method: it only grows, and the final text begins with it."""
    model, grown = FakeModel(carry_over=carry_over), 0
    request = Request(model.tokenizer.encode(prompt), 8)
    for method in d5p4.METHODS:
        cases = {"w": 1, "block_length": 2}, {"w": 4}, {"w": 3, "spare": 2, "distinct": True, "eos": "free"}
        if d5p4.METHODS[method].tree:
            cases = {"block_length": 2}, {}, {"spare": 2, "eos": "free"}, {"spare": 2, "temperature": 0}
        for options in cases:
            texts = [""]

            def watch(shot, texts=texts):
                rows = shot.next_tokens[0] if shot.next_awake is None else shot.next_tokens[0][shot.next_awake[0]]
                texts.append(settled_text(model, request, rows.tolist(), STOPS))

            asked = fitting({"k": 1, "gen_length": 8, "chat": False, "seed": 2, "method": method} | options)
            final = d5p4.generate(model, prompt, callback=watch, stop_strings=STOPS, **asked).texts[0][0]
            for before, after in zip(texts, [*texts[1:], final], strict=True):
                assert after.startswith(before), (method, options)
            grown += len(set(texts)) > 3
    assert grown > len(d5p4.METHODS)  # it is not empty until the end


STOPS = ["bcd", "ii"]


def test_settled_text_holds_no_part_of_a_character():
    """Characters of several byte-level tokens, and bytes of a vocabulary that falls back to them."""
    levels = tokenizers.Tokenizer(models.BPE({"â": 0, "Ĥ": 1, "¬": 2, "Ġa": 3, "<m>": 4}, []))
    levels.decoder = decoders.ByteLevel()
    fallback = {"<0xE2>": 0, "<0x82>": 1, "<0xAC>": 2, "▁a": 3, "<m>": 4, "<0x0A>": 5}
    falls = tokenizers.Tokenizer(models.BPE(fallback, []))
    falls.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    for backend in (levels, falls):
        model = FakeModel()
        model.tokenizer, model.mask_id = Tokenizer(backend, mask_id=4), 4
        for ids in ([3, 0, 1, 2, 3], [3, 0, 1, 3, 3], [0, 0, 1, 2, 2], [3, 3, 0, 1, 2], [3, 5, 0, 3, 3]):
            final, sent = model.tokenizer.decode(ids), ""
            for count in range(6):
                row = ids[:count] + [4] * (5 - count)
                text = settled_text(model, Request([3], 5), [row], [])
                assert text.startswith(sent) and final.startswith(text) and "\ufffd" not in text[-1:]
                sent = text
            assert ids[-1] != 3 or sent == final


def test_one_answer_is_sent_as_it_grows(monkeypatch):
    """An ordinary client sees text before the end, and never has to take anything back."""
    monkeypatch.setattr("d5p4.serve.job.DRAFT_SECONDS", 0)
    with running(Gated()) as server:
        asked = {"model": NAME, "prompt": "abc", "max_tokens": 10, "seed": 3, "logprobs": 0}
        ours = {"block_length": 1}
        server.model.turns.release()

        def opened(stream):
            """Every step waits until the draft of the step before it has come."""
            for chunk in stream:
                if draft_of(chunk):
                    server.model.turns.release()
                yield chunk

        texts, _, chunks = collected(opened(server.client().completions.create(stream=True, extra_body=ours, **asked)))
        server.model.gate.set()
        plain = server.client().completions.create(extra_body=ours, **asked).choices[0]
        deltas = [chunk.choices[0].text for chunk in chunks if draft_of(chunk)]
        assert texts[0] == plain.text and len([delta for delta in deltas if delta]) >= 8
        sent = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
        assert [logprobs.token_logprobs for logprobs in sent] == [plain.logprobs.token_logprobs]


def test_a_chat_stream(server):
    """Read by a naive loop, as in everybody's first program, and accumulated by the client library."""
    client, messages = server.client(), [{"role": "user", "content": "abc"}]
    plain = client.chat.completions.create(messages=messages, **ASKED)
    text = ""
    for chunk in client.chat.completions.create(stream=True, messages=messages, **ASKED | {"n": 1}):
        text += chunk.choices[0].delta.content or ""
    alone = client.chat.completions.create(messages=messages, **ASKED | {"n": 1})
    assert text == alone.choices[0].message.content != ""
    with client.chat.completions.stream(messages=messages, **ASKED) as stream:
        stream.until_done()
        final = stream.current_completion_snapshot
    assert [c.message.content for c in final.choices] == [c.message.content for c in plain.choices]
    assert {c.message.role for c in final.choices} == {"assistant"}


def test_an_error_before_the_stream_is_a_status_and_in_it_an_event():
    with running(Faulty({"x": "raise"})) as server:
        with pytest.raises(openai.BadRequestError):
            server.client().completions.create(model=NAME, prompt="abc", stream=True, n=0)
        with pytest.raises(openai.APIError, match="the decode failed"):
            list(server.client().completions.create(model=NAME, prompt="xyz", stream=True, max_tokens=4))
