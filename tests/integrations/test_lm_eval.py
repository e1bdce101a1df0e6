"""The real harness asks for answers and likelihoods, and d5p4 gives them."""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

import d5p4
from d5p4.eval.countdown import is_right
from d5p4.eval.stats import pass_at
from tests.checkpoints import write_llada
from tests.fake import FakeModel

pytest.importorskip("lm_eval", reason="needs d5p4[lm-eval]")

import lm_eval  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.model import CachingLM  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from d5p4.integrations.lm_eval import D5P4LM, main  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")  # a tiny model often repeats itself

PAGE = (Path(__file__).parents[2] / "docs" / "lm-eval.md").read_text(encoding="utf-8")
SET = {"method": "d5p4", "k": 4, "w": 4, "distinct": True, "seed": 3, "gen_length": 30, "steps": 6}


def ask(*requests: tuple, kind: str = "generate_until") -> list[Instance]:
    return [Instance(kind, {}, args, 0, ("task", number, 1)) for number, args in enumerate(requests)]


def test_the_harness_runs_the_tasks_of_the_page(tmp_path, monkeypatch, capfd):
    """By its own command line, which also knows our model. Repeats are one diverse decode, best first; the choices of a
    multiple-choice task get their likelihoods."""
    monkeypatch.chdir(tmp_path)
    names = {
        "json": ["puzzles.jsonl", "choices.jsonl"],
        "yaml": ["puzzles.yaml", "choices.yaml"],
        "python": ["utils.py"],
    }
    for language, files in names.items():
        texts = re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)
        for name, text in zip(files, texts, strict=False):
            Path(name).write_text(text.replace("  data_files:", f"  cache_dir: {tmp_path}/cache\n  data_files:"))
    arguments = ",".join(f"{name}={value}" for name, value in SET.items())
    options = {"model": "d5p4", "model_args": f"pretrained=countdown,mc_samples=8,{arguments}", "device": "cpu"}
    options |= {"tasks": "puzzles,choices", "include_path": ".", "output_path": "out"}
    words = ["--log_samples", *(word for name, value in options.items() for word in (f"--{name}", value))]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words])
    quick = functools.partial(TaskManager, include_defaults=False)  # the harness's own tasks take long to list
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", quick)
    main()
    assert "|pass@4|" in capfd.readouterr().out

    def samples(task):
        (file,) = Path("out").rglob(f"samples_{task}_*.jsonl")
        return sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])

    model, puzzles = d5p4.load("countdown", device="cpu"), samples("puzzles")
    prompts = [sample["doc"]["prompt"] for sample in puzzles]
    wanted = d5p4.generate(model, prompts, **SET)
    assert [sample["resps"][0] for sample in puzzles] == wanted.texts
    right = [[is_right(prompt, text) for text in texts] for prompt, texts in zip(prompts, wanted.texts, strict=True)]
    (file,) = Path("out").rglob("results_*.json")
    results = json.loads(file.read_text())
    for n in (1, 4):
        assert results["results"]["puzzles"][f"pass@{n},all"] == pytest.approx(pass_at(right, n).mean())
    assert results["config"]["d5p4_seed"] == 3 and results["config"]["d5p4_settings"]["w"] == 4
    for sample in samples("choices"):
        bounds = [
            d5p4.loglikelihood(model, text, sample["doc"]["prompt"], 8, seed=3) for text in sample["doc"]["choices"]
        ]
        assert [float(value) for ((value, _),) in sample["resps"]] == pytest.approx(bounds)


GREEDY = {"do_sample": False, "temperature": 0.7}


