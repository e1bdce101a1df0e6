"""Every knob of `d5p4.generate` that a client may turn reaches the decode."""

import random
from dataclasses import dataclass

import pytest

import d5p4
from d5p4.methods import Identity
from d5p4.serve.requests import decoding_fields, request_models
from tests.fake import FakeModel, fitting
from tests.serve.running import NAME, running

TURNED = {
    "temperature": 0.7,
    "top_p": 0.9,
    "method": "diverse-beam",
    "w": 3,
    "steps": 2,
    "block_length": 2,
    "order": "random",
    "order_temperature": 0.5,
    "guidance": 1.5,
    "guidance_window": [0, 2],
    "select_window": [1, 3],
    "distinct": True,
    "top_k": 5,
    "eos": "free",
    "quality": "logprob",
    "positions": "masked",
    "normalise": "zscore",
    "spare": 3,
    "features": "mean",
    "feature_layer": "head",
    "similarity": "rbf",
    "gamma": 2.0,
    "reveal": "threshold",
    "early_stop": True,
    "start": "entropy",
    "start_temperature": 0.5,
}
RULES = {"tau": ("threshold", 0.5), "factor": ("factor", 0.5), "entropy_bound": ("entropy-bound", 0.5)}
OWN = {
    "diversity": ("tree", 0.5),
    "beta": ("d5p4", 3.5),
    "kernel": ("k-dpp", "multiplicative"),
    "alpha": ("diverse-beam", 2.5),
    "form": ("diverse-beam", "max"),
    "starts": ("diverse-beam", "one"),
    "score_temperature": ("cat", 0.5),
    "rank": ("best-of-n", "logprob"),
    "repeats": ("best-of-n", False),
    "lam": ("e-smc", 2.0),
    "interval": ("e-smc", 3),
    "weights": ("e-smc", "textbook"),
    "potential": ("e-smc", "mean"),
    "resampling": ("e-smc", "systematic"),
    "ess": ("e-smc", 0.5),
    "incremental": ("e-smc", True),
    "set_temperature": ("partition-sample", 0.5),
    "segment": ("ots", 3),
    "merge": ("ots", True),
    "shrink": ("soar", False),
    "sums": ("soar", "logprob"),
}


def test_every_option_is_a_field():
    assert decoding_fields().keys() - {"n", "max_tokens"} == TURNED.keys() | OWN.keys() | RULES.keys()
    for kind in request_models():
        assert decoding_fields().keys() <= kind.model_fields.keys()


@dataclass(frozen=True)
class Mine(Identity):
    zeal: float = 2.0


def test_a_method_registered_before_the_server_starts_works_with_its_own_parameter(monkeypatch):
    monkeypatch.setitem(d5p4.METHODS, "mine", d5p4.Method("mine", Mine, branches=False))
    with running(FakeModel()) as server:
        reply = server.post(prompt="abc", max_tokens=2, method="mine", zeal=3.5)
        assert reply.status_code == 200 and reply.json()["d5p4"]["settings"]["zeal"] == 3.5
        assert server.post(prompt="abc", max_tokens=2, zeal=3.5).json()["error"]["param"] == "zeal"
        assert server.post(prompt="abc", method="mine", zeal="x").json()["error"]["param"] == "zeal"
        assert "zeal" in server.http.get("/openapi.json").text


def test_a_setting_arrives(server):
    body = {"prompt": "abc", "n": 2, "max_tokens": 4, "seed": 1, "method": "d5p4"}
    plain = server.post(**body).json()["d5p4"]["settings"]
    for name, value in TURNED.items():
        reply = server.post(**body | {name: value})
        assert reply.status_code == 200, reply.text
        settings = reply.json()["d5p4"]["settings"]
        name = "stop" if name == "early_stop" else name
        assert settings[name] == value
        assert plain.get(name) != value
        changed = {key for key in plain | settings if plain.get(key) != settings.get(key)}
        own = {"method": {"beta", "solver", "alpha", "form", "starts"}, "reveal": {"stop", "tau"}}.get(name, set())
        assert changed - own == {name}


def test_a_method_s_own_parameter_arrives(server):
    for name, (method, value) in OWN.items():
        reply = server.post(prompt="abc", n=2, max_tokens=2, method=method, **{name: value})
        assert reply.status_code == 200, reply.text
        about = reply.json()["d5p4"]
        assert about["settings"][name] == value and about["method"] == method
    for name, (rule, value) in RULES.items():
        reply = server.post(prompt="abc", n=2, max_tokens=2, reveal=rule, **{name: value})
        assert reply.status_code == 200 and reply.json()["d5p4"]["settings"][name] == value, reply.text


