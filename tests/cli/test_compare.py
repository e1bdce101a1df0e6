import json

import pytest

import d5p4

ARGUMENTS = ("--gen-length", 6, "--seed", 5)


@pytest.mark.parametrize("width", [40, 60])
def test_side_by_side(cli, models, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    outcome = cli("compare", "two plus two", "-m", models.llada, *ARGUMENTS, "--methods", "independent,d5p4,tree")
    assert outcome.exit_code == 0, outcome.output
    heading, *lines = outcome.stdout.splitlines()
    assert heading == "two plus two" and max(map(len, lines)) <= width
    first, last = (next(i for i, line in enumerate(lines) if line.startswith(name)) for name in ("method", "  near:"))
    assert {"differ", "near", "apart", "rows", "passes", "s"} <= {
        word for line in lines[first:last] for word in line.split()
    }
    assert not any(line.startswith(" ") for line in lines[first:last])  # as the second half of a folded number would
    assert "seed 5" in outcome.stdout.replace("\n", " ")


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


def test_methods_reveal_alike_unless_told_otherwise(cli, models):
    asked = ("compare", "two", "-m", models.llada, *ARGUMENTS, "--methods", "independent,d5p4,tree")
    for options, order, reveal in (
        ((), "top", "schedule"),
        (("--reveal", "threshold", "--tau", 0.7), "top", "threshold"),
        (("--order", "left"), "left", "schedule"),
    ):
        lines = [json.loads(line)["settings"] for line in cli(*asked, *options, "--json").stdout.splitlines()]
        assert [(one["order"], one["reveal"], one["stop"]) for one in lines] == [(order, reveal, True)] * 3
        assert {one["params"].get("tau") for one in lines} == {0.7 if reveal == "threshold" else None}
    shown = " ".join(cli(*asked, "--temperature", 0.7).stdout.split())
    assert "settings that differ: beta –, 20.0, –; diversity –, –, 0.0; solver –, full-search, –" in shown
    assert "order" not in shown.partition("settings that differ")[2]


def test_bad_options(fails, models):
    for options, expected in (
        (("--methods", "random,d5p4", "--alpha", 3), "--alpha: it is a parameter of diverse-beam"),
        (("--methods", "random", "--solver", "exact"), "--solver: it is a parameter of d5p4"),
        (("--methods", "random,best"), "--methods='best' is not a method"),
        (("--methods", ","), "--methods=',' is not a method"),
        (("--methods", "cat d5p4"), "--methods='cat d5p4' is not a method"),
        (("--method", "cat"), "--method='cat' names one method; use --methods here"),
        (("-k", 0), "k=0"),
    ):
        assert expected in fails("compare", "two", "-m", models.llada, *ARGUMENTS, *options), options