def test_the_task_decides_only_what_model_args_leave_open_for_one_answer():
    model = FakeModel()
    for model_args, task, settings in (
        ({}, {}, {"temperature": 0.0}),
        ({}, GREEDY, {"temperature": 0.0}),
        ({}, {"do_sample": True, "temperature": 0.7, "top_k": 3}, {"temperature": 0.7, "top_k": 3}),
        ({}, {"temperature": 0.7, "order": "random", "steps": 4}, {"temperature": 0.7, "order": "random", "steps": 4}),
        ({}, {"do_sample": True}, {}),
        ({"temperature": 1.3}, {**GREEDY, "order": "random"}, {"temperature": 1.3, "order": "random"}),
        ({"order": "margin", "steps": 3}, {"order": "random"}, {"temperature": 0.0, "order": "margin", "steps": 3}),
        ({"k": 2}, {**GREEDY, "order": "random", "steps": 2}, {"k": 2}),  # the best of two
        ({"method": "d5p4", "k": 2, "w": 3}, GREEDY, {"method": "d5p4", "k": 2, "w": 3}),
    ):
        (answer,) = D5P4LM(model, seed=9, **model_args).generate_until(ask(("abc", {"max_gen_toks": 8, **task})))
        wanted = d5p4.generate(model, "abc", gen_length=8, seed=9, **{"k": 1, **settings})
        assert answer == wanted.texts[0][0], (model_args, task)
    request = ask(("abc", {"max_gen_toks": 8, **GREEDY}))
    for options in ({}, {"method": "d5p4", "w": 3}):
        answers = D5P4LM(model, k=2, **options).generate_until(request * 3)  # repeats go before k and before the task
        assert answers == d5p4.generate(model, "abc", k=3, gen_length=8, seed=0, **options).texts[0]
    until = {"until": [answers[0][1]]}
    cut = D5P4LM(model).generate_until(ask(("abc", {"max_gen_toks": 8, **GREEDY, **until})) * 3)
    assert len(set(cut)) == 3  # a tree compares texts after they are cut
    few = D5P4LM(model, top_k=1).generate_until(request * 3)  # a tree that has one text
    assert few == [*d5p4.generate(model, "abc", k=3, gen_length=8, seed=0, top_k=1).texts[0], "", ""]


def test_an_answer_has_the_length_that_fits(caplog):
    """The model holds 64 tokens: the answer shrinks down to half of them, then the prompt loses its beginning."""
    model, long = FakeModel(), "abcdefgh" * 10
    for prompt, model_args, task, length in (
        ("abc", {}, {"max_gen_toks": 6}, 6),
        ("abc", {}, {"max_new_tokens": 6}, 6),
        ("abc", {"gen_length": 5}, {"max_gen_toks": 6}, 5),
        ("abc", {"steps": 2}, {}, 61),  # 128 by default
        ("abc", {"steps": 2}, {"max_gen_toks": 999}, 61),
        (long, {"steps": 2}, {"max_gen_toks": 60}, 32),
    ):
        (answer,) = D5P4LM(model, eos="never", **model_args).generate_until(ask((prompt, task)))
        assert len(answer) == length, (prompt, model_args, task)
    (answer,) = D5P4LM(model, gen_length=24, steps=2).generate_until(ask((long, {})))
    kept = d5p4.generate(model, long[-40:], k=1, gen_length=24, steps=2, temperature=0.0, seed=0)
    assert answer == kept.texts[0][0] and "first 40 tokens" in caplog.text


def test_each_request_gets_what_it_would_get_alone():
    """Requests with equal settings are decoded together, and the answers come back in order. Adjacent equal prompts are
    repeats only within one document: two documents with two requests each are two decodes with different streams."""
    model = FakeModel()
    requests = ask(
        ("abc", {"max_gen_toks": 8}),
        ("b", {"max_gen_toks": 5}),
        ("cab", {"max_gen_toks": 8}),
        ("bb", {"max_gen_toks": 5, "until": ["c", "e"]}),
        ("", {"max_gen_toks": 5}),
    )
    asked = [requests[0]] * 3 + [requests[1]] + [requests[2]] * 3 + [requests[3]] * 2 + [requests[4]]
    together = D5P4LM(model).generate_until(asked)
    alone = [D5P4LM(model).generate_until(list(run)) for _, run in itertools.groupby(asked, key=id)]
    assert together == list(itertools.chain.from_iterable(alone))
    assert len(set(together[:3])) > 1
    first, second = ask(("abc", {"max_gen_toks": 8}), ("abc", {"max_gen_toks": 8}))
    answers = D5P4LM(model).generate_until([first, first, second, second])
    wanted = d5p4.generate(model, ["abc", "abc"], k=2, gen_length=8, seed=0).texts
    assert answers == wanted[0] + wanted[1]
    assert wanted[0] != wanted[1]


