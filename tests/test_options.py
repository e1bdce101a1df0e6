import json
import re

import pytest

import d5p4
from d5p4 import D5P4Error, Settings
from d5p4.prompts import Prepared, prepare
from d5p4.resolve import typed
from tests.fake import FakeModel
from tests.refusals import refusal


def make(model=None, **given):
    return Settings.make(model or FakeModel(), **given)


def test_defaults_are_the_trees_and_the_papers():
    s = make()
    assert (s.method, s.k, s.spare, s.temperature, s.order, s.eos, s.stop) == ("tree", 4, 0, 1.0, "top", "last", True)
    assert s.params == {"diversity": 0.0} and s.reveal == "schedule" and s.guidance == 1
    s = make(method="d5p4")
    assert (s.method, s.k, s.w, s.temperature, s.order, s.eos) == ("d5p4", 4, 4, 1.0, "confidence", "last")
    assert f"{s.quality} {s.positions} {s.normalise} {s.features} {s.similarity}" == "entropy all minmax flatten cosine"
    assert s.params == {"beta": 20.0, "solver": "full-search"} and s.guidance == 1
    m, tree = make(FakeModel(carry_over=True), method="d5p4"), make(FakeModel(carry_over=True))
    assert (m.order, m.eos, tree.order, tree.eos) == ("ancestral", "free", "top", "free")


def test_caller_before_model_before_paper():
    model = FakeModel()
    model.generation_defaults = {"length": 9, "steps": 3, "order": "random", "methods": {"d5p4": {"beta": 7.0}}}
    s = make(model, method="d5p4")
    assert (s.gen_length, s.steps, s.order, s.params["beta"]) == (9, 3, "random", 7.0)
    s = make(model, method="d5p4", gen_length=5, order="margin", beta=2.0)
    assert (s.gen_length, s.steps, s.order, s.params["beta"]) == (5, 3, "margin", 2.0)
    assert make(model, method="d5p4x").params["beta"] == 1.0
    model.generation_defaults = {"guidance": 3.0, "method": "independent", "methods": {"tree": {"reveal": "threshold"}}}
    assert make(model, method="d5p4-p").guidance == 3.0 and make(model).method == "independent"
    assert make(model, method="tree").reveal == "threshold" and make(model, method="tree").params["tau"] == 0.9
    assert make(model, method="tree", steps=3).reveal == "schedule"  # the number of steps replaces the model's rule


def test_files_and_the_server_replace_one_default_the_token_budget():
    def budget(**given):
        doors = prepare(model, "abc", given, budget=65536), Prepared(model, given, budget=65536)
        [tokens] = {door.settings.max_tokens_per_forward for door in doors}
        return tokens

    model = FakeModel()
    assert make(model).max_tokens_per_forward == 16384 and budget() == 65536
    assert budget(deterministic=True) == 16384 and make(model, deterministic=True).max_tokens_per_forward == 4096
    assert budget(max_tokens_per_forward=99) == 99
    model.generation_defaults = {"methods": {"tree": {"max_tokens_per_forward": 77}}}
    assert budget() == 77 and budget(method="d5p4") == 65536 and budget(max_tokens_per_forward=99) == 99


MODELS_DEFAULTS = {
    **dict(k=2, w=3, gen_length=3, steps=2, block_length=2, temperature=0.0, top_p=0.7, top_k=3, guidance=1.5),
    **dict(spare=1, chat=False, order_temperature=0.5, start_temperature=0.5, gamma=2.0, max_tokens_per_forward=30),
    "min_p": 0.2,
    **dict.fromkeys(("distinct", "deterministic", "logprobs"), True),
    "savings": False,
    "stop_strings": "b",
    **dict(regex="[a-c]+", grammar='start: "a" | "b"', choices=["a", "bc"], json_schema={"const": 1}),
    "order": tuple(d5p4.ORDERS),
    "reveal": tuple(d5p4.REVEALS),
    "stop": (True, False),
    "guidance_window": ([1, 3], [0.2, 0.6]),
    "select_window": ([1, 3], [0, 0.5]),
    "cache": ("none", "exact", "prefix", "dual"),
}
NAMED = {name: p.literals for name, p in d5p4.options.parameters_of(Settings).items() if p.literals}


