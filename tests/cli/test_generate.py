import json

import pytest

import d5p4

SMALL = ("--gen-length", 6, "--seed", 5)


def records(outcome):
    assert outcome.exit_code == 0, (outcome.output, outcome.exception)
    lines = outcome.stdout.splitlines()
    return [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) for line in lines]


def test_json_is_what_the_library_returns(cli, models):
    options = ("--method", "d5p4", "-k", 3, "-w", 2, "--beta", 5, "--quality", "logprob", "--select-window", "0:4")
    [outcome] = records(cli("generate", "two plus two", "-m", models.llada, *SMALL, *options, "--logprobs", "--json"))
    model = d5p4.load(models.llada)
    result = d5p4.generate(
        model, "two plus two", method="d5p4", k=3, w=2, beta=5.0, quality="logprob", select_window=(0, 4), gen_length=6,
        seed=5, logprobs=True,
    )  # fmt: skip
    assert outcome["answers"] == result.texts[0]
    assert outcome["tokens"] == result.answers[0]
    assert outcome["logprobs"] == result.logprobs[0] and outcome["reveal_step"] == result.reveal_step[0]
    assert outcome["score"] == pytest.approx(result.score[0].tolist(), rel=1e-5)
    assert outcome["score_kind"] == result.score_kind
    assert outcome["rows"] == result.rows[0] and outcome["rows_nominal"] == result.rows_nominal[0]
    assert (outcome["method"], outcome["seed"], outcome["prompt"]) == ("d5p4", 5, "two plus two")
    assert outcome["settings"] == json.loads(json.dumps(result.settings.to_dict()))
    assert outcome["distance"] == pytest.approx(result[0].distance, rel=1e-5)
    assert (outcome["distinct"], outcome["near_copies"]) == (result[0].distinct, result[0].near_copies)


def test_stop_strings_are_given_one_by_one(cli, models):
    asked = ("generate", "two plus two", "-m", models.llada, *SMALL, "--method", "d5p4", "--json")
    [whole] = records(cli(*asked))
    first, second = whole["answers"][0][1], whole["answers"][0][2]
    [cut] = records(cli(*asked, "--stop-strings", second, "--stop-strings", first))
    assert cut["answers"] == [text.partition(first)[0].partition(second)[0] for text in whole["answers"]]
    assert cut["tokens"] == whole["tokens"] and cut["settings"]["stop_strings"] == [second, first]


def test_unconditional_and_a_single_answer(cli, models):
    options = ("--gen-length", 4, "--sets", 2, "-k", 1, "--seed", 1, "--json")
    outcome = records(cli("generate", "-m", models.mdlm, *options))
    assert [entry["prompt"] for entry in outcome] == [None, None]
    assert [entry["distance"] for entry in outcome] == [[None], [None]]
    shown = cli("generate", "-m", models.mdlm, "--gen-length", 4, "--sets", 2, "-k", 2, "--seed", 1)
    assert shown.stdout.count("unconditional") == 2


def test_prompt_from_standard_input(cli, models):
    arguments = ("-m", models.llada, *SMALL, "--json")
    [piped] = records(cli("generate", "-", *arguments, stdin="a\nb\n"))
    [given] = records(cli("generate", "a\nb", *arguments))
    assert piped == given and piped["prompt"] == "a\nb"


def test_a_prompt_may_begin_with_a_negative_number(cli):
    task = "-4 -7 2 9>2 9|-3 8 -1 6 1>8 6 1|5 -2 7>5 7:"
    options = ("-m", "programs", "-k", 2, "--seed", 1, "--json")
    for command in ((task, *options), (*options, "--", task)):
        [outcome] = records(cli("generate", *command))
        assert outcome["prompt"] == task and outcome["right"] == [True, True]
    unfinished = cli("generate", task[:-1], "-m", "programs", "-k", 2, "--seed", 1)
    assert unfinished.exit_code == 0 and "the prompt is not graded, because grading needs" in unfinished.stderr


def test_duplicates_are_one_line_and_infinities_null(cli, models):
    arguments = ("generate", "two", "-m", models.llada, "--gen-length", 2, "--temperature", 0.01, "--seed", 1)
    assert cli(*arguments).stderr == ""  # the tree
    arguments += ("--method", "d5p4")
    outcome = cli(*arguments, "--json")
    assert records(outcome)[0]["logdet"] is None
    assert outcome.stderr.startswith("note: ") and outcome.stderr.count("\n") == 1 and "--method tree" in outcome.stderr
    assert cli(*arguments, "--json", "--quiet").stderr == ""