def test_until_cuts_at_the_first_of_the_strings():
    model, settings = FakeModel(), {"gen_length": 30, "steps": 10, "eos": "never"}
    whole = d5p4.generate(model, "abc", k=1, temperature=0.0, seed=0, **settings).texts[0][0]
    _, first, second, *_ = dict.fromkeys(whole)
    cuts = [([second, first], first), ([first, second], first), (second, second), (["", "x"], None), (None, None)]
    answers = D5P4LM(model, **settings).generate_until(ask(*(("abc", {"until": until}) for until, _ in cuts)))
    for answer, (until, first) in zip(answers, cuts, strict=True):
        assert answer == (whole if first is None else whole[: whole.index(first)]), until


def test_repeats_refuse_the_cache_unless_they_are_sampled(tmp_path):
    """The cache would return one answer four times on the next run; the harness does not cache sampled answers."""
    model = FakeModel()
    cached = CachingLM(D5P4LM(model), str(tmp_path / "cache.db"))
    with pytest.raises(d5p4.D5P4Error, match="--use_cache keeps one answer per prompt, but the task asks 4 times"):
        cached.generate_until(ask(("abc", {"max_gen_toks": 8})) * 4)
    request = ask(("abc", {"max_gen_toks": 8, "do_sample": True}))
    first, second = cached.generate_until(request * 3), cached.generate_until(request * 3)
    assert first == second == d5p4.generate(model, "abc", k=3, gen_length=8, seed=0).texts[0]


def test_single_answers_and_likelihoods_are_cached_at_once(tmp_path):
    """A crash loses nothing that was decoded before it."""
    cached = CachingLM(D5P4LM(FakeModel(), mc_samples=4), str(tmp_path / "cache.db"))
    cases = ((8, "random"), (6, "random"), (5, "nonsense"))
    good, other, bad = ask(*(("abc", {"max_gen_toks": n, "order": order}) for n, order in cases))
    asked = {
        "generate_until": [good, other],
        "loglikelihood": ask(("ab", "cd"), ("", "cd"), kind="loglikelihood"),
        "loglikelihood_rolling": ask(("abcd",), kind="loglikelihood_rolling"),
    }
    with pytest.raises(d5p4.D5P4Error, match="nonsense"):
        cached.generate_until([good, bad])
    cached.generate_until([other])
    first = {kind: getattr(cached, kind)(requests) for kind, requests in asked.items()}
    cached.lm.model = None  # any further decode fails
    assert {kind: getattr(cached, kind)(requests) for kind, requests in asked.items()} == first


def test_likelihood_is_the_bound():
    """The bound of a text longer than the model is the sum over its pieces."""
    model, text = FakeModel(), "abcdefgh" * 20
    lm = D5P4LM(model, mc_samples=32, seed=4)
    values = lm.loglikelihood(ask(("ab", "cgg"), ("", "cgg"), ("ab", "c"), ("ab", ""), kind="loglikelihood"))
    assert values[0] == (d5p4.loglikelihood(model, "cgg", "ab", 32, seed=4), False)
    assert values[1] == (d5p4.loglikelihood(model, "cgg", None, 32, seed=4), False)
    exact = d5p4.loglikelihood(model, "c", "ab", 32, seed=4)  # one token has one mask, so nothing is random
    assert values[2][0] == pytest.approx(exact, abs=1e-12) and values[3] == (0.0, True)
    rolling = D5P4LM(model, mc_samples=4, seed=2).loglikelihood_rolling(ask((text,), ("abc",), ("",)))
    pieces = [d5p4.loglikelihood(model, piece, None, 4, seed=2) for piece in (text[:64], text[64:128], text[128:])]
    assert rolling == [pytest.approx(sum(pieces)), d5p4.loglikelihood(model, "abc", None, 4, seed=2), 0.0]
    assert all(isinstance(value, float) for value in rolling)


class Pairs:
    """A tokenizer in which `ab` is one token, so a continuation may begin inside the last token of its context."""

    def encode(self, text):
        return [ord(c) - 97 for c in text.replace("ab", "d")]

    def decode(self, ids):
        return "".join(chr(97 + i) for i in ids)

    def chat(self, messages):
        return None


