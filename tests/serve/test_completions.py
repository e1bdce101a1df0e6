"""The official client gets what `d5p4.generate` gives, in OpenAI's words."""

import pytest

import d5p4
from d5p4.eval.countdown import is_right
from d5p4.result import rounded
from d5p4_lab.puzzles import problems
from tests.serve.running import NAME, running

SMALL = {"model": NAME, "max_tokens": 6, "seed": 3}


def offline(model, prompts, **options):
    """What the server should answer with: it adds no options of its own."""
    given = {"k": 1, "chat": False, "seed": 3, "gen_length": 6, "logprobs": True}
    return d5p4.generate(model, prompts, **given | options)


def test_n_answers_are_different_and_the_best_is_first(client, server):
    reply = client.completions.create(prompt="abc", n=4, **SMALL)
    result = offline(server.model, "abc", k=4)
    assert [choice.text for choice in reply.choices] == result.texts[0]
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in reply.choices}) == reply.d5p4["distinct"] == 4
    scores, distances = ([choice.d5p4[name] for choice in reply.choices] for name in ("score", "distance"))
    assert (scores, distances) == (rounded(result[0].score), rounded(result[0].distance))
    assert scores == sorted(scores, reverse=True) and max(len(str(score)) for score in scores) <= len("-0.123456")
    assert (reply.object, reply.model, reply.id[:5]) == ("text_completion", NAME, "cmpl-")
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, sum(map(len, result.answers[0])))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    for name in ("rows", "rows_nominal", "nfe"):
        assert getattr(usage, name) == getattr(result, name)[0]
    assert usage.seed == reply.d5p4["seed"] == 3
    assert not {"token_ids", "step_map", "prompt_token_ids"} & reply.choices[0].to_dict().keys()  # nobody asked


def test_fewer_texts_than_n_are_fewer_choices(client):
    """The model has two texts of one token. The last indices of each prompt are missing, in a stream, too."""
    asked = {"model": NAME, "prompt": ["abc", "d"], "n": 4, "max_tokens": 1, "seed": 1, "extra_body": {"top_k": 2}}
    reply = client.completions.create(**asked)
    assert [choice.index for choice in reply.choices] == [0, 1, 4, 5]
    assert reply.d5p4["distinct"] == len(reply.choices) == 4
    texts, reasons = {}, {}
    for choice in [choice for chunk in client.completions.create(stream=True, **asked) for choice in chunk.choices]:
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        reasons[choice.index] = choice.finish_reason  # of the last chunk of the choice
    assert texts == {choice.index: choice.text for choice in reply.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in reply.choices}


def test_a_fresh_seed_gives_the_same_answers_again(client):
    asked = {"prompt": "abc", "n": 3, "max_tokens": 8, "model": NAME}
    first, other = (client.completions.create(**asked) for _ in range(2))
    again = client.completions.create(**asked, seed=first.usage.seed)
    assert first.usage.seed != other.usage.seed
    assert [c.text for c in first.choices] == [c.text for c in again.choices]
    assert [c.text for c in first.choices] != [c.text for c in other.choices]


def test_holes_alone_are_filled_where_no_length_is_given(client, server):
    reply = client.completions.create(model=NAME, prompt="ablldl", seed=3, logprobs=0)
    result = offline(server.model, "ablldl", gen_length=None)
    text, logprobs = reply.choices[0].text, reply.choices[0].logprobs
    assert text == result.texts[0][0] and len(text) == 6 and reply.usage.completion_tokens == 3
    assert "".join(logprobs.tokens) == text and logprobs.text_offset == list(range(6))
    assert [logprobs.token_logprobs[i] for i in (0, 1, 4)] == [logprobs.reveal_step[i] for i in (0, 1, 4)] == [None] * 3
    assert [logprobs.token_logprobs[i] for i in (2, 3, 5)] == pytest.approx(result.logprobs[0][0])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["abc", ["abc", "", "a" * 40], [[1, 2], [3]], "abldl"])