@pytest.mark.parametrize(
    "method",
    [m if m == "tree" else pytest.param(m, marks=pytest.mark.full) for m in d5p4.METHODS],
)
@pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")
def test_any_default_of_a_model_fits_every_method(method):
    """A default without a meaning for the method has no effect. One that cannot be used is refused by its name. With
    all others, answers do not depend on the batch."""
    known = NAMED | MODELS_DEFAULTS
    assert known.keys() == d5p4.options.parameters_of(Settings).keys() - {"method"}
    model, refused = FakeModel(scale=0.7), set()
    small = dict(gen_length=4, k=2, max_tokens_per_forward=64)

    def answers(prompts, **defaults):
        model.generation_defaults = defaults
        given = {name: value for name, value in small.items() if name not in defaults}
        return d5p4.generate(model, prompts, seed=3, method=method, **given).answers

    plain = answers(["ab"])
    for option, values in known.items():
        for value in values if isinstance(values, tuple) else (values,):
            try:
                alone = answers(["ab"], **{option: value})
            except D5P4Error as error:
                assert error.option == option and "generation_config.json" in str(error), error
                refused.add(option)
                continue
            assert answers(["abcdefgh", "ab"], **{option: value})[1] == alone[0], (option, value)
            if option in d5p4.METHODS[method].unused and option != "w":
                assert alone == plain, (option, value)
    windows = {"guidance_window", "select_window"}
    forms = set(d5p4.options.FORMS)
    assert refused <= {"temperature", "cache", "distinct", "order", "reveal"} | windows | forms


def test_a_models_entry_for_a_method_is_checked_like_an_option_of_the_caller():
    model = FakeModel()
    model.generation_defaults = {"lenght": 9}
    assert "lenght" in refusal(make, model)
    for name, value in {"select_window": [0, 0.5], "distinct": True, "stop": False, "w": 3}.items():
        model.generation_defaults = {"methods": {"tree": {name: value}}}
        error = refusal(make, model)
        assert error.startswith(f"{name}=") and error.endswith("(the model's generation_config.json sets this value)")
        assert make(model, method="d5p4").method == "d5p4"
    model.generation_defaults = {"stop": "."}  # a tree would not use it
    assert refusal(make, model).startswith("stop='.' must be True or False (the model's")
    model.generation_defaults = {"methods": {"tre": {"w": 3}}}
    assert "generation_config.json" in (error := refusal(make, model)) and "did you mean tree?" in error
    model.generation_defaults = {"reveal": "threshold", "tau": 0.8, "beta": 3.0}
    assert make(model).params == {"diversity": 0.0, "tau": 0.8}  # parameters of parts that are not used have no effect
    assert make(model, method="d5p4", reveal="schedule").params == {"beta": 3.0, "solver": "full-search"}


def test_aliases():
    assert make(do_sample=False, k=1).temperature == 0 and make(do_sample=True).temperature == 1
    assert make(eos_token_id=10) == make()
    s = make(num_return_sequences=3, max_new_tokens=9, cfg_scale=0.5, remasking="low_confidence", method="d5p4")
    assert (s.k, s.gen_length, s.guidance, s.order) == (3, 9, 1.5, "confidence")
    assert make(alg="origin", eos="free", method="d5p4").order == "ancestral"
    assert "num_return_sequences and k" in refusal(make, num_return_sequences=3, k=3)