def test_text_between_context_and_continuation_belongs_to_the_continuation(tmp_path):
    """This holds for spaces between them and for a token that would span both."""
    model = d5p4.load(write_llada(tmp_path / "tiny"), device="cpu")
    lm = D5P4LM(model, mc_samples=4)
    values = lm.loglikelihood(ask(("one \n", "two"), ("one", " \ntwo"), ("  ", "two"), kind="loglikelihood"))
    wanted = d5p4.loglikelihood(model, " \ntwo", "one", 4, chat=False)
    assert [value for value, _ in values] == [wanted, wanted, d5p4.loglikelihood(model, "  two", None, 4, chat=False)]
    model = FakeModel()
    model.tokenizer = Pairs()
    ((value, _),) = D5P4LM(model, mc_samples=8).loglikelihood(ask(("ca", "bc"), kind="loglikelihood"))
    assert value == d5p4.loglikelihood(model, [1, 2], [2, 0], 8)


def test_long_contexts_and_continuations(caplog):
    model = FakeModel()
    lm = D5P4LM(model, mc_samples=2)
    ((value, _),) = lm.loglikelihood(ask(("abcdefgh" * 10, "cgg"), kind="loglikelihood"))
    assert value == d5p4.loglikelihood(model, "cgg", ("abcdefgh" * 10)[-61:], 2)
    assert "lost its first 19 tokens" in caplog.text
    with pytest.raises(d5p4.D5P4Error, match="65 tokens; the model holds 64"):
        lm.loglikelihood(ask(("ab", "c" * 65), kind="loglikelihood"))


def test_chat_template_is_ours(tmp_path):
    model = d5p4.load(write_llada(tmp_path / "tiny", chat=True), device="cpu")
    lm, question = D5P4LM(model, gen_length=4), {"role": "user", "content": "why?"}
    asked = lm.apply_chat_template([question])
    assert asked == model.tokenizer.chat([question])
    wanted = d5p4.generate(model, "why?", k=1, gen_length=4, temperature=0.0, seed=0)  # applies the template itself
    assert lm.generate_until(ask((asked, {}))) == wanted.texts[0]
    begun = lm.apply_chat_template([question, {"role": "assistant", "content": "because"}], add_generation_prompt=False)
    assert begun == asked + "because"
    assert lm.chat_template(True) == model.tokenizer.chat_template and lm.chat_template(False) is None
    assert lm.tokenizer_name.endswith("__tiny") and "/" not in lm.tokenizer_name
    with pytest.raises(d5p4.D5P4Error, match="has no chat template; leave out --apply_chat_template"):
        D5P4LM(FakeModel()).apply_chat_template([question])


def test_the_harness_finds_the_model_by_name_and_by_entry_point():
    """Later versions of the harness load the entry point of group lm_eval.models at its first use."""
    assert get_model("d5p4") is D5P4LM
    [entry] = [entry for entry in entry_points(group="lm_eval.models") if entry.name == "d5p4"]
    assert entry.load() is D5P4LM


def test_model_args_as_text():
    text = "pretrained=countdown,method=d5p4,k=4,w=2,beta=5,distinct=True,guidance_window=0:6,dtype=auto"
    lm = get_model("d5p4").create_from_arg_string(text, {"batch_size": 8, "max_batch_size": None, "device": "cuda:0"})
    assert lm._settings.params["beta"] == 5 and lm._settings.guidance_window == (0, 6)
    assert (lm._settings.k, lm._settings.w, lm._settings.distinct, lm._settings.temperature) == (4, 2, True, 1.0)
    if not torch.cuda.is_available():
        assert lm.device.type == "cpu"  # cuda:0 is the default of the harness
    assert get_model("d5p4").create_from_arg_string(text + ",device=cpu", {"device": "cuda:0"}).device.type == "cpu"


def test_bad_model_args():
    for model_args, message in (
        ({"temprature": 1, "foo": 2}, "temprature: did you mean temperature"),
        ({"chat": True}, "chat: this option is not offered here"),
        ({"method": "nope"}, "method='nope' is not a method"),
        ({"plugin": "no_such_module"}, "plugin='no_such_module' cannot be loaded"),
        ({"guidance_window": "early"}, "guidance_window='early'"),
        ({"gen_length": 64}, "gen_length=64 leaves no room for a prompt: the model holds 64"),
        ({"method": "d5p4", "k": 2, "temperature": 0}, "would give 2 equal answers"),
    ):
        with pytest.raises(d5p4.D5P4Error, match=message):
            D5P4LM(FakeModel(), **model_args)
