"""Conversations, through the model's template or without one."""

import openai
import pytest

import d5p4
from tests.checkpoints import write_llada
from tests.serve.running import NAME, running

TALK = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "a cat?"},
    {"role": "assistant", "content": "yes."},
    {"role": "user", "content": "and a dog?"},
]


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    """A tiny checkpoint with a chat template."""
    folder = write_llada(tmp_path_factory.mktemp("models") / "talker", chat=True)
    with running(d5p4.load(folder, dtype="float64"), name="talker") as server:
        yield server


def test_a_conversation_is_rendered_by_the_template(talking):
    """The ids of the prompt are a field of the response or, in a stream, of its first chunk."""
    ours = {"return_token_ids": True, "return_step_maps": True}
    asked = {"model": "talker", "messages": TALK, "n": 3, "seed": 5, "max_completion_tokens": 6, "logprobs": True}
    reply = talking.client().chat.completions.create(extra_body=ours, **asked)
    result = d5p4.generate(talking.model, [TALK], seed=5, gen_length=6, logprobs=True, k=3)
    assert [choice.message.content for choice in reply.choices] == result.texts[0]
    assert {choice.message.role for choice in reply.choices} == {"assistant"}
    assert reply.object == "chat.completion" and reply.id.startswith("chatcmpl-")
    prompt = talking.model.tokenizer.encode(talking.model.tokenizer.chat(TALK))
    assert reply.prompt_token_ids == prompt and reply.usage.prompt_tokens == len(prompt)
    assert [choice.token_ids for choice in reply.choices] == result.answers[0]
    assert [choice.step_map for choice in reply.choices] == [[s + 1 for s in row] for row in result.reveal_step[0]]
    chunks = list(talking.client().chat.completions.create(stream=True, extra_body=ours, **asked))
    assert [getattr(chunk, "prompt_token_ids", None) for chunk in chunks] == [prompt] + [None] * (len(chunks) - 1)
    sent = [(one.index, one.token_ids) for chunk in chunks for one in chunk.choices if one.token_ids]
    assert sorted(sent) == list(enumerate(result.answers[0]))  # every choice has them once
    for choice, chances in zip(reply.choices, result.logprobs[0], strict=True):
        tokens = choice.logprobs.content
        assert [one.logprob for one in tokens] == pytest.approx(chances)
        assert "".join(one.token for one in tokens) == choice.message.content
        assert bytes(sum((one.bytes for one in tokens), [])).decode() == choice.message.content


def test_parts_of_text_and_new_role_names_mean_the_same(talking):
    def answers(messages):
        asked = {"model": "talker", "messages": messages, "seed": 5, "max_tokens": 6}
        return [choice.message.content for choice in talking.client().chat.completions.create(**asked).choices]

    parts = [{"type": "text", "text": "be"}, {"type": "text", "text": " short"}]
    assert answers(TALK) == answers([{"role": "developer", "content": parts}, *TALK[1:]])


def test_completions_never_apply_the_template(talking):
    reply = talking.client().completions.create(model="talker", prompt="a cat", seed=5, max_tokens=6)
    result = d5p4.generate(talking.model, "a cat", chat=False, k=1, seed=5, gen_length=6)
    assert reply.usage.prompt_tokens == 5 and reply.choices[0].text == result.texts[0][0]


def test_without_a_template_one_message_is_the_prompt(client, server):
    asked = {"model": NAME, "n": 2, "seed": 3, "max_tokens": 6}
    chat = client.chat.completions.create(messages=[{"role": "user", "content": "abc"}], **asked)
    plain = client.completions.create(prompt="abc", **asked)
    assert [c.message.content for c in chat.choices] == [c.text for c in plain.choices]
    for messages in (TALK, [{"role": "system", "content": "abc"}]):
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model=NAME, messages=messages)


def test_messages_that_are_not_text(client, talking):
    with pytest.raises(openai.BadRequestError, match="mask token"):
        talking.client().chat.completions.create(
            model="talker", messages=[{"role": "user", "content": "a <|mdm_mask|>"}]
        )
    image = {"type": "image_url", "image_url": {"url": "x"}}
    for message in ({"role": "user", "content": [image]}, {"role": "user", "content": 5}, {"content": "abc"}, "abc"):
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(model=NAME, messages=[message])
        assert raised.value.param == "messages", message
