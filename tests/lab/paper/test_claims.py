"""Verdicts, their p-values, what it would take to decide a claim, and the page of claims."""

import math

import pytest
from scipy import stats

from d5p4.store import write_json
from d5p4_lab.paper import claims as page_of
from d5p4_lab.paper.claims import SUMMARY
from d5p4_lab.paper.drawing import Claim, Evidence, agreed, all_decided, decided, every, some, within
from d5p4_lab.statistics import Figure

UP, DOWN, UNSURE = Figure(2.0, 0.5, 1.0, 3.0, 90), Figure(-2.0, 0.5, -3.0, -1.0, 90), Figure(0.5, 0.5, -0.5, 1.5, 90)
NOTHING = Figure(math.nan, math.nan, math.nan, math.nan, 0)
UNTESTED = "not measured"


def words(*evidence: Evidence) -> list[str]:
    return [one.verdict() for one in evidence]


def test_the_whole_interval_decides():
    assert words(decided(UP), decided(DOWN), decided(UNSURE)) == ["holds", "does not hold", "not clear"]
    assert words(decided(NOTHING), decided(Figure(1, 0, 0, 2, 9))) == ["not clear", "not clear"]  # touching 0 is unsure
    assert words(decided(UP, 0.9), decided(UP, 1.5), decided(UP, 3.1)) == ["holds", "not clear", "does not hold"]
    assert words(within(UP, 3.5), within(UP, 2), within(UP, 0.5)) == ["holds", "not clear", "does not hold"]
    assert words(within(-UP, 3.5), within(-UP, 2), within(-UP, 0.5)) == ["holds", "not clear", "does not hold"]


def test_parts_and_judges():
    a, b, c = decided(UP), decided(DOWN), decided(UNSURE)
    assert words(every([a, a]), every([a, c]), every([a, c, b])) == ["holds", "not clear", "does not hold"]
    assert words(some([b, a]), some([b, c]), some([b, b])) == ["holds", "not clear", "does not hold"]
    assert words(agreed([a, a]), agreed([b, b]), agreed([a, b])) == ["holds", "does not hold", "not clear"]
    assert words(agreed([a, c]), all_decided([UP, UP]), every(["holds", a])) == ["not clear", "holds", "holds"]
    assert words(every(["holds", UNTESTED]), every([b, UNTESTED])) == [UNTESTED, "does not hold"]
    assert every([a, some([b, c])]).figures == (UP, DOWN, UNSURE)


def test_p_values():
    """The p-value is that of a figure with the given 95 % interval: normal, or Student's t if it has few units."""
    p = 2 * stats.norm.sf(2 * stats.norm.ppf(0.975))
    assert decided(UP).p == pytest.approx(p) and decided(DOWN).p == pytest.approx(p)
    assert every([decided(UP)] * 5).p == pytest.approx(p)  # all five must hold: nothing to correct
    assert every([decided(DOWN)] * 5).p == pytest.approx(5 * p)  # each of the five alone would have decided
    assert some([decided(UP)] * 5).p == pytest.approx(5 * p) and some([decided(DOWN)] * 5).p == pytest.approx(p)
    assert decided(UNSURE).p == pytest.approx(2 * stats.norm.sf(0.5 * stats.norm.ppf(0.975)))
    few = 2 * stats.t.sf(2 * stats.t.ppf(0.975, 14), 14)  # nine times as large as p
    assert every([decided(UP), decided(UP._replace(n=15))]).p == pytest.approx(few, rel=1e-3)
    assert agreed([decided(UP), decided(DOWN)]).p == 1 and decided(NOTHING).p == 1
    assert every(["holds"]).p is None and decided(Figure(1, 0, 1, 1, 5)).p == 2 * 0.5**5  # five of five


# --- the page ---


def write_summary(folder, name, title, *claims):
    about = {"title": title, "paper": "Table 1", "made": "`reproduce x`"}
    write_json(folder / name / "summary.json", about | {"figures": {}, "claims": [one.record() for one in claims]})


def rows_of(text, start, stop):
    """The cells of a table between two headings, without its header."""
    begin = text.index(start) + 1
    lines = text[begin : text.index(stop, begin)].splitlines()
    return [[cell.strip() for cell in line.split(" | ")] for line in lines if line.startswith("| ")][2:]