def test_a_window_may_be_shares_of_the_positions(server):
    body = dict(prompt="abc", n=2, max_tokens=4, guidance=1.5, guidance_window=[0, 0.5])
    reply = server.post(**body, reveal="threshold")
    assert reply.status_code == 200 and reply.json()["d5p4"]["settings"]["guidance_window"] == [0, 0.5], reply.text
    refused = server.post(**body, method="d5p4")
    assert refused.status_code == 400 and "whole numbers" in refused.json()["error"]["message"]


@pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")
def test_every_method_answers_as_offline(client, server):
    for method in d5p4.METHODS:
        ours = fitting({"method": method, "w": 2, "distinct": True, "spare": 3})
        reply = client.completions.create(model=NAME, prompt="abc", n=3, max_tokens=3, seed=7, extra_body=ours)
        result = d5p4.generate(server.model, "abc", k=3, gen_length=3, seed=7, chat=False, **ours)
        assert [choice.text for choice in reply.choices] == result.texts[0], method
        again = d5p4.generate(server.model, "abc", seed=reply.usage.seed, **reply.d5p4["settings"])
        assert again.texts == result.texts, method
        assert [choice.d5p4["score"] for choice in reply.choices] == pytest.approx(
            result.score[0, : len(reply.choices)].tolist()
        )


EXTREME = (0, -1, 1, 2, 0.5, 1e-30, -1e-30, 1e-300, 1e30, -1e30, 1e300, 1e6, 2**31, 2**31 - 1, 2**63, -(2**63), 2**100)
NUMBERS = (
    "n",
    "max_tokens",
    "temperature",
    "top_p",
    "seed",
    "w",
    "steps",
    "block_length",
    "order_temperature",
    "guidance",
    "top_k",
    "spare",
    "gamma",
    "beta",
    "alpha",
    "score_temperature",
    "lam",
    "interval",
    "ess",
)
CHOICES = {
    "order": ("confidence", "random", "tempered", "margin", "entropy", "ancestral"),
    "eos": ("last", "free", "never"),
    "quality": ("entropy", "self-certainty", "logprob"),
    "positions": ("all", "masked"),
    "normalise": ("minmax", "absolute", "zscore"),
    "features": ("flatten", "mean", "masked", "non-masked"),
    "feature_layer": ("model", "head"),
    "similarity": ("cosine", "rbf"),
    "kernel": ("additive", "multiplicative"),
    "distinct": (True, False),
    "select_window": ([0, 0], [1, 2**31], [2, 1]),
    "guidance_window": ([0, 0], [0, 2**31], [0, 0, 0]),
    "resampling": ("multinomial", "systematic"),
    "incremental": (True, False),
    "repeats": (True, False),
    "rank": ("auto", "logprob", "scorer"),
    "weights": ("literal", "textbook"),
    "potential": ("max", "mean"),
    "form": ("mean", "max"),
}


def fuzz(server, rounds, seed):
    chance = random.Random(seed)
    seen = {}
    for number in range(rounds):
        method = chance.choice(list(d5p4.METHODS))
        own = list(d5p4.METHODS[method].parameters)
        body = {"prompt": chance.choice(["abc", "", "all", ["a", "bb"]]), "n": chance.choice([1, 2, 3])}
        body |= {"max_tokens": 4, "method": method}
        others = [name for name in (*NUMBERS, *CHOICES) if name not in ("n", "max_tokens")]
        others = [name for name in others if name in own or hasattr(d5p4.Settings, name)]
        turned = chance.sample(others, chance.randint(1, 5)) + chance.sample(own, min(1, len(own)))
        for name in turned:
            body[name] = chance.choice(CHOICES.get(name, EXTREME))
        if chance.random() < 0.1:
            body[chance.choice(["n", "max_tokens"])] = chance.choice(EXTREME)
        reply = server.post(**body)
        assert reply.status_code in (200, 400), (number, body, reply.text)
        seen[reply.status_code] = seen.get(reply.status_code, 0) + 1
    return seen


LIMITS = {"max_pool": 32, "max_gen_length": 16}


@pytest.mark.parametrize("rounds", [30, pytest.param(4000, marks=pytest.mark.full)])
@pytest.mark.parametrize("carry_over", [False, True])
def test_extreme_numbers_are_answered_or_refused(carry_over, rounds):
    with running(FakeModel(carry_over=carry_over, max_length=24), limits=LIMITS) as server:
        assert set(fuzz(server, rounds, 1)) == {200, 400}
