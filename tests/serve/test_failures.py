"""When a decode goes wrong, that client hears of it; the others in the batch get their answers; the server lives."""

import logging

import pytest

import d5p4
from tests.fake import FakeModel
from tests.serve.running import Faulty, running, together, until

BODY = {"max_tokens": 4, "seed": 1}


@pytest.mark.parametrize("fault", ["raise", "nan", "memory"])
def test_one_bad_prompt_in_a_batch(fault, caplog):
    prompts = ["abc", "xbc", "bca", "cab"]
    with running(Faulty({"x": fault})) as server, caplog.at_level(logging.INFO):
        expected = [d5p4.generate(Faulty({}), text, k=1, chat=False, gen_length=4, seed=1).texts[0] for text in prompts]
        reply = together(*(lambda text=text: server.post(prompt=text, **BODY) for text in prompts))
        for text, response, answer in zip(prompts, reply, expected, strict=True):
            if text[0] == "x" and fault != "memory":
                error = response.json()["error"]
                assert response.status_code == 500 and error["type"] == "server_error"
                assert ("not finite" if fault == "nan" else "the decode failed") in error["message"]
            else:
                assert [choice["text"] for choice in response.json()["choices"]] == answer
        assert server.metric("d5p4_running_prompts") == 0
        assert server.post(prompt="abc", **BODY).json()["choices"][0]["text"] == expected[0][0]
    assert ("a decode failed: RuntimeError" in caplog.text) == (fault == "raise")
    assert "xbc" not in caplog.text  # an exception's message may quote a prompt


def test_one_bad_prompt_of_a_request_fails_it_whole():
    with running(Faulty({"x": "nan"})) as server:
        assert server.post(prompt=["abc", "xbc"], **BODY).status_code == 500
        assert server.post(prompt=["abc", "bbc"], **BODY).status_code == 200
        assert server.post(prompt=["xbc", "al"], n=1).status_code == 500  # which do not share a decode
        assert server.metric("d5p4_cancelled_prompts_total") == 0  # only clients that left count
        # Guidance that overflows is the client's fault.
        assert server.post(prompt="abc", guidance=1e30, **BODY).status_code == 200
        reply = server.post(prompt="xbc", guidance=2.0, **BODY)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "guidance")


def test_a_request_that_nobody_foresaw_is_a_500_without_its_text_in_the_log(caplog):
    model = Faulty({})

    def encode(text):
        raise KeyError(f"marked {text}")

    with running(model) as server, caplog.at_level(logging.INFO):
        model.tokenizer.encode = encode
        reply = server.post(prompt="secret", **BODY)
        assert reply.status_code == 500 and "the server failed" in reply.json()["error"]["message"]
        assert server.http.get("/healthz").status_code == 200
    assert "KeyError" in caplog.text and "secret" not in caplog.text
    with running(Faulty({}), log_prompts=True) as server, caplog.at_level(logging.INFO):
        assert server.post(prompt="abcabc", **BODY).status_code == 200
    assert "abcabc" in caplog.text  # where it is asked for


def test_a_model_that_cannot_be_loaded_is_told_and_logged(caplog):
    failures = []

    def load():
        raise d5p4.D5P4Error("there is no such thing")

    with running(load, failed=failures.append) as server, caplog.at_level(logging.INFO):
        until(lambda: server.http.get("/readyz").json()["status"] == "failed")
        reply = server.post(prompt="abc", **BODY)
        assert reply.status_code == 503 and "could not be loaded" in reply.json()["error"]["message"]
        for model, fixed in ((FakeModel(), {"cache": "exact"}), (FakeModel(), {})):
            model.generation_defaults = {} if fixed else {"steps": 0}
            with running(lambda model=model: model, failed=failures.append, **fixed) as unusable:
                until(lambda server=unusable: server.http.get("/readyz").json()["status"] == "failed")
    assert "there is no such thing" in caplog.text and str(failures[0]) == "there is no such thing"
    assert [error.option for error in failures[1:]] == ["cache", "steps"]  # refused once, not in every request
