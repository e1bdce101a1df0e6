import json

import pytest

import d5p4

ARGUMENTS = ("--gen-length", 6, "--seed", 5)


def test_side_by_side(cli, models):
    outcome = cli("compare", "two plus two", "-m", models.llada, *ARGUMENTS, "--methods", "independent,d5p4,tree")
    assert outcome.exit_code == 0, outcome.output
    heading, columns, *_ = outcome.stdout.splitlines()
    assert heading == "two plus two" and columns.split() == ["#", "independent", "d5p4", "tree"]
    assert "apart" in outcome.stdout and "passes" in outcome.stdout and "seed 5" in outcome.stdout


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_terminal_cuts_no_figure(cli, models, monkeypatch, width):
    arguments = ("compare", "two", "-m", models.llada, *ARGUMENTS, "--methods", "independent,diverse-beam", "--json")
    rows = [json.loads(line) for line in cli(*arguments).stdout.splitlines()]
    monkeypatch.setenv("COLUMNS", str(width))
    lines = cli(*arguments[:-1]).stdout.splitlines()
    assert max(map(len, lines)) <= width
    words = [line.split() for line in lines]
    for row in rows:
        shown = [word for line in words if line[:1] == [row["method"]] for word in line]
        assert {str(row["rows"]), str(row["nfe"]), str(row["distinct"])} <= set(shown)
    for name in ("method", "differ", "apart", "rows", "passes", "s"):
        assert any(name in line for line in words), name


def test_help_shows_methods_and_not_the_option_that_is_refused(cli):
    for command in ("compare", "trace"):
        shown = cli(command, "--help-all").stdout
        assert "--methods " in shown and "--method " not in shown


def test_json_is_what_the_library_returns(cli, models):
    options = ("--methods", "diverse-beam, d5p4", "--alpha", 3, "--beta", 7, "--solver", "exact", "--json")
    outcome = cli("compare", "two", "-m", models.llada, *ARGUMENTS, *options)
    assert outcome.exit_code == 0, outcome.output
    beam, dpp = map(json.loads, outcome.stdout.splitlines())
    result = d5p4.generate(
        d5p4.load(models.llada), "two", method="d5p4", gen_length=6, seed=5, beta=7.0, solver="exact"
    )
    assert beam["method"] == "diverse-beam" and beam["settings"]["params"]["alpha"] == 3
    assert dpp["answers"] == result.texts[0]
    off = result.similarity[0].clone().fill_diagonal_(0)
    assert dpp["mean_cosine"] == float(f"{float(off.sum() / 12):.6g}")
    assert dpp["mean_score"] == float(f"{float(result.score[0].mean()):.6g}")


def test_bad_options(fails, models):
    for options, expected in (
        (("--methods", "random,d5p4", "--alpha", 3), "--alpha: it is a parameter of diverse-beam"),
        (("--methods", "random", "--solver", "exact"), "--solver: it is a parameter of d5p4"),
        (("--methods", "random,best"), "--methods='best' is not a method"),
        (("--methods", ","), "names no method"),
        (("--methods", "cat d5p4"), "--methods='cat d5p4' is not a method"),
        (("--method", "cat"), "--method='cat' names one method; use --methods here"),
        (("-k", 0), "k=0"),
    ):
        assert expected in fails("compare", "two", "-m", models.llada, *ARGUMENTS, *options), options