def test_the_page_of_claims(cli, tmp_path):
    folder, page = tmp_path / "results" / "box", tmp_path / "docs" / "claims.md"
    assert "contains no drawn experiment" in cli("claims", "--out", folder, "--page", page).output
    nearly = Figure(2.0, 1.0, 0.1, 3.9, 90)  # decided alone, but not as one of four claims
    front = "The front of D5P4+ is better than that of diverse beam search"
    pareto = (
        Claim("A beats B", "1 against 2", "3 [2, 4]", decided(UP), "of two | judges"),
        Claim("C", "1", "2", decided(nearly)),
        Claim("Ours: E", "–", "0.5", decided(UNSURE._replace(n=24)), scale=10),
        Claim(front, "0", "1", agreed([decided(UP), decided(DOWN)])),
    )
    write_summary(folder, "pareto", "The front", *pareto)
    write_summary(folder, "scaling", "Sizes", Claim("D is best", "", "it is", "holds"), Claim("F", "", "", UNTESTED))
    result = cli("claims", "--out", folder, "--page", page)
    counts = "The paper's 5 claims: holds 1, open 2, no interval 1, not measured 1. Our own 1 claims: open 1."
    assert (result.exit_code, result.stdout) == (0, f"{page}: {counts}\n"), result.output
    short, full = page.read_text(encoding="utf-8"), page_of.full_page(folder, page)
    assert short == page_of.short_page(folder, page) and str(tmp_path) not in short + full
    for text in (short, full):
        assert counts in " ".join(text.split())
        lines = rows_of(text, "## Summary", "\n## ")
        assert len(lines) == len(SUMMARY)
        present = [line for line in lines if page_of.MISSING not in line]
        assert [line[1:] for line in present] == [["open: area 2.0000 [1.0000, 3.0000]", "not measured |"]]
    wanted = [["| A beats B", "holds |"], ["| C", "open |"], ["| Ours: E", "open |"]]
    short_front = "| The front of D5P4+ is better than that of DivBS"
    assert rows_of(short, "### pareto", "### scaling") == [*wanted, [short_front, "open |"]]
    assert "The front. smol: not measured." in short and "| D is best | holds\\* |" in short and "| F | – |" in short
    assert rows_of(full, "## pareto", "## scaling")[:3] == [
        ["| A beats B", "1 against 2", r"3 [2, 4] (of two \| judges)", "90", "**holds**", "holds", "not measured |"],
        ["| C", "1", "2", "90", "**holds**", "not clear", "not measured |"],
        ["| Ours: E", "–", "0.5", "24", "**not clear**", "not clear", "not measured |"],
    ]
    # The real model: one order, and claims of two tasks that stand for one claim of the small models.
    tasks = [Claim(f"{front} ({name})", "0", "1", decided(x)) for name, x in (("gsm8k", UP), ("truthfulqa", DOWN))]
    write_summary(folder.parent / "smol-left", "pareto", "The front", *tasks)
    short, full = page_of.short_page(folder, page), page_of.full_page(folder, page)
    assert rows_of(short, "### pareto", "### scaling")[-1] == [short_front, "open", "–; holds/**fails** |"]
    assert "left: holds: area 2.0000 [1.0000, 3.0000] |" in short and "smol: not measured" not in short
    assert "left: 1 (holds); left: 1 (does not hold) |" in full


def test_holms_correction():
    """Against the definition: the adjusted p-value is the largest p · (number of p-values that are not smaller)."""
    ps = [0.001, 0.02, 0.011, 0.012, None, 0.9, 0.0126]
    claims = [{"p": p, "verdict": "holds" if p is None or p < 0.05 else "not clear"} for p in ps]
    tested = sorted(p for p in ps if p is not None)
    adjusted = {p: max(q * (6 - rank) for rank, q in enumerate(tested) if q <= p) for p in tested}
    wanted = ["no interval" if p is None else "holds" if adjusted[p] <= 0.05 else "not clear" for p in ps]
    assert page_of._corrected(claims) == wanted and wanted.count("holds") == 1