BAD = [
    ({"k": 0}, "k=0"),
    ({"k": True}, "k=True"),
    ({"w": -1}, "w=-1"),
    *(({"spare": x}, "spare=") for x in (-1, 1.5, "two", True)),
    ({"steps": 0}, "steps=0"),
    ({"gen_length": "x"}, "gen_length='x'"),
    ({"temperature": -0.5}, "temperature=-0.5"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"top_p": 0.0}, "top_p=0.0"),
    ({"min_p": 1.5}, "min_p=1.5"),
    ({"top_k": 0}, "top_k=0"),
    ({"guidance": 0.0}, "guidance=0.0 must be a number of at least 1"),
    ({"guidance_window": (3, 1)}, r"guidance_window=\(3, 1\)"),
    ({"select_window": 5}, "select_window=5"),
    ({"order": "sideways"}, "order='sideways' is not known; use one of confidence, top, margin"),
    ({"eos": "first"}, "eos='first'"),
    ({"solver": "magic"}, "solver='magic'"),
    ({"distinct": 1}, "distinct=1"),
    ({"method": "d5p5"}, "method='d5p5' is not a method; did you mean d5p4"),
    ({"alpha": 3.0}, "alpha: it is a parameter of diverse-beam, odd; method d5p4 takes beta"),
    ({"method": "independent", "beta": 3.0}, "beta: it is a parameter of d5p4, .*; method independent takes none"),
    ({"method": "greedy-beam", "solver": "exact"}, "solver: it is a parameter of d5p4"),
    ({"beta": "x"}, "beta='x'"),
    ({"method": "cat", "score_temperature": -1.0}, "score_temperature"),
    ({"remasking": "high"}, "remasking='high'"),
    ({"temprature": 1}, "temprature: did you mean temperature"),
    ({"zzz": 1}, "zzz: there is no such option"),
    ({"max_length": 9}, "max_length: .* use gen_length"),
    ({"pad_token_id": 0}, "pad_token_id: d5p4 pads by itself"),
    ({"eos_token_id": 3}, "eos_token_id: "),
    ({"do_sample": False}, "temperature=0.0 with order"),
    ({"do_sample": 1}, "do_sample=1 must be True or False"),
    ({"temperature": 0}, "temperature=0 with order='confidence' is deterministic"),
    ({"top_k": 1, "order": "entropy"}, "top_k=1 with order='entropy' is deterministic"),
    ({"min_p": 1.0, "order": "entropy"}, "min_p=1.0 with order='entropy' is deterministic"),
    ({"cfg_scale": True}, "guidance=True must be a number"),
    ({"order": "ancestral", "eos": "last"}, "eos='last'"),
    ({"order": "tempered", "order_temperature": 0.0, "temperature": 0}, "order='tempered' is deterministic"),
    ({"method": "tree", "order": "confidence"}, "order='confidence' draws tokens before"),
    ({"method": "tree", "w": 3}, "w=3 has no meaning at a temperature above 0"),
    ({"method": "tree", "features": "mean"}, "features='mean' has no meaning"),
    ({"method": "tree", "distinct": True}, "distinct=True has no meaning"),
    ({"method": "tree", "beta": 2.0}, "beta"),
]


def test_texts_of_the_command_line_may_have_escapes():
    given = {"stop_strings": [r"\n\nQ", r"\\n"], "k": "2"}
    assert typed(given, "command") == {"stop_strings": ["\n\nQ", r"\n"], "k": 2}
    assert typed({"stop_strings": r"\t"}, "lm-eval") == {"stop_strings": "\t"}
    assert typed({"stop_strings": "none"}, "lm-eval") == {"stop_strings": None}


def test_bad_values_are_named():
    for given, message in BAD:
        assert re.search(message, refusal(make, **{"method": "d5p4"} | given)), given
    make(temperature=0)  # a tree branches
    make(temperature=0, order="tempered", method="d5p4")  # something is random
    make(temperature=0, k=1, method="d5p4")


def test_options_give_the_same_settings_again():
    """Also after they went through JSON."""
    model = FakeModel()
    for given in (
        {}, {"method": "diverse-beam", "alpha": 3.0, "steps": 3}, {"method": "d5p4", "spare": 2, "beta": 5.0},
        {"method": "e-smc", "lam": 2.0, "guidance_window": (0, 2), "guidance": 2.0},
    ):  # fmt: skip
        settings = Settings.make(model, k=3, gen_length=5, **given)
        assert Settings.make(model, **json.loads(json.dumps(settings.options()))) == settings, given