def test_token_ids_and_step_maps(client, server, prompt, stream):
    """They are those of `d5p4.generate`, decode to the text, and line up with the log-probabilities. A stop cuts only
    the text. In a stream, the first chunk of a choice has its prompt, and the lists of its chunks can be joined."""
    for n in (1, 3):
        whole, first = offline(server.model, prompt, k=n, method="d5p4"), {}
        stop = whole.texts[0][0][-2]
        result = offline(server.model, prompt, k=n, method="d5p4", stop_strings=stop)
        asked = {"prompt": prompt, "n": n, "logprobs": 0, "stream": stream, **SMALL}
        ours = {"return_token_ids": True, "return_step_maps": True, "method": "d5p4"}
        reply = client.completions.create(stop=stop, extra_body=ours, **asked)
        for choice in [choice for chunk in reply for choice in chunk.choices] if stream else reply.choices:
            whole = first.setdefault(choice.index, choice)
            assert hasattr(choice, "prompt_token_ids") == (choice is whole)
            if choice is not whole:
                whole.text += choice.text
                whole.token_ids += choice.token_ids
                whole.step_map += choice.step_map
                whole.logprobs = choice.logprobs or whole.logprobs
        choices = [first[index] for index in sorted(first)]
        assert [choice.token_ids for choice in choices] == sum(result.answers, [])
        assert [choice.step_map for choice in choices] == [[s + 1 for s in row] for row in sum(result.reveal_step, [])]
        assert all(set(choice.step_map) <= set(range(1, 9)) for choice in choices)  # 6 tokens and 2 holes
        for choice, text in zip(choices, sum(result.texts, []), strict=True):
            answer, mask = iter(choice.token_ids), server.model.mask_id
            ids = [next(answer) if token == mask else token for token in choice.prompt_token_ids]
            ids = (ids if mask in choice.prompt_token_ids else []) + list(answer)
            assert server.model.tokenizer.decode(ids).partition(stop)[0] == text == choice.text
            rows = zip(choice.logprobs.tokens, choice.logprobs.reveal_step, strict=True)
            lined_up = [(server.model.tokenizer.encode(token)[0], s + 1) for token, s in rows if s is not None]
            assert lined_up == list(zip(choice.token_ids, choice.step_map, strict=True))
        for choice, chances in zip(choices, sum(result.logprobs, []), strict=True):
            assert [x for x in choice.logprobs.token_logprobs if x is not None] == pytest.approx(chances)
            assert choice.logprobs.top_logprobs is None
        encoded = [server.model.tokenizer.encode(one) if isinstance(one, str) else one for one in listed(prompt)]
        assert [choice.prompt_token_ids for choice in choices] == [ids for ids in encoded for _ in range(n)]
        assert stream or reply.usage.prompt_tokens == sum(map(len, encoded))


def listed(prompt):
    return prompt if isinstance(prompt, list) else [prompt]


def test_stop_cuts_the_answer_and_says_so(client):
    ours = {"extra_body": {"method": "d5p4"}}  # which returns texts that are equal after the cut
    whole = client.completions.create(prompt="abc", n=4, **SMALL, **ours).choices
    letter = whole[0].text[2]
    for stop in (letter, ["zzz", letter]):
        cut = client.completions.create(prompt="abc", n=4, stop=stop, **SMALL, **ours).choices
        for before, after in zip(whole, cut, strict=True):
            assert after.text == before.text.partition(letter)[0]
            assert after.finish_reason == ("stop" if letter in before.text else before.finish_reason)
    for method in ("tree", "d5p4"):
        asked = {"prompt": "abc", "n": 4, "max_tokens": 8, "seed": 1, "model": NAME, "stop": [letter]}
        reply = client.completions.create(**asked, extra_body={"method": method})
        texts = [choice.text for choice in reply.choices]
        assert reply.d5p4["distinct"] == len(set(texts)) and (method != "tree" or len(set(texts)) == len(texts))


def test_an_answer_that_the_model_ends_stops_and_others_reach_their_length(client):
    ours = {"eos": "free"}
    asked = {"model": NAME, "prompt": "abc", "n": 16, "max_tokens": 8, "seed": 1, "temperature": 4}
    reply = client.completions.create(extra_body=ours, **asked)
    reasons = {len(choice.text) < 8: choice.finish_reason for choice in reply.choices}
    assert reasons == {True: "stop", False: "length"}


def test_history_is_the_trace(client, server):
    reply = client.completions.create(prompt=["abc", "de"], n=2, extra_body={"history": True}, **SMALL)
    for text, sent in zip(("abc", "de"), reply.d5p4["history"], strict=True):
        own = d5p4.view.trace(server.model, text, chat=False, seed=3, gen_length=6, k=2)
        for name in own.keys() - {"seconds", "settings"}:
            assert sent[name] == own[name], name
    plain = client.completions.create(prompt=["abc", "de"], n=2, **SMALL)
    assert [choice.text for choice in reply.choices] == [choice.text for choice in plain.choices]


def test_models(client):
    listed = client.models.list().data
    assert [entry.id for entry in listed] == [NAME]
    about = client.models.retrieve(NAME).d5p4
    assert about == listed[0].d5p4
    assert about["options"]["n"]["python"] == "k" and {rule["name"] for rule in about["reveals"]} == set(d5p4.REVEALS)
    methods = {method["name"]: method for method in about["methods"]}
    assert methods.keys() == d5p4.METHODS.keys()
    tree = methods["tree"]
    assert {"distinct", "quality", "features"} <= set(tree["unused"]) and tree["defaults"]["order"] == "top"
    reply = client.completions.create(prompt="a" * 60, model=NAME, seed=1)
    assert reply.usage.completion_tokens <= 4  # as much as fits


def test_answers_to_a_puzzle_are_marked_right_or_wrong():
    [puzzle] = problems(1)
    with running(d5p4.load("countdown", dtype="float32"), limits={"timeout": 3600.0}) as server:
        reply = server.post(prompt=puzzle.prompt, n=4, seed=0, steps=6, spare=0).json()
    texts = [choice["text"] for choice in reply["choices"]]
    assert len(texts) == len(set(texts)) == reply["d5p4"]["distinct"] == 4
    assert [choice["d5p4"]["right"] for choice in reply["choices"]] == [is_right(puzzle, text) for text in texts]
