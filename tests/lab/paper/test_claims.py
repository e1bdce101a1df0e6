"""Verdicts, their p-values, and what it would take to decide a claim."""

import math

import pytest
from scipy import stats

from d5p4_lab.paper.drawing import Claim, Evidence, agreed, all_decided, decided, every, some, within
from d5p4_lab.statistics import Figure

UP, DOWN, UNSURE = Figure(2.0, 0.5, 1.0, 3.0, 90), Figure(-2.0, 0.5, -3.0, -1.0, 90), Figure(0.5, 0.5, -0.5, 1.5, 90)
NOTHING = Figure(math.nan, math.nan, math.nan, math.nan, 0)
UNTESTED = "not testable at this scale"


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


@pytest.mark.parametrize(
    "evidence",
    [
        decided(UP),
        decided(UNSURE),
        every([decided(UP), decided(DOWN)]),
        agreed([decided(UP), decided(UNSURE)]),
        within(UP, 9),
        some([decided(DOWN, -4)]),
    ],
)
def test_the_factor_is_where_the_verdict_changes(evidence):
    """Intervals that are a little narrower decide the claim, and intervals that are a little wider do not."""
    assert evidence.verdict(0.999 * evidence.factor) != "not clear" == evidence.verdict(1.001 * evidence.factor)

    def stretched(figure: Figure, factor: float) -> Figure:
        low, high = (figure.value + factor * (end - figure.value) for end in (figure.low, figure.high))
        return figure._replace(low=low, high=high)

    for factor in (0.3, 0.49, 0.51, 1.9, 2.1):
        assert decided(stretched(UNSURE, factor)).verdict() == decided(UNSURE).verdict(factor)
        assert within(stretched(UP, factor), 3.2).verdict() == within(UP, 3.2).verdict(factor)


def test_p_values():
    """The p-value is that of a normal figure whose 95 % interval is given; chances are counted."""
    p = 2 * stats.norm.sf(2 * stats.norm.ppf(0.975))
    assert decided(UP).p == pytest.approx(p) and decided(DOWN).p == pytest.approx(p)
    assert every([decided(UP)] * 5).p == pytest.approx(p)  # all five must hold: nothing to correct
    assert every([decided(DOWN)] * 5).p == pytest.approx(5 * p)  # each of the five alone would have decided
    assert some([decided(UP)] * 5).p == pytest.approx(5 * p) and some([decided(DOWN)] * 5).p == pytest.approx(p)
    assert decided(UNSURE).p == pytest.approx(2 * stats.norm.sf(0.5 * stats.norm.ppf(0.975)))
    assert agreed([decided(UP), decided(DOWN)]).p == 1 and decided(NOTHING).p == 1
    assert every(["holds"]).p is None and decided(Figure(1, 0, 1, 1, 5)).p == 0


def test_the_record_of_a_claim():
    record = Claim(
        "A beats B", "1 against 2", "200 points", all_decided([UP, UNSURE._replace(n=10)]), scale=100
    ).record()
    assert record["verdict"] == "not clear" and record["n"] == [10, 90] and record["factor"] == 0.5
    assert record["figures"] == [[200, 100, 300], [50, -50, 150]] and record["reach"] == 150
    plain = Claim("A beats B", "", "it does", "holds").record()
    assert (plain["verdict"], plain["n"], plain["p"]) == ("holds", [], None)
